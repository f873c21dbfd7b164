"""Experts in float16, bfloat16 and float32 over one base model: every method, against its reference in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from safetensors.torch import load_file
from support import actmat_reference, families, featcal_reference, reference, sftm_reference
from support.copies import edit_tensors
from support.families import Family
from support.small_models import role_by_hand

State = dict[str, torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def mixed(request: pytest.FixtureRequest, make_family: MakeFamily) -> Family:
    family = make_family(experts=3)
    for folder, dtype in zip(family.folders, (request.param, *DTYPES), strict=True):
        edit_tensors(folder, partial(store, dtype))
    return family


def store(dtype: torch.dtype, tensors: State) -> None:
    tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


def expected(method: str, family: Family) -> State:
    """The merge in float64 of the values that the checkpoints hold."""
    models, split = family.models(), reference.SPLITS["llama"]
    if method == "slta":
        alpha = reference.solve(reference.deltas(models, family.token_ids(), "attn_mlp", split))
        return reference.merged(models, alpha, "attn_mlp", split)
    if method == "featcal":
        return featcal_reference.merge(models[0], models[1:], family.token_ids(), "llama", expected("actmat", family))
    base, *experts = (model.state_dict() for model in models)
    found = {}
    for name, tensor in base.items():
        role, own = role_by_hand(name), [expert[name] for expert in experts]
        if method == "actmat":
            found[name] = actmat_reference.merged_tensor(role, tensor, own)
        else:
            found[name] = sftm_reference.merged_tensor(role, tensor, own, [1.0] * 3, [0.2] * 3, 0.6)
    return found


@pytest.mark.parametrize("method", ["slta", "featcal", "actmat", "sftm"])
def test_experts_of_mixed_types(method: str, mixed: Family, tmp_path: Path) -> None:
    """The recipe names no data type, so mergekit hands each tensor on as it is stored."""
    content = families.recipe(mixed, method, calibration=method in ("slta", "featcal"))
    if method == "featcal":
        content["parameters"] = {"ridge": 0.1}
    del content["dtype"]
    found = families.load_model(families.merge(content, tmp_path / "out")).state_dict()
    wanted = expected(method, mixed)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    (stored,) = {tensor.dtype for tensor in load_file(file).values()}
    allowed = 1e-4 if stored == torch.float32 else 2**-8
    assert set(found) == set(wanted)
    assert max(float((found[name] - own).norm() / own.norm()) for name, own in wanted.items()) < allowed
