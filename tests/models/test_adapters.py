"""LoRA adapters in a folder and on a local stand-in for the Hub, and the folder that mergekit merges them into."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelPath, ModelReference
from safetensors.torch import load_file, save_file
from support import families
from support.adapters import edit, merged_by_hand, write_adapter
from support.copies import AS_BEFORE, edit_tensors
from support.examining import problems, with_expert
from support.families import Family
from support.hub import serve
from transformers import AutoModelForCausalLM

from mergekit_slta import check, evaluate, verify
from mergekit_slta.errors import SltaError
from mergekit_slta.models.adapters import adapter_headers, merge_adapter
from mergekit_slta.models.headers import TensorHeader

QUERY = "model.layers.1.self_attn.q_proj.weight"


def test_adapters_on_the_hub(tmp_path: Path) -> None:
    """Nothing but the adapter is downloaded."""
    organization = tmp_path / "hub" / "org"
    for name in ("whole", "empty"):
        (organization / name).mkdir(parents=True)
        (organization / name / "adapter_config.json").write_text("{}")
    save_file({"x": torch.ones(2, 3)}, organization / "whole" / "adapter_model.safetensors")
    (organization / "whole" / "training.bin").write_text("large")
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        whole, empty, none = (ModelPath(path=f"org/{name}") for name in ("whole", "empty", "none"))
        assert adapter_headers(whole) == {"x": TensorHeader((2, 3), 24)}
        assert set(hub.fetched) == {"adapter_config.json", "adapter_model.safetensors"}
        with pytest.raises(SltaError, match="is not a LoRA adapter: it lacks adapter_model.safetensors"):
            adapter_headers(empty)
        with pytest.raises(SltaError, match="org/none cannot be used: .*there is no such repository"):
            adapter_headers(none)


def with_dates_of(folder: Path, change: Callable[[], object]) -> None:
    """Change files and give them the dates that they had."""
    dates = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    change()
    for name, date in dates.items():
        os.utime(folder / name, ns=(date, date))


def merged_by_peft(base: Path, adapter: Path, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(folder)
    return folder


def edit_maps(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("_proj.weight"):
                tensors[name] += 0.05 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))

    edit_tensors(folder, edit)


@pytest.mark.parametrize(("changed", "method"), [("base", "slta"), ("adapter", "task_arithmetic")])
def test_an_adapter_is_merged_as_it_is_now(changed: str, method: str, family: Family, tmp_path: Path) -> None:
    """Its own files or the base model's were replaced by others of the same dates."""
    cache, adapter = tmp_path / "cache", write_adapter(family.base, tmp_path / "adapter")
    own = {"weight": 0.5} if method == "task_arithmetic" else {}
    recipe = families.recipe(family, method, experts=[0, 1], per_expert=own)
    recipe["models"][0]["model"] = f"{family.base}+{adapter}"
    before = families.merge(recipe, tmp_path / "before", lora_merge_cache=str(cache))
    if changed == "base":
        with_dates_of(family.base, lambda: edit_maps(family.base))
    else:
        with_dates_of(adapter, lambda: write_adapter(family.base, adapter, seed=1))
    after = families.merge(recipe, tmp_path / "after", lora_merge_cache=str(cache))
    recipe["models"][0]["model"] = str(merged_by_peft(family.base, adapter, tmp_path / "full"))
    expected = load_file(families.merge(recipe, tmp_path / "expected") / "model.safetensors")
    found, old = (load_file(folder / "model.safetensors") for folder in (after, before))
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-6), name
    assert not torch.allclose(old[QUERY], expected[QUERY], atol=1e-2)


def test_an_adapter_is_merged_once_for_each_type(llama: Family, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    reference = ModelReference.parse(f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}")
    full, again, half = (merge_adapter(reference, str(cache), False, dtype) for dtype in (None, None, "bfloat16"))
    assert full == again and full != half
    assert load_file(Path(half.model.path) / "model.safetensors")[QUERY].dtype == torch.bfloat16
    broken = ModelReference.parse(f"{llama.base}+{shutil.copytree(tmp_path / 'adapter', tmp_path / 'broken')}")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match=r"."):
        merge_adapter(broken, str(cache))
    assert {folder for folder in cache.iterdir() if folder.is_dir()} == {Path(full.model.path), Path(half.model.path)}


# The type that an adapter is merged in: the base model's, the recipe's, the option, and what comes out

TYPES = [
    ("slta", "bfloat16", "float32", None, torch.float32),
    ("slta", "bfloat16", "float32", "bfloat16", torch.bfloat16),
    ("task_arithmetic", "bfloat16", "bfloat16", None, torch.bfloat16),
    ("slta", "bfloat16", None, None, torch.bfloat16),
    ("task_arithmetic", "float16", "float32", None, torch.float32),
    ("slta", "float32", "bfloat16", None, torch.float32),  # what the adapter leaves alone is not rounded
]


@pytest.mark.parametrize(("method", "stored", "dtype", "option", "wanted"), TYPES)
def test_the_recipes_type_decides_what_an_adapter_is_merged_in(
    method: str,
    stored: str,
    dtype: str | None,
    option: str | None,
    wanted: Any,
    make_family: MakeFamily,
    tmp_path: Path,
) -> None:
    family, cache = make_family("llama", dtype=getattr(torch, stored)), tmp_path / "cache"
    weak = edit(write_adapter(family.base, tmp_path / "adapter"), lambda own: {name: 0.02 * own[name] for name in own})
    own: dict[str, Any] = {"weight": 1.0} if method == "task_arithmetic" else {}
    shared: dict[str, Any] = {"samples": 3} if method == "slta" else {}
    recipe = families.recipe(family, method, experts=[0, 1], per_expert=own, dtype=dtype, **shared)
    recipe["models"][0]["model"] = f"{family.base}+{weak}"
    out = families.merge(recipe, tmp_path / "out", lora_merge_cache=str(cache), lora_merge_dtype=option)
    (folder,) = (place for place in cache.iterdir() if place.is_dir())
    found, before = load_file(folder / "model.safetensors"), load_file(family.base / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {wanted}
    for name, tensor in merged_by_hand(before, weak).items():
        rounded = tensor.to(wanted).double()
        assert torch.allclose(found[name].double(), rounded, rtol=2 * torch.finfo(wanted).eps, atol=1e-9), name
    if wanted == torch.float32:
        change, kept = (own[QUERY].double() - before[QUERY].double() for own in (merged_by_hand(before, weak), found))
        assert (change - kept).norm() < 1e-3 * change.norm()
    if method == "slta" and not option:
        file = families.write_recipe(tmp_path / "recipe.yml", recipe)
        assert not verify(file, out, lora_merge_cache=str(cache), quiet=True).problems
        assert check(file, lora_merge_cache=str(cache)).problems == []
        evaluate(file, out, lora_merge_cache=str(cache), quiet=True)
        assert [place for place in cache.iterdir() if place.is_dir()] == [folder]


TWO_MAPS: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"]}
KINDS = {
    "dora": peft.LoraConfig(use_dora=True, **TWO_MAPS),
    "pissa": peft.LoraConfig(init_lora_weights="pissa", r=4, **TWO_MAPS),
    "biases": peft.LoraConfig(bias="all", **TWO_MAPS),
    "tokens": peft.LoraConfig(trainable_token_indices=[1, 5], **TWO_MAPS),
    "embedding": peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]),
    "head": peft.LoraConfig(modules_to_save=["lm_head"], task_type="CAUSAL_LM", **TWO_MAPS),
    "adalora": peft.AdaLoraConfig(total_step=10, **TWO_MAPS),
    "ia3": peft.IA3Config(feedforward_modules=[], **TWO_MAPS),
    "vera": peft.VeraConfig(r=4, **TWO_MAPS),
    "vblora": peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=4, **TWO_MAPS),
    "in the old format": peft.LoraConfig(**TWO_MAPS),
    "shira": peft.ShiraConfig(r=2, **TWO_MAPS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_all_kinds_are_whole_and_merged_as_by_peft(kind: str, llama: Family, tmp_path: Path) -> None:
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(llama.base), KINDS[kind])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(str(tmp_path / "adapter"))
    if kind == "in the old format":
        file = tmp_path / "adapter/adapter_model.safetensors"
        torch.save(load_file(file), file.with_suffix(".bin"), **AS_BEFORE)
        file.unlink()
    options = {"lora_merge_cache": str(tmp_path / "cache")}
    expert = f"{llama.base}+{tmp_path / 'adapter'}"
    assert problems(with_expert(llama, expert), options=options, merging=False) == []
    reference = ModelReference.parse(expert)
    found = load_file(Path(merge_adapter(reference, options["lora_merge_cache"]).model.path) / "model.safetensors")
    expected = load_file(merged_by_peft(llama.base, tmp_path / "adapter", tmp_path / "full") / "model.safetensors")
    before = load_file(llama.base / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(found[name], tensor) for name, tensor in before.items())
