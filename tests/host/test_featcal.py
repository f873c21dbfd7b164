"""``merge_method: featcal`` in mergekit, against the dense reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import MakeFamily
from support import families, featcal_reference
from support.adapters import write_adapter
from support.families import Family
from support.merging import merged_state, worst_error

from mergekit_slta.layers.trace import trace


def feature_recipe(family: Family, **parameters: Any) -> dict[str, Any]:
    """A recipe that the naive reference can follow, with a ridge that is given."""
    return families.recipe(family, "featcal", **{"ridge": 0.1, **parameters})


def anchor_of(family: Family, folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """The merge by ``actmat``."""
    return merged_state(families.merge(families.recipe(family, "actmat", calibration=False, **more), folder))


@pytest.mark.parametrize("architecture", ["gpt2", "falcon_new", "mixtral", "bloom"])
def test_every_tensor_is_the_solved_one_or_the_anchors(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    """Under whatever names mergekit asks for them and a checkpoint stores them."""
    family = make_family(architecture)
    families.feature_merge(family, tmp_path / "solved")
    expected = anchor_of(family, tmp_path / "anchor")
    expected |= {name: tensor.double() for name, tensor in families.solved_tensors(tmp_path / "solved").items()}
    found = merged_state(families.merge(feature_recipe(family), tmp_path / "out"))
    assert set(found) == set(expected)
    assert worst_error(found, expected) < 1e-6


@pytest.mark.parametrize("settings", [{"ridge": "0.05"}, {"samples": 3, "seed": 2}], ids=str)
def test_a_feature_merge_equals_the_naive_one(settings: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    """Also with settings as strings, which YAML makes of quoted values."""
    out = families.merge(feature_recipe(llama, **settings), tmp_path / "out")
    values = {name: yaml.safe_load(str(value)) for name, value in settings.items()}
    drawn = {name: values.pop(name) for name in ("samples", "seed") if name in values}
    base, *experts = llama.models()
    expected = featcal_reference.merge(
        base, experts, llama.token_ids(**drawn), "llama", anchor_of(llama, tmp_path / "anchor"), **values
    )
    assert worst_error(merged_state(out), expected) < 1e-4


def test_a_feature_merge_of_loras_of_the_attention(llama: Family, tmp_path: Path) -> None:
    content = feature_recipe(llama, experts=[0, 1])
    for index, entry in enumerate(content["models"]):
        adapter = write_adapter(llama.base, tmp_path / f"adapter{index}", "q_proj", "v_proj", seed=index)
        entry["model"] = f"{llama.base}+{adapter}"
    out = families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "merged"))
    found, base = merged_state(out), merged_state(llama.base)
    decoder = trace(llama.config)
    moved = {name for name in base if not torch.allclose(found[name], base[name], rtol=1e-6, atol=1e-8)}
    assert {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(3) for name in ("q_proj", "v_proj")
    } <= moved
    assert not [name for name in moved if "norm" in name or "embed" in name]
    assert moved <= {name for layer in range(3) for name in decoder.layer_tensors(layer).values()} | {"lm_head.weight"}
