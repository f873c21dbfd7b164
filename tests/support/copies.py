"""Copies of a model's folder: the same tensors in other files, or changed ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

# A pickled file of torch's format before 1.6, which is no archive
AS_BEFORE: dict[str, Any] = {"_use_new_zipfile_serialization": False}


def sharded(source: Path, folder: Path) -> Path:
    """A copy in several safetensors files, without a tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def pickled(source: Path, folder: Path, **options: Any) -> Path:
    shutil.copytree(source, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin", **options)
    (folder / "model.safetensors").unlink()
    return folder


def pickled_shards(source: Path, folder: Path) -> Path:
    pickled(source, folder)
    tensors = torch.load(folder / "pytorch_model.bin")
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, own in parts.items():
        torch.save({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in parts.items() for name in own}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "pytorch_model.bin").unlink()
    return folder


def edited(source: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(source, folder)
    edit_tensors(folder, edit)
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a model's tensors where they are."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
