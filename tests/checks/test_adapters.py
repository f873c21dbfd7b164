"""LoRA adapters that mergekit would not merge, or would merge into the wrong model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
from conftest import MakeFamily
from safetensors.torch import load_file
from support import families
from support.adapters import write_adapter
from support.examining import adapted, look, only, problems, save_random
from support.families import Family
from transformers import AutoModelForCausalLM


@pytest.fixture
def adapter(family: Family, tmp_path: Path) -> Path:
    """A LoRA adapter for the family's base model."""
    return write_adapter(family.base, tmp_path / "adapter", "q_proj", "down_proj")


def test_an_adapter_needs_a_folder_to_be_merged_in(family: Family, adapter: Path, tmp_path: Path) -> None:
    recipe = adapted(family, adapter)
    assert only(recipe) == (
        f"{family.base}+{adapter} is a LoRA adapter: give mergekit a folder to merge it in with "
        "--lora-merge-cache FOLDER."
    )
    cache = {"lora_merge_cache": str(tmp_path / "cache")}
    assert problems(recipe, options=cache, out_path=tmp_path / "out") == []
    assert not (tmp_path / "cache").exists()


def test_an_incomplete_adapter(family: Family, adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    problem = only(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path)})
    assert problem == f"{adapter} is not a LoRA adapter: it lacks adapter_model.safetensors."


def test_an_adapter_of_a_wider_model(family: Family, tmp_path: Path) -> None:
    config = families.config_of("llama", hidden_size=64)
    other = write_adapter(save_random(config, tmp_path / "wide"), tmp_path / "other", "q_proj")
    problem = only(adapted(family, other), options={"lora_merge_cache": str(tmp_path)})
    assert problem.startswith(f"The adapter {other} was not trained on {family.base} (its matrices for")


def test_an_adapter_of_another_architecture(family: Family, tmp_path: Path) -> None:
    gpt2 = save_random(families.config_of("gpt2"), tmp_path / "gpt2")
    other = write_adapter(gpt2, tmp_path / "other", "c_attn")
    problem = only(adapted(family, other), options={"lora_merge_cache": str(tmp_path)})
    assert f"was not trained on {family.base} (it adapts transformer.h." in problem


FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_of_fused_experts_fits_its_own_base(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family, options = make_family(architecture), {"lora_merge_cache": str(tmp_path / "cache")}
    adapter = write_adapter(family.base, tmp_path / "adapter", parameters=FUSED)
    assert problems(adapted(family, adapter), options=options, merging=False) == []
    wide = save_random(families.config_of(architecture, hidden_size=64), tmp_path / "wide")
    other = write_adapter(wide, tmp_path / "other", parameters=FUSED[1:])
    problem = only(adapted(family, other), options=options, merging=False)
    assert problem.startswith(f"The adapter {other} was not trained on {family.base} (its matrices for model.layers.0")


def test_an_adapter_of_a_router_that_checkpoints_call_otherwise(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("mixtral")
    adapter = write_adapter(family.base, tmp_path / "adapter", parameters=["mlp.gate.weight"])
    assert problems(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path / "cache")}) == []


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_of_a_head_that_is_the_embedding(whole: bool, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("gemma3")
    changes: dict[str, Any] = {"modules_to_save": ["lm_head"]} if whole else {}
    adapter = write_adapter(family.base, tmp_path / "adapter", *(["q_proj"] if whole else ["lm_head"]), **changes)
    found = look(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path / "cache")})
    if whole:
        assert "holds its own lm_head of" in found.problems[0] and len(found.problems) == 1
    else:
        assert found.problems == [] and "changes lm_head of" in "".join(found.notes)


def test_an_adapter_with_copies_of_the_embedding_and_the_head_that_it_does_not_train(
    make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family("gemma3")
    model = AutoModelForCausalLM.from_pretrained(family.base)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(
        str(tmp_path / "adapter"), save_embedding_layers=True
    )
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("embed_tokens" in name for name in names)
    assert problems(adapted(family, tmp_path / "adapter"), options={"lora_merge_cache": str(tmp_path)}) == []
