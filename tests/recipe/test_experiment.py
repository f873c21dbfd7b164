"""A recipe's models and data are opened as it says, and what is wrong outside the layers is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MakeFamily
from support import families
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.lookup import measure, measured_statistics


def test_an_option_that_mergekit_does_not_know_is_refused(llama: Family) -> None:
    with pytest.raises(TypeError, match="mergekit has no option levels"):
        Experiment(families.recipe_of(str(llama.base), {"a": "a.jsonl"}), levels=["layer"])


def test_a_slice_must_cover_all_layers(llama: Family) -> None:
    content = families.recipe(llama)
    models = [{"model": content["base_model"]}, *content.pop("models")]
    content["slices"] = [{"sources": [entry | {"layer_range": [0, 2]} for entry in models]}]
    with pytest.raises(SltaError, match="takes layers 0-2 of 3: only whole models can be calibrated"):
        measured_statistics(families.experiment(content))


def test_a_model_of_several_stacks_takes_no_slice(make_family: MakeFamily) -> None:
    content = families.recipe(make_family("gemma3_vision"), "actmat", calibration=False)
    models = [{"model": content["base_model"]}, *content.pop("models")]
    content["slices"] = [{"sources": [{"model": own["model"], "layer_range": [0, 3]} for own in models]}]
    experiment = families.experiment(content)
    experiment.open()
    with pytest.raises(SltaError, match="several stacks of layers.*under 'models'"):
        experiment.adapt_loaders()


def test_a_device_that_is_not_there_is_refused_also_where_everything_is_measured(llama: Family, tmp_path: Path) -> None:
    own = families.recipe_of(llama.base, dict(zip(llama.experts, llama.data, strict=True)), level="layer", samples=2)
    measure(own, quiet=True)
    with pytest.raises(SltaError, match=r"^PyTorch cannot compute on the device 'gpu' \("):
        measure(own, device="gpu", quiet=True)
