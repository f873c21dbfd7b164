"""A recipe examined as a whole, and the same through mergekit's own command."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import MakeFamily
from mergekit.scripts.run_yaml import main as mergekit_yaml
from support import families
from support.copies import edit_tensors
from support.examining import grow, look, only, problems, save_random, t5
from support.families import Family
from support.hub import serve

from mergekit_slta.checks.examine import check
from mergekit_slta.host import patches

# What is looked at


def test_looks_at_headers_and_not_at_weights(family: Family) -> None:
    """A checkpoint whose weights are a hole in a file larger than any memory is examined like any other."""
    for folder in family.folders:
        grow(folder, 2**41)
    assert problems(families.recipe(family)) == []


def test_models_on_the_hub_are_examined_without_a_download(family: Family, tmp_path: Path) -> None:
    recipe = families.recipe(family, experts=[0, 1], samples=6)
    recipe["base_model"] = "org/base"
    for entry, name in zip(recipe["models"], ("expert", "other"), strict=True):
        entry["model"] = f"org/{name}"
    organization = tmp_path / "hub" / "org"
    shutil.copytree(family.base, organization / "base")
    shutil.copytree(family.experts[0], organization / "expert")
    save_random(families.config_of("llama", num_hidden_layers=4), organization / "other")
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        assert "The expert org/other has num_hidden_layers 4 instead of 3" in only(recipe)
        del recipe["models"][1]
        assert problems(recipe) == []
    assert "model.safetensors" not in hub.fetched


def test_the_frame_of_a_sound_recipe_holds_the_sentences_that_are_printed(family: Family) -> None:
    found = check(families.recipe_of(family.base, dict(zip(family.experts, family.data, strict=True)), samples=2))
    frame = found.to_frame()
    assert frame["sentence"].tolist() == str(found).replace("Note: ", "").splitlines()
    assert frame["kind"].tolist() == ["verdict", *["note"] * len(found.notes), *["need"] * 3]


# What is advised against


def test_half_precision_is_advised_against(make_family: MakeFamily) -> None:
    family = make_family(dtype=torch.bfloat16)
    recipe = families.recipe(family, samples=6)
    assert look(recipe).notes == []
    for dtype in ("bfloat16", None):
        (note,) = look(recipe | {"dtype": dtype}).notes
        assert "set 'dtype: float32' and 'out_dtype: bfloat16'" in note
    assert look(recipe | {"dtype": None}, merging=False).notes == []


# All at once, and through mergekit's own command


def broken_recipe(family: Family, tmp_path: Path) -> dict[str, Any]:
    """A recipe that mergekit itself starts to plan, with three faults: of a model, of data and of a source."""
    recipe = families.recipe(family)
    recipe["models"][0]["parameters"]["calibration"] = str(tmp_path / "none.jsonl")
    del recipe["models"][1]["parameters"]["calibration"]
    edit_tensors(family.experts[2], lambda tensors: tensors.pop("model.norm.weight"))
    return recipe


def test_first_the_text_then_everything_else(family: Family, tmp_path: Path) -> None:
    recipe = broken_recipe(family, tmp_path)
    for words in ("none.jsonl", "has no 'calibration'", "lacks model.norm.weight"):
        assert sum(words in problem for problem in problems(recipe)) == 1
    assert len(problems(recipe)) == 3
    recipe["parameters"] |= {"sampels": 3, "ridge": -1}
    assert [problem.split("'")[1] for problem in problems(recipe)] == ["sampels", "ridge"]


def deeper_expert(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["models"][0]["model"] = str(save_random(families.config_of("llama", num_hidden_layers=4), tmp_path / "x"))
    return "num_hidden_layers 4 instead of 3"


def encoder_decoder(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["base_model"] = str(t5(tmp_path / "t5"))
    recipe["models"] = [{"model": str(t5(tmp_path / "t5x")), "parameters": {"calibration": str(family.data[0])}}]
    return "is an encoder-decoder, which calibration does not cover: use 'merge_method: actmat' instead."


def misspelt(text: str) -> str:
    return f"{text}outdtype: bfloat16\n"


def repeated(text: str) -> str:
    return f"{text}parameters: {{level: layer}}\n"


def repeated_in_an_entry(text: str) -> str:
    return text.replace("- model:", "- model: org/other\n  model:", 1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (misspelt, "Unknown key 'outdtype' in the recipe, did you mean 'out_dtype'?"),
        (repeated, "The recipe is not valid YAML: the key 'parameters' of line "),
        (repeated_in_an_entry, "The recipe is not valid YAML: the key 'model' of line "),
    ],
)
def test_mergekit_yaml_refuses_what_its_own_reader_drops(
    spoil: Callable[[str], str], words: str, family: Family, tmp_path: Path
) -> None:
    patches.install()
    file = families.write_recipe(tmp_path / "recipe.yml", families.recipe(family, samples=2))
    file.write_text(spoil(file.read_text()))
    done = CliRunner().invoke(mergekit_yaml, [str(file), str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 1
    assert words in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spoil", [deeper_expert, encoder_decoder])
def test_mergekit_yaml_refuses_in_one_sentence(
    spoil: Callable[[dict[str, Any], Family, Path], str], family: Family, tmp_path: Path
) -> None:
    patches.install()
    recipe = families.recipe(family)
    words = spoil(recipe, family, tmp_path)
    file = families.write_recipe(tmp_path / "recipe.yml", recipe)
    done = CliRunner().invoke(mergekit_yaml, [str(file), str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    (said,) = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert words in said
    assert not (tmp_path / "out").exists()
