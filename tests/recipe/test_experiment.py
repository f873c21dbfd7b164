"""A recipe's models and data are opened as it says, and what is wrong outside the layers is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.families import Family
from torch.overrides import TorchFunctionMode

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.experiment import Experiment, require_device
from mergekit_slta.slta.lookup import measure


def test_an_option_that_mergekit_does_not_know_is_refused(llama: Family) -> None:
    with pytest.raises(TypeError, match="mergekit has no option levels"):
        Experiment(families.recipe_of(str(llama.base), {"a": "a.jsonl"}), levels=["layer"])


def test_a_device_that_is_not_there_is_refused_also_where_everything_is_measured(llama: Family, tmp_path: Path) -> None:
    own = families.recipe_of(llama.base, dict(zip(llama.experts, llama.data, strict=True)), level="layer", samples=2)
    measure(own, quiet=True)
    with pytest.raises(SltaError, match=r"^PyTorch cannot compute on the device 'gpu' \("):
        measure(own, device="gpu", quiet=True)


class WithoutFloat64(TorchFunctionMode):
    """Refuses float64 as torch does on Apple's GPUs."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("dtype") is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return function(*args, **(kwargs or {}))


def test_a_device_without_float64() -> None:
    require_device("cpu")
    with (
        WithoutFloat64(),
        pytest.raises(SltaError, match="device 'cpu' \\(Cannot convert a MPS Tensor to float64 dtype"),
    ):
        require_device("cpu")
