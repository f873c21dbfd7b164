"""Scores from Gram matrices, and from a recipe to the numbers."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import WriteRecipe
from support import families, linearity_values
from support.command import run
from support.families import Family
from support.linearity_values import assert_same, plan_of
from support.rounding import IN_FLOAT64

from mergekit_slta.nonlinearity.result import Value, pool_values
from mergekit_slta.nonlinearity.studies import linearity, plan_studies


def test_pooled_values_are_those_of_all_numbers() -> None:
    parts = [torch.randn(4).double(), torch.randn(9).double() + 2, torch.full((2,), math.nan).double()]
    everything = torch.cat(parts[:2])
    found = pool_values([Value.of(part) for part in parts])
    assert found.n == 13
    assert found.mean == pytest.approx(everything.mean().item(), abs=IN_FLOAT64)
    assert found.std == pytest.approx(everything.std(correction=0).item(), abs=IN_FLOAT64)
    assert math.isnan(pool_values([Value.of(parts[2])]).mean)


def test_a_recipe_is_measured_on_its_first_samples(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = families.experiment(families.recipe(llama))
    names = tuple(folder.name for folder in llama.experts)
    monkeypatch.setattr(linearity_values, "NAMES", names)
    tasks = [task[:2] for task in llama.token_ids()]
    planned = linearity_values.plan_of(llama, ("layer",), plan_studies(3, pairs=False), tasks)
    found = linearity(experiment, "layer", samples=2, pairs=False)
    assert (found.experts, found.samples) == (names, (2, 2, 2))
    assert {expert.samples for expert in experiment.recipe.experts} == {30}
    assert_same(found, planned.measure(), 0)


def test_the_command_says_the_passes_first(llama: Family, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    arguments = ["linearity", write_recipe(llama), "-o", tmp_path / "new", "--samples", 1, "--no-pairs"]
    said = run(*arguments, "--level", "layer", "--level", "model").output
    planned = plan_of(llama, ("model", "layer"), plan_studies(3, pairs=False), [t[:1] for t in llama.token_ids()])
    assert f"{planned.passes} forward passes" in said.split("Measuring")[0]
    assert re.search(r"^layer +\S+ ± ", said, re.MULTILINE)
    assert json.loads((tmp_path / "new" / "linearity.json").read_text())["non_linearity"].keys() == {"model", "layer"}
