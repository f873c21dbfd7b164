"""A recipe's models and data are opened as it says, and what is wrong outside the layers is found."""

from __future__ import annotations

import pytest
from conftest import MakeFamily
from support import copies, families
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.measure import measured_statistics


def test_options_do_what_they_do_in_mergekit(llama: Family) -> None:
    assert families.experiment(families.recipe(llama), cuda=True).device == "cuda"
    assert families.experiment(families.recipe(llama)).device == "cpu"


def test_values_outside_the_layers_are_looked_at(make_family: MakeFamily) -> None:
    family = make_family(experts=2)
    copies.edit_tensors(family.experts[1], lambda tensors: tensors["lm_head.weight"][3].fill_(float("nan")))
    experiment = families.experiment(families.recipe(family))
    experiment.check_edges(experts=False)
    with pytest.raises(SltaError, match=r"expert1.*lm_head\.weight|lm_head\.weight.*expert1"):
        experiment.check_edges(experts=True)


def test_an_option_that_mergekit_does_not_know_is_refused(llama: Family) -> None:
    with pytest.raises(TypeError, match="mergekit has no option levels"):
        Experiment(Recipe(str(llama.base), {"a": "a.jsonl"}), levels=["layer"])


def test_a_slice_must_cover_all_layers(llama: Family) -> None:
    content = families.recipe(llama)
    models = [{"model": content["base_model"]}, *content.pop("models")]
    content["slices"] = [{"sources": [entry | {"layer_range": [0, 2]} for entry in models]}]
    with pytest.raises(SltaError, match="takes layers 0-2 of 3: only whole models can be calibrated"):
        measured_statistics(families.experiment(content))
