"""What a merge takes, against sizes counted by hand, and a disk that has room for it."""

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from mergekit.common import ModelReference
from support import families
from support.adapters import write_adapter
from support.examining import feature_recipe, look, problems
from support.families import Family
from support.hub import serve

from mergekit_slta.checks.examine import check
from mergekit_slta.checks.space import Needs, machine_memory, needs
from mergekit_slta.engine.memory import LIBRARIES
from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.models.adapters import merge_adapter
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.tables import as_size

WIDTH, MLP, VOCABULARY, LAYERS = 32, 48, 64, 3
LAYER = 2 * WIDTH**2 + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * MLP + 2 * WIDTH  # two key/value heads of four
EMBEDDING = VOCABULARY * WIDTH
WHOLE = LAYERS * LAYER + 2 * EMBEDDING + WIDTH


def needed(family: Family, method: str, **parameters: Any) -> Needs:
    return needs(families.experiment(families.recipe(family, method, **parameters)))


def test_the_disk(llama: Family) -> None:
    found = needed(llama, "featcal", out_dtype="bfloat16")
    assert found.merged == 2 * WHOLE and found.solved == 4 * (LAYERS * LAYER + EMBEDDING) and found.download == {}
    assert needed(llama, "slta").merged == 4 * WHOLE and needed(llama, "slta").solved == 0


def test_adapters_take_a_whole_model_each_in_the_folder_that_the_next_command_names(
    llama: Family, tmp_path: Path
) -> None:
    adapter, cache = write_adapter(llama.base, tmp_path / "adapter", "q_proj"), str(tmp_path / "my adapters")
    content = families.recipe(llama, "actmat", calibration=False, experts=[0])
    content["models"].append({"model": f"{llama.base}+{adapter}"})
    recipe = tmp_path / "merge.yml"
    recipe.write_text(json.dumps(content))
    findings = check(recipe, lora_merge_cache=cache)
    assert findings.needs is not None and findings.needs.adapters == 4 * WHOLE
    assert "for the merged adapters" in str(findings.needs)
    in_base_type = check(Recipe(content | {"dtype": "bfloat16"}), lora_merge_cache=cache).needs
    assert in_base_type is not None and in_base_type.adapters == 4 * WHOLE
    wide = check(Recipe(content | {"dtype": "float64", "out_dtype": "bfloat16"}), lora_merge_cache=cache).needs
    assert wide is not None and wide.memory == LIBRARIES + 8 * WHOLE  # more than the merge takes
    assert f"to merge an adapter, which no GPU does; then {as_size(wide.of_run)}" in str(wide)
    assert str(findings).count(f"--lora-merge-cache {shlex.quote(cache)}") == 1
    in_python = str(check(Recipe(content), lora_merge_cache=cache))
    assert "merge(recipe, './merged-actmat') with the same options" in in_python


def test_a_recipe_of_models_on_the_hub_is_checked_without_their_weights(llama: Family, tmp_path: Path) -> None:
    repositories = tmp_path / "hub" / "org"
    for folder in llama.folders[:3]:
        shutil.copytree(folder, repositories / folder.name)
    content = families.recipe(llama, experts=[0, 1])
    for entry in content["models"]:
        entry["model"] = f"org/{Path(entry['model']).name}"
    content["base_model"] = "org/base"
    recipe = Recipe(content)
    with serve(repositories.parent, tmp_path / "cache") as hub:
        found = check(recipe, transformers_cache=str(tmp_path / "cache"))
    assert found.problems == []
    download, disk, _ = str(found.needs).splitlines()
    each = f"{4 * WHOLE / 1e3:.0f} KB"
    total = f"{3 * 4 * WHOLE / 1e3:.0f} KB"
    assert download == f"Download: {total} (org/base {each}, org/expert0 {each}, org/expert1 {each})"
    assert disk == f"Disk: {4 * 4 * WHOLE / 1e3:.0f} KB ({total} for the download, {each} for the merged model)"
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


def test_the_layers_of_a_killed_merge_need_no_second_room(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = feature_recipe(family, experts=[0, 1])
    found = needs(families.experiment(recipe))
    usage = shutil.disk_usage("/")._replace(free=found.merged + found.solved // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found_full = look(recipe, out_path=tmp_path / "out")
    assert "too little for" in found_full.problems[0] and found_full.exit_code == 3
    (tmp_path / "out" / PARTIAL_OF_MERGE).mkdir(parents=True)
    with (tmp_path / "out" / PARTIAL_OF_MERGE / "layer-0000.safetensors").open("wb") as file:
        file.truncate(found.solved // 2 + 1)
    assert problems(recipe, out_path=tmp_path / "out") == []


def test_a_containers_or_a_jobs_memory_counts(tmp_path: Path) -> None:
    group, named = tmp_path / "job" / "step", tmp_path / "cgroup"
    group.mkdir(parents=True)
    named.write_text("0::/job/step\n")
    whole = machine_memory(str(named), str(tmp_path))
    assert whole == machine_memory(str(tmp_path / "none")) > 10**8
    for folder, limit, found in ((group, "max", whole), (group.parent, "12345678", 12345678), (group, "99", 99)):
        (folder / "memory.max").write_text(f"{limit}\n")
        assert machine_memory(str(named), str(tmp_path)) == found


def test_adapters_that_were_merged_before_need_no_room_again(llama: Family, tmp_path: Path) -> None:
    adapter, cache = write_adapter(llama.base, tmp_path / "adapter"), tmp_path / "cache"
    content = families.recipe(llama, "actmat", calibration=False, experts=[0])
    content["models"].append({"model": f"{llama.base}+{adapter}"})
    free = SimpleNamespace(free=4 * WHOLE - 1)
    with mock.patch.object(shutil, "disk_usage", return_value=free):
        assert "too little for the merged adapters" in str(check(Recipe(content), lora_merge_cache=str(cache)))
        merge_adapter(ModelReference.parse(f"{llama.base}+{adapter}"), str(cache))
        assert "too little" not in str(check(Recipe(content), lora_merge_cache=str(cache)))
