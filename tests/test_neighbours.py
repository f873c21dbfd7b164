"""mergekit's other methods write the same bytes with the plugin and without it."""

from __future__ import annotations

import hashlib
import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from support import families
from support.families import Family
from support.processes import run_afresh

METHODS: dict[str, dict[str, Any]] = {
    "linear": {"weight": 0.5},
    "slerp": {},
    "task_arithmetic": {"weight": 0.5},
    "ties": {"weight": 0.5, "density": 0.5},
    "dare_ties": {"weight": 0.5, "density": 0.5},
    "dare_linear": {"weight": 0.5, "density": 0.5},
    "della": {"weight": 0.5, "density": 0.5, "epsilon": 0.1},
    "breadcrumbs": {"weight": 0.5, "density": 0.5},
    "model_stock": {},
    "karcher": {},
    "multislerp": {"weight": 0.5},
    "sce": {},
}
MERGE_ALL = """
import sys, pathlib
sys.meta_path[:] = [finder for finder in sys.meta_path if "mergekit_slta" not in type(finder).__module__]
if sys.argv[1] == "with":
    from mergekit_slta import startup
    startup.install()
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import registered_methods
from mergekit.options import MergeOptions
assert any(method.spec.name == "slta" for method in registered_methods()) == (sys.argv[1] == "with")
for recipe in sorted(pathlib.Path(sys.argv[2]).glob("*.yml")):
    config = MergeConfiguration.model_validate(yaml.safe_load(recipe.read_text()))
    run_merge(config, str(pathlib.Path(sys.argv[3]) / recipe.stem), MergeOptions(quiet=True, random_seed=1))
"""


def digests(folder: Path) -> dict[str, str]:
    """Of every file; a model card's lines are sorted, because mergekit lists the models from a set."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        name: hashlib.sha256(b"\n".join(sorted(content.splitlines())) if name.endswith(".md") else content).hexdigest()
        for name, content in found.items()
    }


@pytest.fixture(scope="module")
def outputs(
    llama: Family, forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """The files that each method writes, by method, with the plugin and without."""
    folder = tmp_path_factory.mktemp("neighbours")
    for method, own in METHODS.items():
        experts = [0] if method == "slerp" else [0, 1]
        content = families.recipe(llama, method, experts=experts, calibration=False, per_expert=own)
        if method == "slerp":
            content["parameters"] = {"t": 0.3}
        if method in ("linear", "karcher", "multislerp"):
            del content["base_model"]
        families.write_recipe(folder / f"{method}.yml", content)
    found = {}
    for which in ("with", "without"):
        run_afresh(forks, MERGE_ALL, which, folder, folder / which)
        found[which] = digests(folder / which)
    return found


def test_other_methods_write_the_same_bytes(outputs: dict[str, dict[str, str]]) -> None:
    assert outputs["with"] == outputs["without"]
    assert {name.split("/")[0] for name in outputs["with"]} == set(METHODS)
    assert json.dumps(outputs["with"]).count("model.safetensors") == len(METHODS)
