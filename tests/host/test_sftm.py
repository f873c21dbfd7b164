"""``merge_method: sftm`` in stock mergekit, against the formulas of the paper written out tensor by tensor."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mergekit.merge_methods import merge_state_dicts
from support.sftm_reference import merged_tensor
from support.small_models import MODELS, as_stored, config_of, load, merge, role_by_hand, run, write_family

from mergekit_slta.host.methods import Method, SftmMerge
from mergekit_slta.host.run import METHODS
from mergekit_slta.models.roles import role_by_shape, tensor_roles
from mergekit_slta.models.skeleton import meta_model


@pytest.mark.parametrize("key", ["llama", "t5", "mixtral"])
def test_stock_mergekit_merges_every_tensor_as_the_paper_says(key: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"weight": 1.5, "density": 0.5}
    merged, base, *experts = merge(key, "sftm", tmp_path, {}, own, **{"lambda": 0.7})
    assert set(merged) == set(base)
    for name, tensor in merged.items():
        if tensor.is_floating_point():
            role, inputs = role_by_hand(name), [base[name], *(expert[name] for expert in experts)]
            wanted = as_stored(
                name, inputs, partial(merged_tensor, role, weight=[1.0, 1.5], density=[0.2, 0.5], scale=0.7)
            )
            torch.testing.assert_close(tensor.double(), wanted, rtol=0, atol=1e-6, msg=name)


def test_merges_slices_into_more_layers_than_the_base_model_has(tmp_path: Path) -> None:
    base, experts = write_family("llama", tmp_path)
    sources = [{"model": str(folder), "layer_range": [0, 2]} for folder in (base, *experts)]
    content = {
        "merge_method": "sftm",
        "base_model": str(base),
        "slices": [{"sources": sources}, {"sources": sources}],
        "dtype": "float32",
    }
    result = run(content, tmp_path)
    assert result.exit_code == 0, result.output
    merged = load("llama", tmp_path / "merged")
    for part in ("input_layernorm.weight", "mlp.up_proj.weight"):
        assert torch.equal(merged[f"model.layers.3.{part}"], merged[f"model.layers.1.{part}"])


@pytest.mark.parametrize("key", MODELS)
def test_roles_are_read_off_the_model(key: str) -> None:
    model = meta_model(config_of(key))
    roles = tensor_roles(model)
    by_hand = {name: role_by_hand(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {name: roles[name] for name in by_hand} == by_hand


def test_tensors_without_a_model_merge_by_their_shapes(caplog: pytest.LogCaptureFixture) -> None:
    """As in mergekit's own functions, and in mergekit-pytorch, which only has checkpoint files."""
    torch.manual_seed(0)
    shapes = {"scale": (), "norm": (5,), "map": (6, 4), "row": (1, 7), "tokens": (1, 1, 4), "kernel": (4, 3, 2, 2)}
    models = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        merged = merge_state_dicts(models, Method(SftmMerge), parameters={"density": 0.3}, base=0)
    assert len([line for line in caplog.messages if "goes by the shapes" in line]) == 1
    for name, tensor in merged.items():
        inputs = [model[name] for model in models]
        wanted = merged_tensor(role_by_shape(name, tensor, None), inputs[0], inputs[1:], [1.0, 1.0], [0.3, 0.3], 0.6)
        torch.testing.assert_close(tensor.double(), wanted, rtol=0, atol=1e-5)


def test_integers_pass_through() -> None:
    models = [{"weight": torch.randn(3, 3), "ids": torch.arange(4), "mask": torch.ones(2, dtype=torch.bool)}] * 2
    merged = merge_state_dicts(models, METHODS["sftm"], base=0)
    assert torch.equal(merged["ids"], torch.arange(4)) and merged["mask"].dtype == torch.bool
