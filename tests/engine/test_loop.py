"""What progress bars say, and that float32 products are exact inside the loop, whatever torch's settings are."""

import functools
import io
import re
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.families import Family
from support.processes import run_afresh
from support.rounding import rounding
from tqdm import tqdm

from mergekit_slta.engine import loop as module
from mergekit_slta.evaluation.evaluate import evaluate
from mergekit_slta.featcal.merge import FeatureMerge
from mergekit_slta.models.checkpoint import Tensors
from mergekit_slta.nonlinearity.studies import linearity
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.grams import Calibration
from mergekit_slta.slta.measure import measure

Run = Callable[[Recipe, Family], object]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """All that bars show on a terminal, each step of them."""
    file = Terminal()
    monkeypatch.setattr(module, "tqdm", functools.partial(tqdm, file=file, mininterval=0, miniters=1, ncols=200))
    return file


def lines(shown: io.StringIO) -> list[str]:
    return [line.strip() for line in re.split(r"[\r\n]+", shown.getvalue()) if line.strip()]


@pytest.mark.parametrize(
    ("doing", "models", "run"),
    [
        ("Calibrating attn_mlp", 3, lambda recipe, family: measure(recipe)),
        ("Evaluating expert expert1, 3 of 4 models", 1, lambda recipe, family: evaluate(recipe, family.base)),
        ("Measuring linearity, study 3 of 3", 3, lambda recipe, family: linearity(recipe, "layer", samples=3)),
    ],
)
def test_what_runs_models_says_what_it_loads_and_ends_with_all_prompts(
    doing: str, models: int, run: Run, llama: Family, shown: io.StringIO
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tqdm warns of more than all
        run(Recipe(families.recipe(llama, experts=[0, 1], samples=3)), llama)
    said = [line for line in lines(shown) if f" {doing}: " in line]
    loading = said[0].partition(f" {doing}: loading ")[2].split(", ")
    assert said[0].startswith("0%|") and len(loading) == models
    layers = llama.config.num_hidden_layers
    assert said[-1].startswith("100%|") and said[-1].endswith(f" {doing}: {layers} of {layers} layers")
    assert all(int(re.findall(r"(\d+)%", line)[0]) <= 100 for line in said)


def test_a_feature_merge_says_which_layer_it_solves(llama: Family, tmp_path: Path, shown: io.StringIO) -> None:
    families.merge(families.recipe(llama, "featcal", experts=[0, 1], samples=3), tmp_path / "out", quiet=False)
    said, layers = lines(shown), llama.config.num_hidden_layers
    assert " Solving: loading " in said[0] and llama.experts[1].name in said[0]
    assert any(f" Solving: {layers} of {layers} layers, " in line for line in said)
    assert said[-1].startswith("100%|")


def test_without_a_terminal_lines_come_while_a_step_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.001)
    for quiet in (True, False):
        with module.progress_bar("Solving", ["org/base"], 4, quiet) as progress:
            progress("layer 1 of 2", 1)
            time.sleep(0.05)
            while not ("25%" in (said := capsys.readouterr().err) or quiet):
                time.sleep(0.01)
        assert said == "" if quiet else said.endswith(" Solving: layer 1 of 2, 25%\n")


@pytest.mark.parametrize("method", [FeatureMerge, Calibration])
def test_no_layer_waits_beside_the_head(
    method: Any, llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    take_layer, finish = method.take_layer, method.finish

    def watched(self: Any, layer: int, tensors: Sequence[Tensors], *others: Any) -> Tensors:
        result: Tensors = take_layer(self, layer, tensors, *others)
        solved = [result] if method is FeatureMerge else []  # Gram matrices wait
        alive.extend(weakref.ref(tensor) for model in [*tensors, *solved] for tensor in model.values())
        return result

    def after_all(self: Any, *others: Any) -> Any:
        assert alive and not any(tensor() is not None for tensor in alive)
        return finish(self, *others)

    monkeypatch.setattr(method, "take_layer", watched)
    monkeypatch.setattr(method, "finish", after_all)
    name = "featcal" if method is FeatureMerge else "slta"
    families.merge(families.recipe(llama, name, experts=[0, 1], samples=3), tmp_path / "out")


# Inside, torch's settings are changed; afterwards they are as before.
ROUNDED = """
import sys, torch
from mergekit_slta.engine.loop import exact_products
exec(sys.argv[1])
matmul, conv, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn
owners = matmul, conv, mkldnn.matmul, mkldnn.conv

def settings():
    found = [owner.fp32_precision for owner in owners]
    try:
        return [*found, torch.get_float32_matmul_precision()]
    except RuntimeError:  # it refuses to say what was set by the newer interface
        return found

before = settings()
assert "tf32" in before or "bf16" in before
with exact_products():
    assert not {"tf32", "bf16"} & {owner.fp32_precision for owner in owners}
    one, other = torch.randn(7, 1024), torch.randn(1024, 512)
    exact = one.double() @ other.double()
    assert (one @ other - exact).norm() < float(sys.argv[2]) * exact.norm()
    torch.nn.functional.conv1d(torch.ones(1, 4, 9), torch.ones(4, 4, 3))
assert settings() == before
with torch.autocast("cpu"), exact_products():
    assert (one @ other).dtype == torch.float32
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="needs torch's newer interface")
@pytest.mark.parametrize(
    "allowed",
    [
        "pass",  # convolutions, as torch has it
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'bf16'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.set_float32_matmul_precision('medium')",
    ],
)
def test_nothing_is_rounded_however_that_was_allowed(allowed: str, forks: ForkServerContext) -> None:
    run_afresh(forks, ROUNDED, allowed, rounding(sums=1, terms=1024))
