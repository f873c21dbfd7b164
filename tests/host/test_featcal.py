"""``merge_method: featcal`` in mergekit, against the dense reference."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import MakeFamily
from support import families, featcal_reference
from support.adapters import write_adapter
from support.families import Family
from support.html_elements import assert_self_contained
from support.merging import counted, merged_state, spoiled, worst_error

from mergekit_slta.errors import SltaError
from mergekit_slta.featcal import scratch
from mergekit_slta.layers.trace import trace


def feature_recipe(family: Family, **parameters: Any) -> dict[str, Any]:
    """A recipe that the naive reference can follow: near the base model, with a ridge that is given."""
    return families.recipe(family, "featcal", **{"anchor": "base", "ridge": 0.003, **parameters})


@pytest.mark.parametrize("architecture", ["gpt2", "falcon_new", "mixtral", "bloom"])
def test_every_tensor_is_the_solved_one_or_the_bases(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    """Under whatever names mergekit asks for them and a checkpoint stores them."""
    family = make_family(architecture)
    families.feature_merge(family, tmp_path / "solved")
    expected = merged_state(family.base)
    expected |= {name: tensor.double() for name, tensor in families.solved_tensors(tmp_path / "solved").items()}
    found = merged_state(families.merge(feature_recipe(family), tmp_path / "out"))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("settings", [{"ridge": "0.1"}, {"head": "false", "samples": 3, "seed": 2}], ids=str)
def test_a_feature_merge_equals_the_naive_one(settings: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    """Also with settings as strings, which YAML makes of quoted values."""
    out = families.merge(feature_recipe(llama, **settings), tmp_path / "out")
    values = {name: yaml.safe_load(str(value)) for name, value in settings.items()}
    drawn = {name: values.pop(name) for name in ("samples", "seed") if name in values}
    base, *experts = llama.models()
    expected = featcal_reference.merge(base, experts, llama.token_ids(**drawn), "llama", **values)
    assert worst_error(merged_state(out), expected) < 1e-4


def test_a_feature_merge_near_that_of_actmat_equals_the_naive_one(llama: Family, tmp_path: Path) -> None:
    start = merged_state(families.merge(families.recipe(llama, "actmat", calibration=False), tmp_path / "anchor"))
    out = families.merge(feature_recipe(llama, anchor="actmat", ridge=0.1), tmp_path / "out")
    base, *experts = llama.models()
    tasks = llama.token_ids()
    expected = featcal_reference.merge(base, experts, tasks, "llama", ridge=0.1, anchor=start, by_tasks=True)
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


def test_a_feature_merges_report(llama: Family, tmp_path: Path) -> None:
    content = feature_recipe(llama, report=str(tmp_path / "report"))
    families.merge(content, tmp_path / "out")
    text = (tmp_path / "report" / "featcal.html").read_text()
    assert_self_contained(text)
    assert "After the last layer the merged model's features are" in html.unescape(text)
    for name in ("expert0", "expert1", "expert2"):
        assert f">{name}</th>" in text
    assert (tmp_path / "report" / "drift.png").is_file()
    assert str(tmp_path) not in text


@pytest.mark.parametrize("head", [True, False])
def test_what_is_not_finite_in_an_experts_head_matters_where_it_is_solved(
    head: bool, llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature_merges = counted(monkeypatch, scratch, "feature_merge")
    content = feature_recipe(llama, head=head)
    content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", "lm_head.weight"))
    if head:
        with pytest.raises(SltaError, match=r"spoiled holds NaN or Inf in the tensor lm_head\.weight"):
            families.merge(content, tmp_path / "out")
        assert not feature_merges
    else:
        assert merged_state(families.merge(content, tmp_path / "out"))["lm_head.weight"].isfinite().all()
