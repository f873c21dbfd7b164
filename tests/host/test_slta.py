"""``merge_method: slta`` in mergekit: every tensor, against merges written out in float64."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import MakeFamily
from safetensors.torch import load_file
from support import families, reference
from support.adapters import write_adapter
from support.families import Family
from support.merging import counted, merged_state, worst_error

from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.slta import measure
from mergekit_slta.slta.statistics import Statistics


def solved(path: Path, level: str) -> dict[str, torch.Tensor]:
    return dict(Statistics.load(path).solve(level).alpha)


@pytest.mark.parametrize(
    ("architecture", "dtype", "level", "edges"),
    [
        ("llama", torch.float32, "layer", "mean"),
        ("llama", torch.bfloat16, "attn_mlp", "base"),
        ("gemma2", torch.float32, "attn_mlp", "mean"),
        ("falcon_new", torch.float32, "layer", "base"),
    ],
    ids=str,
)
def test_every_tensor_is_the_base_plus_the_weighted_task_vectors(
    architecture: str, dtype: torch.dtype, level: str, edges: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    changes = {"tie_word_embeddings": False} if architecture == "falcon_new" else {}
    family = make_family(families.config_of(architecture, **changes), dtype=dtype)
    stats = tmp_path / "stats.safetensors"
    out = families.merge(families.recipe(family, level=level, edges=edges, statistics=str(stats)), tmp_path / "out")
    alpha = solved(stats, level)
    expected = reference.merged(family.models(), alpha, level, reference.SPLITS[architecture], edges)
    assert worst_error(merged_state(out), expected) < 1e-6


@pytest.mark.parametrize("level", ["layer", "attn_mlp"])
def test_the_whole_way_equals_the_naive_one(level: str, llama: Family, tmp_path: Path) -> None:
    out = families.merge(families.recipe(llama, level=level), tmp_path / "out")
    models, split = llama.models(), reference.SPLITS["llama"]
    alpha = reference.solve(reference.deltas(models, llama.token_ids(), level, split))
    assert worst_error(merged_state(out), reference.merged(models, alpha, level, split)) < 1e-6


@pytest.mark.parametrize("settings", [{"balance": False}, {"balance": "false", "ridge": "0.3"}], ids=str)
def test_balance_and_ridge_reach_the_solution(settings: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    """Also as strings, which YAML makes of quoted values."""
    models, split = llama.models(), reference.SPLITS["llama"]
    deltas = reference.deltas(models, llama.token_ids(), "layer", split)
    out = families.merge(families.recipe(llama, level="layer", **settings), tmp_path / "out")
    values = {name: yaml.safe_load(str(value).lower()) for name, value in settings.items()}
    expected = reference.merged(models, reference.solve(deltas, **values), "layer", split)
    assert worst_error(merged_state(out), expected) < 1e-6


def test_merging_in_bfloat16_rounds_and_no_more(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(dtype=torch.bfloat16)
    exact = merged_state(families.merge(families.recipe(family), tmp_path / "float32"))
    for dtype, out_dtype in (("float32", "bfloat16"), ("bfloat16", None)):
        out = families.merge(families.recipe(family, dtype=dtype, out_dtype=out_dtype), tmp_path / f"in_{dtype}")
        assert {tensor.dtype for tensor in load_file(next(out.glob("*.safetensors"))).values()} == {torch.bfloat16}
        assert worst_error(merged_state(out), exact) < 2**-8


@pytest.mark.parametrize("shape", [(), (1, 6), (4, 1)], ids=["number", "columns", "rows"])
def test_weighted_sum_changes_no_input(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    kept = [tensor.clone() for tensor in tensors]
    result = weighted_sum(tensors[0], list(zip(tensors[1:], weights, strict=True)))
    base, first, second = (tensor.double() for tensor in tensors)
    expected = base + weights[0] * (first - base) + weights[1] * (second - base)
    assert torch.allclose(result.double(), expected, atol=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(kept, tensors, strict=True))


def test_a_weight_of_zero_leaves_the_base_as_it_is() -> None:
    base, broken = torch.randn(5), torch.full((5,), torch.nan)
    zero = torch.zeros((), dtype=torch.float64)
    assert torch.equal(weighted_sum(base, [(broken, zero)]), base)


def test_loras_of_the_attention_leave_everything_else_alone(
    llama: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = families.recipe(llama, experts=[0, 1], statistics=str(tmp_path / "stats"))
    for index, entry in enumerate(content["models"]):
        adapter = write_adapter(llama.base, tmp_path / f"adapter{index}", "q_proj", "v_proj", seed=index)
        entry["model"] = f"{llama.base}+{adapter}"
    with caplog.at_level(logging.WARNING, logger="mergekit_slta"):
        out = families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "merged"))
    found, base = merged_state(out), merged_state(llama.base)
    for name, tensor in base.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            assert not torch.allclose(found[name], tensor, rtol=1e-3)
        elif "self_attn" in name or "input_layernorm" in name:
            assert torch.allclose(found[name], tensor, rtol=1e-6)
        else:
            assert torch.equal(found[name], tensor), name
    for name, gram in Statistics.load(tmp_path / "stats").grams.items():
        assert gram.any() == name.endswith(".attn")
    alpha = solved(tmp_path / "stats", "attn_mlp")
    assert all(alpha[name].any() == name.endswith(".attn") for name in alpha)
    dependent = [record.message for record in caplog.records if "minimum-norm" in record.message]
    assert len(dependent) == 1
    assert f"{families.LAYERS} of {2 * families.LAYERS} submodules" in dependent[0]


def test_the_same_lora_is_known_by_content(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrations = counted(monkeypatch, measure, "calibrate")
    content = families.recipe(llama, experts=[0, 1], statistics=str(tmp_path / "stats"))
    adapter = write_adapter(llama.base, tmp_path / "adapter")
    content["models"][0]["model"] = f"{llama.base}+{adapter}"
    families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "merged"))
    copy = shutil.copytree(adapter, tmp_path / "copy")
    content["models"][0]["model"] = f"{llama.base}+{copy}"
    families.merge(content, tmp_path / "again", lora_merge_cache=str(tmp_path / "merged again"))
    assert len(calibrations) == 1


def test_two_identical_experts_share_the_weight(
    llama: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    twin = shutil.copytree(llama.experts[0], tmp_path / "twin")
    family = Family(llama.base, (llama.experts[0], twin, llama.experts[1]), llama.data, llama.config)
    with caplog.at_level(logging.WARNING, logger="mergekit_slta"):
        families.merge(families.recipe(family, statistics=str(tmp_path / "stats")), tmp_path / "out")
    for alpha in solved(tmp_path / "stats", "attn_mlp").values():
        assert torch.allclose(alpha[0], alpha[1], rtol=1e-9)
    assert sum("minimum-norm" in record.message for record in caplog.records) == 1
