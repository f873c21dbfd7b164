"""Every tensor is on the device that computes, and the results are the CPU's; ``test_gpu.py`` says it of a GPU."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import MakeFamily
from safetensors.torch import load_file
from support import families
from support.families import Family
from support.rounding import regression_rounding
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from mergekit_slta.checks.space import needs
from mergekit_slta.featcal.regression import RIDGES
from mergekit_slta.levels import LEVELS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes its place")

separate_device = pytest.importorskip(
    "support.separate_device", reason="this torch makes no devices in Python", exc_type=ImportError
).separate_device
State = dict[str, torch.Tensor]
# Of a tensor's norm, with whichever ridge is chosen: on another device attention is computed by another kernel.
TOLERANCE = regression_rounding(RIDGES[0])


def assert_close(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu"
        assert (found[name] - tensor).norm() <= TOLERANCE * tensor.norm(), name


def test_tensors_of_two_devices_do_not_mix() -> None:
    with separate_device() as device, pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=device) + torch.ones(3)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_calibration_and_feature_merge(name: str, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(families.config_of(name, num_hidden_layers=1), experts=2, records=2, longest=10)

    def results(device: str, folder: Path) -> State:
        grams = families.measure(family, *LEVELS, device=device)
        families.feature_merge(family, folder, device=device, ridge=None)
        return grams | families.solved_tensors(folder)

    expected = results("cpu", tmp_path / "host")
    with separate_device() as device:
        assert_close(results(device, tmp_path / "device"), expected)


@pytest.mark.parametrize("method", ["slta", "featcal", "actmat", "sftm"])
def test_a_merge_by_mergekit(method: str, llama: Family, tmp_path: Path) -> None:
    recipe = families.recipe(llama, method, calibration=method in ("slta", "featcal"))
    expected = load_file(families.merge(recipe, tmp_path / "host") / "model.safetensors")
    attention = mock.patch.object(functional, "scaled_dot_product_attention", wraps=scaled_dot_product_attention)
    with separate_device() as device, attention as attends:
        merged = families.merge(recipe, tmp_path / "device", device=device)
        assert needs(families.experiment(recipe, device=device)).memory
    # With it, and in float32, a GPU would have the scores of all pairs of tokens in memory.
    shared = {call.args[0].device.type for call in attends.call_args_list if call.kwargs.get("enable_gqa")}
    assert shared <= {"cpu"}  # where the model is traced
    assert_close(load_file(merged / "model.safetensors"), expected)
