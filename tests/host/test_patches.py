"""What mergekit does otherwise with its functions replaced."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import mergekit.card
import mergekit.merge
import pytest
from mergekit.architecture import auto
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from mergekit.scripts import run_yaml
from support import families
from support.command import run
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.host import patches
from mergekit_slta.recipe.recipe import Recipe


@pytest.mark.parametrize("method", ["actmat", "task_arithmetic"])
def test_a_folder_named_without_a_dot_is_a_folder(
    method: str, llama: Family, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network, mergekit would fail when it writes the card, after the weights and before the tokenizer."""
    monkeypatch.setattr(mergekit.card.huggingface_hub, "repo_exists", mock.Mock(side_effect=OSError("no network")))
    names = ["base", "models/math", "code", "models/law"]
    for source, name in zip(llama.folders, names, strict=True):
        shutil.copytree(source, name)
    families.write_tokenizer(Path("base"))
    per_expert = {"weight": 0.5} if method == "task_arithmetic" else None
    content = families.recipe(llama, method, calibration=False, per_expert=per_expert)
    content["base_model"] = names[0]
    for entry, name in zip(content["models"], names[1:], strict=True):
        entry["model"] = name
    recipe = families.write_recipe(Path("recipe.yml"), content)
    run(recipe, "out", "--quiet", program=run_yaml.main)
    assert Path("out/tokenizer.json").is_file()
    assert "huggingface.co/models" not in Path("out/README.md").read_text()


def test_a_recipe_may_come_from_a_pipe_and_the_folder_as_a_path(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False)
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=[json.dumps(content)]).start()
    run(tmp_path / "pipe", tmp_path / "out", "--quiet", program=run_yaml.main)
    out: Any = tmp_path / "other"
    mergekit.merge.run_merge(MergeConfiguration.model_validate(content), out, MergeOptions())
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_configuration_is_merged_by_one_method_after_another(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False, per_expert={"weight": 0.5})
    config = MergeConfiguration.model_validate(content)
    for method in ("task_arithmetic", "actmat"):
        config.merge_method = method
        mergekit.merge.run_merge(config, str(tmp_path / method), MergeOptions())
        assert (tmp_path / method / "model.safetensors").exists()


def test_an_adapter_that_is_not_merged_is_no_model(llama: Family, tmp_path: Path) -> None:
    """As mergekit-moe reads it; only the names of a model's tensors do not depend on its adapter."""
    adapted = ModelReference.parse(f"{llama.base}+{tmp_path}")
    with pytest.raises(AssertionError, match="LoRA not merged"):
        adapted.lazy_loader()
    assert len(auto.get_model_tensor_names(adapted, MergeOptions())) == 30


def test_models_are_listed_in_the_recipes_order() -> None:
    names = [f"org/expert{number}" for number in range(12)]
    content = {"merge_method": "linear", "base_model": "org/base", "models": [{"model": name} for name in names]}
    assert list(map(str, MergeConfiguration.model_validate(content).referenced_models())) == ["org/base", *names]


@pytest.mark.parametrize(
    "text",
    [
        None,  # no such file
        "a: [1\nb: 2",
        "merge_method: featcal\nbase_model: a\nmodels: [{model: b, parameters: {calibratoin: x}}]\nparametres: {}",
    ],
)
def test_what_is_no_recipe_is_refused_by_mergekits_command_in_the_sentences_of_check(
    text: str | None, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yml"
    if text is not None:
        recipe.write_text(text)
    said = run(recipe, tmp_path / "out", program=run_yaml.main, code=1).output
    with pytest.raises(SltaError) as refused:
        Recipe.load(recipe).require_sound()
    assert said == f"Error: {refused.value}\n"
    assert not (tmp_path / "out").exists()


def test_a_changed_mergekit_is_refused_in_a_sentence() -> None:
    with pytest.raises(ImportError, match=r"has changed mergekit\.merge\.run_merge, .* in mergekit 0\.1\.5: install"):
        patches.replaces(mergekit.merge, "run_merge", "config", "folder")
    with pytest.raises(ImportError, match=r"has changed mergekit\.merge\.run_merges"):
        patches.replaces(mergekit.merge, "run_merges", "config")
