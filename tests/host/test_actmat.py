"""``merge_method: actmat`` in stock mergekit, against the dense formula tensor by tensor."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from support.actmat_reference import merged_tensor
from support.small_models import as_stored, merge, role_by_hand

from mergekit_slta.models.layout import meta_model
from mergekit_slta.models.roles import Role, tensor_roles


@pytest.mark.parametrize("key", ["llama", "t5", "clip_vision", "gpt2"])
def test_stock_mergekit_solves_every_tensor(key: str, tmp_path: Path) -> None:
    merged, base, *experts = merge(key, "actmat", tmp_path, {}, {"weight": 1.5}, ridge=0.2, scale=0.9)
    assert set(merged) == set(base)
    for name, tensor in merged.items():
        if tensor.is_floating_point():
            role, inputs = role_by_hand(name), [base[name], *(expert[name] for expert in experts)]
            wanted = as_stored(name, inputs, partial(merged_tensor, role, ridge=0.2, scale=0.9, weights=[1.0, 1.5]))
            torch.testing.assert_close(tensor.double(), wanted, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("config", "transposed"),
    [
        (transformers.GptOssConfig(architectures=["GptOssForCausalLM"], num_hidden_layers=1), True),
        (transformers.Llama4TextConfig(architectures=["Llama4ForCausalLM"], num_hidden_layers=1), True),
        (transformers.Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=1), False),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_knows_which_dimension_is_the_input(config: transformers.PretrainedConfig, transposed: bool) -> None:
    """Only over the inputs do the rows of a task matrix have a covariance."""
    roles = tensor_roles(meta_model(config))
    maps = [role for name, role in roles.items() if re.search(r"experts\.(gate_up|down)_proj$", name)]
    assert maps and set(maps) == {Role.TRANSPOSED if transposed else Role.LINEAR}
