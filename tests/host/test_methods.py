"""The four merge methods in mergekit: every tensor against merges written out in float64, and what they refuse."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from mergekit.scripts import merge_raw_pytorch
from support import actmat_reference, families, featcal_reference, merging, reference, sftm_reference
from support.adapters import merged_by_hand, write_adapter
from support.command import run
from support.copies import edit_tensors, edited
from support.families import Family
from support.merging import State, by_reference, load, merged_state, role_by_name, spoiled, stored, wrong_tensors
from support.rounding import regression_rounding

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.maps import Role, tensor_roles

# slta


def test_an_slta_merge_with_settings_in_quotes_equals_the_naive_one(llama: Family, tmp_path: Path) -> None:
    """YAML makes strings of quoted values."""
    models, split = llama.models(), reference.SPLITS["llama"]
    deltas = reference.deltas(models, llama.token_ids(), "layer", split)
    out = families.merge(families.recipe(llama, level="layer", balance="false", ridge="0.3"), tmp_path / "out")
    expected = reference.merged(models, reference.solve(deltas, balance=False, ridge=0.3), "layer", split)
    assert wrong_tensors(merged_state(out), expected.__getitem__, expected) == []


# featcal


def test_merges_of_loras_of_the_attention(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "featcal", experts=[0, 1], ridge=0.1)
    data_free, experts = families.recipe(llama, "actmat", experts=[0, 1], calibration=False), []
    for index, entry in enumerate(content["models"]):
        adapter = write_adapter(llama.base, tmp_path / f"adapter{index}", "q_proj", "v_proj", seed=index)
        data_free["models"][index]["model"] = entry["model"] = f"{llama.base}+{adapter}"
        experts.append(merged_by_hand(stored(llama.base), adapter))
    out = families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "merged"))
    found, base = merged_state(out), merged_state(llama.base)
    alone = merged_state(families.merge(data_free, tmp_path / "actmat", lora_merge_cache=str(tmp_path / "merged")))

    def wanted(name: str) -> torch.Tensor:
        own = [expert[name] for expert in experts]
        return actmat_reference.merged_tensor(role_by_name(name), base[name], own, ridge=3.0)  # that of adapters

    changed = {name: tensor for name, tensor in alone.items() if "q_proj" in name or "v_proj" in name}
    assert wrong_tensors(changed, wanted, changed) == []
    moved = set(wrong_tensors(found, base.__getitem__, base))
    assert changed.keys() <= moved
    assert not [name for name in moved if "norm" in name or "embed" in name]


# actmat and sftm


# The second expert's parameters, those of the merge, and the formula with both.
FORMULAS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., torch.Tensor]]] = {
    "actmat": (
        {"weight": 1.5},
        {"ridge": 0.2, "scale": 0.9},
        partial(actmat_reference.merged_tensor, ridge=0.2, scale=0.9, weights=[1.0, 1.5]),
    ),
    "sftm": (
        {"weight": 1.5, "density": 0.5},
        {"lambda": 0.7, "rank": 3},
        partial(sftm_reference.merged_tensor, weight=[1.0, 1.5], density=[0.2, 0.5], scale=0.7, rank=3),
    ),
}


@pytest.mark.parametrize(
    ("method", "key"),
    [
        *(("actmat", key) for key in ("llama", "t5", "clip_vision", "gpt2", "mixtral")),
        *(("sftm", key) for key in ("llama", "t5", "clip_vision", "mixtral")),
    ],
)
def test_stock_mergekit_merges_every_tensor_by_the_methods_formula(method: str, key: str, tmp_path: Path) -> None:
    own, shared, formula = FORMULAS[method]
    family = families.make_family(tmp_path, key)
    content = families.recipe(family, method, calibration=False, **shared)
    content["models"][1]["parameters"] = own
    out = families.merge(content, tmp_path / "merged")
    assert not any(load(out)[1].values())
    merged, base, *experts = map(stored, (out, *family.folders))
    assert set(merged) == set(base)
    floats = {name: tensor for name, tensor in merged.items() if tensor.is_floating_point()}

    def wanted(name: str) -> torch.Tensor:
        return formula(role_by_name(name), base[name], [expert[name] for expert in experts])

    assert wrong_tensors(floats, wanted, floats) == []


def test_a_filter_gives_some_tensors_another_value(llama: Family, tmp_path: Path) -> None:
    filters: dict[str, Any] = {"lambda": [{"filter": "mlp", "value": 0.5}, {"value": 1.0}]}
    out = families.merge(families.recipe(llama, "actmat", calibration=False, **filters), tmp_path / "out")
    merged, base, *experts = map(stored, (out, *llama.folders))

    def wanted(name: str) -> torch.Tensor:
        scale, own = 0.5 if ".mlp." in name else 1.0, [expert[name] for expert in experts]
        return actmat_reference.merged_tensor(role_by_name(name), base[name], own, ridge=0.03, scale=scale)

    assert wrong_tensors(merged, wanted, merged) == []


@pytest.mark.parametrize("method", ["slta", "featcal", "actmat", "sftm"])
def test_a_merge_in_float32_is_rounded_once(method: str, llama: Family, tmp_path: Path) -> None:
    wide, narrow = (
        stored(merging.merged(llama, method, tmp_path / name, out_dtype=name)) for name in ("float32", "bfloat16")
    )
    assert merging.same_tensors({name: tensor.bfloat16() for name, tensor in wide.items()}, narrow)


@pytest.mark.parametrize(
    ("name", "role"), [("gpt_oss", Role.TRANSPOSED), ("llama4", Role.TRANSPOSED), ("qwen3_moe", Role.LINEAR)]
)
def test_knows_which_dimension_is_the_input(name: str, role: Role) -> None:
    """Only over the inputs do the rows of a task matrix have a covariance."""
    roles = tensor_roles(families.skeleton(name).model)
    assert {own for name, own in roles.items() if re.search(r"experts\.(gate_up|down)_proj$", name)} == {role}


# Experts in float16, bfloat16 and float32 over one base model

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
    states = [model.state_dict() for model in models]
    return {name: by_reference(states, method, name) for name in states[0]}


@pytest.mark.parametrize("method", ["slta", "featcal", "actmat", "sftm"])
def test_experts_of_mixed_types(method: str, mixed: Family, tmp_path: Path) -> None:
    """The recipe names no data type, so mergekit hands each tensor on as it is stored."""
    settings: dict[str, Any] = {"ridge": 0.1} if method == "featcal" else {}
    found = merged_state(merging.merged(mixed, method, tmp_path / "out", dtype=None, **settings))
    (dtype,) = {tensor.dtype for tensor in stored(tmp_path / "out").values()}
    allowed = regression_rounding(0.1) if dtype == torch.float32 else 2**-8
    assert merging.worst_error(found, expected(method, mixed)) < allowed


# What is refused, and what is never written


@pytest.mark.parametrize(
    ("method", "level", "spoilt", "tensor"),
    [
        ("slta", "attn_mlp", 0, "model.layers.2.mlp.down_proj.weight"),
        ("slta", "attn_mlp", 2, "model.layers.0.input_layernorm.weight"),
        ("slta", "model", 2, "lm_head.weight"),
        ("featcal", None, 2, "model.embed_tokens.weight"),
        ("featcal", None, 2, "lm_head.weight"),
        *((method, None, 0, "lm_head.weight") for method in ("slta", "featcal", "sftm")),  # that no calibration reads
    ],
)
def test_what_is_not_finite_is_refused_before_any_output(
    method: str, level: str | None, spoilt: int, tensor: str, llama: Family, tmp_path: Path
) -> None:
    """``spoilt`` is 0 for the base model, or an expert's number."""
    settings: dict[str, Any] = {"level": level} if level else {}
    content = families.recipe(llama, method, calibration=method != "sftm", **settings)
    entry, key = (content["models"][spoilt - 1], "model") if spoilt else (content, "base_model")
    entry[key] = str(spoiled(llama.folders[spoilt], tmp_path / "spoiled", tensor))
    words = rf"spoiled holds NaN or Inf in the tensor {tensor}|The tensor '{tensor}' of .*spoiled has NaN or "
    with pytest.raises(SltaError, match=words):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


def test_what_an_expert_holds_outside_the_layers_gets_into_no_output_at_other_levels(
    llama: Family, tmp_path: Path
) -> None:
    content = families.recipe(llama, level="layer")
    content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", "lm_head.weight"))
    merged = merged_state(families.merge(content, tmp_path / "out"))
    assert torch.equal(merged["lm_head.weight"], merged_state(llama.base)["lm_head.weight"])


@pytest.mark.parametrize("method", ["slta", "featcal", "sftm"])
def test_a_merged_tensor_that_is_too_large_for_its_type_is_never_written(
    method: str, llama: Family, tmp_path: Path
) -> None:
    def enlarge(tensors: State) -> None:
        tensors["lm_head.weight"][-1, -1] = 1e5

    content = families.recipe(llama, method, calibration=method != "sftm", out_dtype="float16")
    content["base_model"] = str(edited(llama.base, tmp_path / "base", enlarge))
    for index, entry in enumerate(content["models"]):
        entry["model"] = str(edited(llama.experts[index], tmp_path / f"expert{index}", enlarge))
    with pytest.raises(SltaError, match=r"'lm_head.weight' is not finite as float16.*out_dtype: bfloat16"):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


@pytest.mark.parametrize("method", ["slta", "actmat"])
def test_mergekit_pytorch_is_refused_in_words(method: str, llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, method, calibration=method == "slta")
    files = {str(folder): str(folder / "model.safetensors") for folder in llama.folders}
    content["base_model"] = files[content["base_model"]]
    for entry in content["models"]:
        entry["model"] = files[entry["model"]]
    path = families.write_recipe(tmp_path / "recipe.yml", content)
    said = run(path, tmp_path / "out.safetensors", program=merge_raw_pytorch.main, code=1).output
    assert "mergekit-yaml" in said and "Traceback" not in said
    assert not [path for path in (tmp_path / "out.safetensors").rglob("*") if path.is_file()]
