"""Progress bars that say what is loaded, and then count layers and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from mergekit_slta.engine.accumulator import Progress

BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


@contextmanager
def progress_bar(
    doing: str, models: Iterable[object], total: int, quiet: bool
) -> Iterator[Callable[[str, int], object]]:
    """Show which share of the work is done; yield what is told of what is at hand, and of the steps that it took."""
    loading = f"{doing}: loading {', '.join(Path(str(model)).name for model in models)}"
    with tqdm(total=total, desc=loading, bar_format=BAR, leave=False, disable=quiet) as bar:

        def progress(at_hand: str, steps: int) -> None:
            bar.set_description_str(f"{doing}: {at_hand}", refresh=False)
            bar.update(steps)

        yield progress


@contextmanager
def layer_bar(doing: str, models: Iterable[object], layers: int, prompts: int, quiet: bool) -> Iterator[Progress]:
    """Count the layers, and the prompts in each; yield what is told of prompts that have passed another layer."""
    done = 0
    with progress_bar(doing, models, layers * prompts, quiet) as tell:

        def progress(passed: int) -> None:
            nonlocal done
            done += passed
            layer, prompt = divmod(max(0, done - 1), prompts)
            tell(f"layer {layer + 1} of {layers}, {prompt + 1} of {prompts} prompts", passed)

        yield progress
