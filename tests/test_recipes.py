"""Every recipe in ``examples/recipes``: it is read, its method and parameters are known, and it says what it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from mergekit.common import ModelReference
from mergekit.scripts.multimerge import load_config

from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import DATASET_PREFIX, source_key
from mergekit_slta.recipe.recipe import Recipe, require_calibration
from mergekit_slta.recipe.settings import SltaSettings

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yml"))
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def hub_names(reference: ModelReference) -> list[str]:
    return [path.path for path in (reference.model, reference.lora) if path is not None]


def stages(path: Path) -> Iterator[tuple[str | None, Recipe]]:
    """The name and the recipe of each stage; a recipe for mergekit-yaml is one stage without a name."""
    for content in yaml.safe_load_all(path.read_text()):
        name = content.pop("name", None)
        yield name, Recipe.parse(yaml.safe_dump(content, sort_keys=False), path)


@each_recipe
def test_a_recipe_is_sound(path: Path) -> None:
    earlier: set[str | None] = set()
    for name, recipe in stages(path):
        recipe.require_sound()
        assert recipe.config.dtype == "float32" and recipe.config.out_dtype == "bfloat16"
        for reference in recipe.references:
            if str(reference) not in earlier:
                assert all(HUB_NAME.fullmatch(model) for model in hub_names(reference)), reference
        if recipe.method.runs_models:
            settings = recipe.settings
            named = isinstance(settings, SltaSettings) and settings.statistics.startswith(DATASET_PREFIX)
            require_calibration(recipe, statistics=named)
            for task in recipe.tasks:
                if named and not task.calibration:
                    continue
                kind, dataset, *_ = source_key(task.calibration)
                assert kind == "dataset" and HUB_NAME.fullmatch(dataset)
                assert not task.template or template_fields(task.template)
        earlier.add(name)


@pytest.mark.parametrize("path", [path for path in RECIPES if len(list(stages(path))) > 1], ids=lambda path: path.stem)
def test_every_stage_is_used_and_the_last_has_no_name(path: Path) -> None:
    configurations, needed = load_config(path.read_text(), "stages")
    assert list(configurations)[-1] is None
    assert set.union(*needed.values()) == set(configurations) - {None}


def test_the_page_of_recipes_lists_them() -> None:
    page = (FOLDER.parents[1] / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `examples/recipes/(.+?)` \|", page, re.MULTILINE)) == {path.name for path in RECIPES}


@each_recipe
def test_a_recipe_says_what_it_needs_and_how_to_run_it(path: Path) -> None:
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    program = "mergekit-multi" if len(list(stages(path))) > 1 else "mergekit-yaml"
    for word in ("Download:", "Disk:", "Memory:", "License:", f"{program} {path.name}"):
        assert word in comments, word
