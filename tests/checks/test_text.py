"""What a recipe's text is found to say wrongly, and what its types and paths are noted for."""

from __future__ import annotations

import pytest
import torch
from conftest import MakeFamily
from support import families
from support.examining import feature_recipe, look, only, problems
from support.families import Family


def test_the_recipe_text_and_keys_without_effect(family: Family) -> None:
    recipe = families.recipe(family, sampels=3)
    recipe["models"][0]["template"] = "{text}"
    dropped, unknown = problems(recipe)
    assert dropped.startswith("'template' in the entry of") and "put it under 'parameters'" in dropped
    assert unknown.endswith("did you mean 'samples'?")


@pytest.mark.parametrize("method", ["slta", "sftm"])
def test_no_base_model(family: Family, method: str) -> None:
    recipe = families.recipe(family, method, calibration=method == "slta")
    del recipe["base_model"]
    assert only(recipe).startswith("The recipe has no base_model")


def test_types_that_mergekit_does_not_know(family: Family) -> None:
    first, second = problems(families.recipe(family, dtype="fp32", out_dtype="int8"))
    assert first.startswith("'dtype: fp32' is not a data type for a merge: write bfloat16,")
    assert second.startswith("'out_dtype: int8'")


@pytest.mark.parametrize("template", ["chatml", "auto", "{{ messages[0]['content'] }}", None])
def test_chat_templates_that_mergekit_takes(family: Family, template: str | None) -> None:
    assert problems(families.recipe(family) | {"chat_template": template}) == []


@pytest.mark.parametrize("template", ["chatlm", "./template.jinja", "{{ short }}"])
def test_chat_templates_that_mergekit_refuses_after_the_merge(family: Family, template: str) -> None:
    recipe = families.recipe(family) | {"chat_template": template}
    assert only(recipe).startswith(f"'chat_template: {template}' is not one that mergekit knows: write auto, alpaca, ")


def test_wrong_values_of_a_feature_merge(family: Family) -> None:
    found = problems(feature_recipe(family, anchor="foo", ridge=-1, head="perhaps"))
    assert [problem.split("'")[1] for problem in found] == ["anchor", "ridge", "head"]


def test_half_precision_is_advised_against(make_family: MakeFamily) -> None:
    family = make_family(dtype=torch.bfloat16)
    recipe = families.recipe(family, samples=6)
    assert look(recipe).notes == []
    for dtype in ("bfloat16", None):
        (note,) = look(recipe | {"dtype": dtype}).notes
        assert "set 'dtype: float32' and 'out_dtype: bfloat16'" in note
    assert look(recipe | {"dtype": None}, merging=False).notes == []


def test_half_precision_of_the_base_model_alone_is_advised_against(make_family: MakeFamily) -> None:
    experts = make_family()
    family = Family(make_family(dtype=torch.float16).base, experts.experts, experts.data, experts.config)
    (note,) = look(families.recipe(family, samples=6) | {"dtype": None}).notes
    assert "set 'dtype: float32' and 'out_dtype: float16'" in note


def test_a_feature_merge_rounds_once_in_any_type(make_family: MakeFamily) -> None:
    recipe = families.recipe(make_family(dtype=torch.bfloat16), "featcal", samples=6)
    notes = [look(recipe | {"dtype": dtype}).notes for dtype in ("float32", "bfloat16")]
    assert notes[0] == notes[1]
