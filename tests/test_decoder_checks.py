"""Models whose layers cannot be run, or do not split as the recipe wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import transformers
from conftest import MakeFamily
from examining import feature_recipe, only, problems, save_random, t5, with_expert
from families import Family


def bert(folder: Path) -> Path:
    config = transformers.RobertaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return save_random(config, folder, "RobertaForMaskedLM")


def clip(folder: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=sizes | {"vocab_size": 64},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    return save_random(config, folder, "CLIPModel")


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (bert, "RobertaForMaskedLM is no decoder-only language model"),
        (clip, "CLIPModel has several modules"),
    ],
)
def test_models_that_are_no_decoder(family: Family, tmp_path: Path, save: Callable[[Path], Path], words: str) -> None:
    recipe = with_expert(family, save(tmp_path / "expert")) | {"base_model": str(save(tmp_path / "base"))}
    del recipe["models"][0]
    assert only(recipe, merging=False) == (
        f"{words}, which calibration does not cover: use 'merge_method: sftm' instead."
    )


def test_a_feature_merge_of_what_is_no_decoder(family: Family, tmp_path: Path) -> None:
    recipe = feature_recipe(family, experts=[0]) | {"base_model": str(t5(tmp_path / "base"))}
    recipe["models"][0]["model"] = str(t5(tmp_path / "expert"))
    assert "T5ForConditionalGeneration is an encoder-decoder" in only(recipe, merging=False)


def test_a_slice_that_is_not_the_whole_depth(family: Family) -> None:
    recipe = families.recipe(family)
    models = [{"model": recipe["base_model"]}, *recipe.pop("models")]
    recipe["slices"] = [{"sources": [entry | {"layer_range": [0, families.LAYERS]} for entry in models]}]
    assert problems(recipe) == []
    recipe["slices"][0]["sources"][1]["layer_range"] = [0, 2]
    assert "takes layers 0-2 of 3" in only(recipe)


@pytest.mark.parametrize(
    ("method", "parameters"), [("slta", {}), ("featcal", {"anchor": "base"}), ("featcal", {"anchor": "slta"})]
)
def test_layers_that_cannot_be_run_one_at_a_time(
    method: str, parameters: dict[str, Any], make_family: MakeFamily
) -> None:
    family = make_family(
        transformers.RwkvConfig(vocab_size=families.VOCABULARY, hidden_size=32, num_hidden_layers=3), experts=2
    )
    problem = only(families.recipe(family, method, **parameters))
    assert problem.startswith("The layers of RwkvForCausalLM cannot be run one at a time (ValueError: ")
    assert problem.endswith("it can be merged with 'merge_method: sftm'.")


def test_a_level_that_the_layers_do_not_have(make_family: MakeFamily) -> None:
    family = make_family("lfm2")
    assert problems(families.recipe(family)) == []
    problem = only(families.recipe(family, level="head_mlp"))
    assert problem == "Layer 0 mixes tokens by Lfm2ShortConv, which has no heads: use attn_mlp."


def test_an_slta_anchor_needs_layers_with_branches(make_family: MakeFamily) -> None:
    family = make_family("opt")
    problem = only(feature_recipe(family, anchor="slta"))
    assert "does not split into an attention and an MLP branch" in problem
    assert "'anchor'" in problem and "'level" not in problem  # which this method does not have
    for anchor in ("base", "average"):
        assert problems(feature_recipe(family, anchor=anchor)) == []
