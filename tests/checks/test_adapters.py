"""LoRA adapters that mergekit would not merge, or would merge into the wrong model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelReference
from safetensors.torch import load_file
from support import families
from support.adapters import State, edit, of_experts, state_of, write_adapter
from support.examining import adapted, look, only, problems, save_random
from support.families import Family
from transformers import AutoModelForCausalLM

from mergekit_slta.errors import SltaError
from mergekit_slta.models.merged_adapters import merge_adapter


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
    assert problem.startswith(f"The adapter {other} does not fit {family.base} (its matrices for")


def test_an_adapter_of_another_architecture(family: Family, tmp_path: Path) -> None:
    gpt2 = save_random(families.config_of("gpt2"), tmp_path / "gpt2")
    other = write_adapter(gpt2, tmp_path / "other", "c_attn")
    problem = only(adapted(family, other), options={"lora_merge_cache": str(tmp_path)})
    assert f"does not fit {family.base} (Target modules {{'c_attn'}} not found in the base model" in problem


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
    assert problem.startswith(f"The adapter {other} does not fit {family.base} (its matrices for model.layers.0")


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


# Adapters that do not fit, each with what is said about it


def emptied(tensors: State) -> State:
    return {name: own[:0] if "layers.1." in name and "lora_B" in name else own for name, own in tensors.items()}


def of_rank_0(tensors: State) -> State:
    return {name: own[:0] if "lora_A" in name else own[:, :0] for name, own in tensors.items()}


def without_a_tensor(tensors: State) -> State:
    return {name: own for name, own in tensors.items() if "layers.1.self_attn.q_proj.lora_B" not in name}


def with_a_score(tensors: State) -> State:
    return tensors | {"base_model.model.score.weight": torch.ones(2, 32)}


UNGATHERED = "it was saved without gathering its shards, save it again."
CONTENTS: list[tuple[Callable[[State], State], str]] = [
    (emptied, "holds empty tensors (base_model.model.model.layers.1.mlp.down_proj.lora_B.weight, "),
    (emptied, UNGATHERED),
    (of_rank_0, UNGATHERED),
    (lambda tensors: {}, f"holds no tensors: {UNGATHERED}"),
    (without_a_tensor, "(it lacks tensors of model.layers.1.self_attn.q_proj, which its adapter_config.json names): "),
    (with_a_score, "(it adapts score.weight, which that model lacks): name the model that it was trained on."),
]


def refused(family: Family, adapter: Path, folder: Path) -> str:
    """What the checks say of an adapter, and the merge without them too."""
    problem = only(adapted(family, adapter), options={"lora_merge_cache": str(folder / "cache")}, merging=False)
    with pytest.raises(SltaError) as error:
        merge_adapter(ModelReference.parse(f"{family.base}+{adapter}"), str(folder / "cache"))
    assert str(error.value) == problem
    assert not [place for place in (folder / "cache").iterdir() if place.is_dir()]
    return problem


@pytest.mark.parametrize(("change", "said"), CONTENTS)
def test_an_adapter_that_is_not_whole(
    change: Callable[[State], State], said: str, family: Family, adapter: Path, tmp_path: Path
) -> None:
    assert said in refused(family, edit(adapter, change), tmp_path)


@pytest.mark.parametrize("targets", [["q_proj"], r".*\.q_proj"])
def test_an_adapter_of_a_vision_tower_too(targets: Any, make_family: MakeFamily, tmp_path: Path) -> None:
    whole = make_family("gemma3_vision", experts=1)
    text = save_random(whole.config.get_text_config(), tmp_path / "text")
    adapter = write_adapter(whole.base, tmp_path / "adapter", "q_proj")
    edit(adapter, target_modules=targets)
    family = Family(text, (text, text), (*whole.data, *whole.data), whole.config)
    assert "(it adapts model.vision_tower." in refused(family, adapter, tmp_path)
    pattern = edit(write_adapter(text, tmp_path / "text adapter", "q_proj"), target_modules=r".*\.q_proj")
    assert problems(adapted(family, pattern), options={"lora_merge_cache": str(tmp_path / "cache")}) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"save_embedding_layers": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_of_a_larger_vocabulary(settings: dict[str, Any], family: Family, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(family.base)
    model.resize_token_embeddings(66)
    model.save_pretrained(tmp_path / "resized")
    families.write_tokenizer(tmp_path / "resized")
    saving = {name: settings[name] for name in settings if name == "save_embedding_layers"}
    lora = {"target_modules": ["q_proj"]} | {name: settings[name] for name in settings if name not in saving}
    peft.get_peft_model(model, peft.LoraConfig(**lora)).save_pretrained(
        str(tmp_path / "adapter"), **(saving or {"save_embedding_layers": False})
    )
    problem = refused(family, tmp_path / "adapter", tmp_path)
    assert problem == (
        f"The adapter {tmp_path / 'adapter'} was trained with a vocabulary of 66 tokens and {family.base} has 64: save "
        "that model after resize_token_embeddings(66), and name the copy in its place."
    )
    resized = f"{tmp_path / 'resized'}+{tmp_path / 'adapter'}"
    assert merge_adapter(ModelReference.parse(resized), str(tmp_path / "cache")).model.path


@pytest.mark.parametrize("parts", [{"experts": 2}, {"parts": ["gate_up_proj"]}, {"parts": ["gate_up_proj", "gate"]}])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_an_adapter_of_some_experts(
    parts: dict[str, Any], architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture)
    adapter = of_experts(state_of(family.base), architecture, tmp_path / "adapter", **parts)
    problem = refused(family, adapter, tmp_path)
    assert f"does not fit {family.base} (" in problem and "layers.0.mlp.experts" in problem
    assert problem.endswith("): train it on all experts and all of their maps, which transformers keeps in one tensor.")
