"""Every recipe in ``examples/recipes``: it is read, its method and parameters are known, and it says what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mergekit.common import ModelReference

from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import DATASET_PREFIX, source_key
from mergekit_slta.recipe.recipe import Recipe, calibration_problems
from mergekit_slta.recipe.settings import SltaSettings

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yml"))
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def hub_names(reference: ModelReference) -> list[str]:
    return [path.path for path in (reference.model, reference.lora) if path is not None]


def test_there_are_recipes_for_every_kind_of_method() -> None:
    assert {"slta", "featcal", "actmat"} <= {Recipe.load(path).config.merge_method for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_sound(path: Path) -> None:
    recipe = Recipe.load(path)
    assert not recipe.problems
    assert recipe.config.dtype == "float32" and recipe.config.out_dtype == "bfloat16"
    for reference in recipe.references:
        assert all(HUB_NAME.fullmatch(name) for name in hub_names(reference)), reference
    if recipe.method.runs_models:
        settings = recipe.settings
        named = isinstance(settings, SltaSettings) and settings.statistics.startswith(DATASET_PREFIX)
        assert named or not calibration_problems(recipe)
        for expert in recipe.experts:
            kind, name, *_ = source_key(expert.calibration)
            assert kind == "dataset" and HUB_NAME.fullmatch(name)
            assert not expert.template or template_fields(expert.template)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_needs_and_how_to_run_it(path: Path) -> None:
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    for word in ("Download:", "Disk:", "Memory:", "License:", f"mergekit-yaml {path.name}"):
        assert word in comments, word
