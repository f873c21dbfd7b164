"""What progress bars say: what is loaded, then layers and prompts, and never more than all of them."""

import functools
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from support import families
from support.families import Family
from tqdm import tqdm

from mergekit_slta.engine import loop as module
from mergekit_slta.evaluation.evaluate import evaluate
from mergekit_slta.nonlinearity.studies import linearity
from mergekit_slta.recipe.recipe import Recipe
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
    data = {str(expert): str(file) for expert, file in zip(llama.experts[:2], llama.data[:2], strict=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tqdm warns of more than all
        run(families.recipe_of(llama.base, data, samples=3), llama)
    said = [line.split("|")[0] for line in lines(shown) if line.startswith(doing)]
    loading = said[0].removeprefix(f"{doing}: loading ").split(", ")
    assert said[0].endswith(":   0%") and len(loading) == models
    layers = llama.config.num_hidden_layers
    assert re.fullmatch(rf"{doing}: {layers} of {layers} layers, (\d+) of \1 prompts: 100%", said[-1]), said
    assert all(int(re.findall(r"(\d+)%", line)[0]) <= 100 for line in said)


def test_a_feature_merge_says_which_layer_it_solves(llama: Family, tmp_path: Path, shown: io.StringIO) -> None:
    families.merge(families.recipe(llama, "featcal", experts=[0, 1], samples=3), tmp_path / "out", quiet=False)
    said, layers = lines(shown), llama.config.num_hidden_layers
    assert said[0].startswith("Solving: loading ") and llama.experts[1].name in said[0]
    assert any(line.startswith(f"Solving: {layers} of {layers} layers, ") for line in said)
    assert said[-1].split("|")[0].endswith(": 100%")
