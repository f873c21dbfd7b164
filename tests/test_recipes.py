"""Every recipe in ``examples/recipes``: it reads, passes the check on tiny models, and says what it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mergekit.common import ModelReference
from support import families
from support.adapters import write_adapter
from support.examining import problems

from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import DATASET_PREFIX, source_key
from mergekit_slta.recipe.recipe import Recipe, require_calibration
from mergekit_slta.recipe.settings import SltaSettings

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yml"))
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# The beginning of a recipe's name, and the tiny model of its architecture.
ARCHITECTURES = {
    "gemma-4": "gemma4_vision",
    "llama": "llama",
    "mistral": "mistral",
    "nemo": "mistral",
    "qwen3.6-27b": "qwen3_5",
    "qwen3.6-35b-a3b": "qwen3_5_moe",
}

ADAPTED = "language_model.layers.0.self_attn.q_proj"

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def hub_names(reference: ModelReference) -> list[str]:
    return [path.path for path in (reference.model, reference.lora) if path is not None]


@each_recipe
def test_a_recipe_is_sound(path: Path) -> None:
    recipe = Recipe.load(path)
    recipe.require_sound()
    assert recipe.config.dtype == "float32" and recipe.config.out_dtype == "bfloat16"
    assert all(HUB_NAME.fullmatch(model) for reference in recipe.references for model in hub_names(reference))
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


@each_recipe
def test_a_recipe_passes_the_check_on_tiny_models(path: Path, tmp_path: Path) -> None:
    """The recipe as it is, but for the names of models, and data that are local and have a ``text``."""
    content = yaml.safe_load(path.read_text())
    architecture = next(known for name, known in ARCHITECTURES.items() if path.name.startswith(name))
    family = families.make_family(tmp_path, architecture, experts=len(content["models"]))
    names, options = {content["base_model"]: str(family.base)}, {}
    for index, entry in enumerate(content["models"]):
        model, _, adapter = entry["model"].partition("+")
        names.setdefault(model, str(family.experts[index]))
        entry["model"] = names[model]
        if adapter:
            entry["model"] += f"+{write_adapter(family.base, tmp_path / 'adapter', ADAPTED)}"
            options = {"lora_merge_cache": str(tmp_path / "lora")}
        if content["merge_method"] in ("slta", "featcal"):
            own: dict[str, Any] = {"weight": 1.0} if entry["model"] == str(family.base) else {}
            entry["parameters"] = own | {"calibration": str(family.data[index])}
    content["base_model"] = str(family.base)
    content.get("parameters", {}).pop("statistics", None)
    assert problems(content, options=options) == []
