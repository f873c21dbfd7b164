"""LoRA adapters that mergekit would not merge, or would merge into the wrong model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import MakeFamily
from support import families
from support.adapters import write_adapter
from support.examining import adapted, look, only, problems, save_random, swap_ids
from support.families import Family


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


def test_an_adapter_of_transposed_maps_fits(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("gpt2")
    adapter = write_adapter(family.base, tmp_path / "adapter", "c_attn")
    assert problems(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path)}) == []


FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
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


def test_an_adapter_of_an_architecture_that_mergekit_does_not_define(make_family: MakeFamily, tmp_path: Path) -> None:
    family, options = make_family("qwen3_5"), {"lora_merge_cache": str(tmp_path / "cache")}
    adapter = write_adapter(family.base, tmp_path / "adapter", "down_proj")
    assert problems(adapted(family, adapter), options=options) == []


def test_an_adapter_of_a_router_that_checkpoints_call_otherwise(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("mixtral")
    adapter = write_adapter(family.base, tmp_path / "adapter", parameters=["mlp.gate.weight"])
    assert problems(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path / "cache")}) == []


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "POLY", "NEW"])
def test_an_adapter_that_cannot_become_part_of_the_weights(
    kind: str, family: Family, adapter: Path, tmp_path: Path
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"peft_type": kind}))
    problem = only(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path / "cache")})
    assert problem.startswith(f"The adapter {adapter} is of the type {kind}, which cannot become part of a model's")


@pytest.mark.parametrize("biased", [False, True])
def test_biases_of_an_adapter_need_biases_of_the_model(biased: bool, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(families.config_of("qwen2"))  # queries have a bias, outputs have none
    adapter = write_adapter(family.base, tmp_path / "adapter", "q_proj" if biased else "o_proj", lora_bias=True)
    found = problems(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path / "cache")}, merging=False)
    said = f"The adapter {adapter} has biases (lora_bias) for model.layers.0.self_attn.o_proj"
    assert (found == []) if biased else (len(found) == 1 and found[0].startswith(said))


@pytest.mark.parametrize(
    ("architecture", "target", "end"),
    [
        ("gpt2", "wte", "transformer.wte"),
        ("gemma", "lm_head", "lm_head"),
        ("llama", "lm_head", ""),
        ("gpt2", "c_fc", ""),
    ],
)
def test_an_adapter_of_one_end_of_a_tied_model(
    architecture: str, target: str, end: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    """peft adds the change to the one tensor that both ends share."""
    family = make_family(architecture, experts=2)
    adapter = write_adapter(family.base, tmp_path / "adapter", target)
    notes = look(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path / "cache")}).notes
    said = f"The adapter {adapter} changes {end} of {family.base}, whose embedding and output head are one tensor"
    assert any(note.startswith(said) for note in notes) == bool(end)


def test_an_adapter_whose_own_tokenizer_has_other_ids(family: Family, adapter: Path, tmp_path: Path) -> None:
    """mergekit aligns by the tokenizer of the adapter's base model alone."""
    families.write_tokenizer(adapter)
    recipe, options = adapted(family, adapter), {"lora_merge_cache": str(tmp_path / "cache")}
    assert problems(recipe, options=options) == []
    swap_ids(adapter)
    for aligned in ({}, {"tokenizer": {"source": "base"}}):
        problem = only(recipe | aligned, options=options)
        assert problem.startswith(f"The tokenizer of the expert {family.base}+{adapter} has other ids than that of")
        assert "merge the adapter into that model yourself" in problem
