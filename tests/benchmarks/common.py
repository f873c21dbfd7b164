"""What the benchmarks share: their options, synthetic families on disk, medians.

Whatever imports this finds the modules of tests/ too, such as the meter of peak memory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from mergekit_slta.recipe.recipe import Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.memory import PeakMemory

# Hidden size, MLP size, heads, key/value heads, layers: Llama's proportions.
SHAPES = {
    "20m": (512, 1408, 8, 4, 6),
    "60m": (768, 2048, 12, 6, 8),
    "150m": (1024, 2816, 16, 8, 12),
    "350m": (1024, 2816, 16, 8, 28),
    "7b": (4096, 11008, 32, 32, 32),
}
VOCABULARY = 2048
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergekit-slta-benchmarks"


def make_family(folder: Path, size: str, experts: int, layers: int = 0, dtype: str = "bfloat16") -> list[Path]:
    """Write a base model and its experts with random weights, once; returns their folders, the base model's first."""
    hidden, inner, heads, groups, depth = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_hidden_layers=layers or depth,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
    )
    root = folder / f"{size}-{config.num_hidden_layers}-{dtype}"
    folders = [root / "base", *(root / f"expert{number}" for number in range(experts))]
    torch.manual_seed(0)
    for number, target in enumerate(folders):
        if not (target / "config.json").exists():
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            if number:
                model.load_state_dict(AutoModelForCausalLM.from_pretrained(folders[0], dtype="auto").state_dict())
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
            model.save_pretrained(target)
            write_tokenizer(target)
    return folders


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def write_samples(folder: Path, tasks: int, samples: int, tokens: int) -> list[Path]:
    """Write each task's calibration file: ``samples`` lines of ``tokens`` random words."""
    generator = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for task in range(tasks):
        file = folder / f"task{task}-{samples}x{tokens}.txt"
        rows = torch.randint(VOCABULARY, (samples, tokens), generator=generator).tolist()
        file.write_text("\n".join(" ".join(f"w{index}" for index in row) for row in rows))
        files.append(file)
    return files


def make_recipe(folders: Sequence[Path], method: str, samples: int, max_tokens: int, **parameters: Any) -> Recipe:
    """A recipe of a family with data of random words, ``samples`` records of ``max_tokens`` each."""
    base, *experts = folders
    files = write_samples(CACHE, len(experts), samples, max_tokens)
    return Recipe(
        base, dict(zip(experts, files, strict=True)), method, samples=samples, max_tokens=max_tokens, **parameters
    )


@dataclass(frozen=True)
class Setting:
    """What a benchmark of a whole calibration or merge runs on, by the names of its options."""

    size: str
    layers: int
    experts: int
    samples: int
    tokens: int
    device: str
    repeats: int

    def write(self, method: str, **parameters: Any) -> tuple[list[Path], Recipe]:
        """Write the family and its data, once; returns the models' folders and the recipe."""
        folders = make_family(CACHE, self.size, self.experts, self.layers)
        return folders, make_recipe(folders, method, self.samples, self.tokens, **parameters)

    def peak_memory(self, script: str, *arguments: str) -> float:
        """The bytes that a benchmark prints in a process of its own, with these options and further ones."""
        names = ("size", "layers", "experts", "samples", "tokens", "device")
        same = [f"--{name}={getattr(self, name)}" for name in names]
        return in_subprocess(script, [*same, *arguments])["bytes"]

    def described(self) -> dict[str, Any]:
        """What a result says about it."""
        entries = dataclasses.asdict(self) | {"layers": self.layers or SHAPES[self.size][-1]}
        return entries | {"threads": torch.get_num_threads()}


def with_setting(samples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a ``Setting``, its first argument; ``samples`` is their default number."""
    options = [
        click.option("--size", default="60m", show_default=True),
        click.option("--layers", default=0, help="Another depth than the size's own."),
        click.option("--experts", default=3, show_default=True),
        click.option("--samples", default=samples, show_default=True),
        click.option("--tokens", default=128, show_default=True),
        click.option("--device", default="cpu", show_default=True),
        click.option("--repeats", default=3, show_default=True),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            setting = Setting(**{field.name: values.pop(field.name) for field in dataclasses.fields(Setting)})
            be_quiet()
            command(setting, **values)

        return functools.reduce(lambda function, option: option(function), reversed(options), run)

    return decorate


def print_peak_memory(action: Callable[[], object]) -> None:
    """Print the bytes that the action takes at most, for ``Setting.peak_memory``."""
    with PeakMemory() as peak:
        action()
    print(json.dumps({"bytes": peak.bytes}))


def be_quiet() -> None:
    """Keep transformers from saying what it loads."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load(folder: Path, device: str) -> Any:
    """A whole model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device).eval()


def wait_for(device: str) -> None:
    """Go on when the device has done what it was told."""
    if device != "cpu":
        torch.cuda.synchronize()


def timed(
    actions: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The median time of each action in seconds; they take turns, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            start = clock()
            action()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def in_subprocess(script: str, arguments: Sequence[str]) -> dict[str, float]:
    """Run a benchmark file by itself and read the JSON of its last line: memory is measured in a fresh process."""
    command = [sys.executable, script, *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])
