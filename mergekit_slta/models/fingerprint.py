"""Identify a model by its content, independent of its folder, shards and file format."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save

from mergekit_slta.errors import reading
from mergekit_slta.models.adapters import adapter_settings, adapter_weights
from mergekit_slta.models.headers import unpickled, weight_map

SAMPLED_SPOTS = 8
SAMPLED_BYTES = 64

# A tensor's name, its dtype as safetensors names it, its shape, and a sample of its bytes.
_Entry = tuple[str, str, list[int], bytes]
# By path, the size, the time of the last change and the inode of a file.
Stamps = dict[str, tuple[int, int, int]]


def fingerprint_of(folder: str | Path, adapter: Path | None = None) -> str:
    """Identify a model by the names, shapes and dtypes of its tensors and a sample of their bytes; sha256 in hex.

    Training changes nearly all bytes of a tensor. An edit of a few rows does not show; in files of this machine
    ``stamps`` shows it. ``adapter`` is the folder of an adapter that is merged into the model, in whichever type.
    """
    content = _digest(entry for file in weight_map(Path(folder)) for entry in _sampled(Path(folder) / file))
    if adapter is None:
        return content
    merged = [
        content,
        _digest(_sampled(adapter_weights(adapter))),
        adapter_settings(adapter),
        None,
    ]  # the last one was the type
    return hashlib.sha256(json.dumps(merged, sort_keys=True).encode()).hexdigest()


def stamps(files: Iterable[Path]) -> Stamps:
    """The stamps of the files that exist: a file that is written to or replaced gets another one."""
    found = {}
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            found[str(path)] = status.st_size, status.st_mtime_ns, status.st_ino
    return found


def _digest(entries: Iterable[_Entry]) -> str:
    found = hashlib.sha256()
    for name, dtype, shape, content in sorted(entries):
        found.update(json.dumps([name, dtype, shape]).encode() + content)
    return found.hexdigest()


def _sampled(path: Path) -> Iterator[_Entry]:
    """Every tensor in a file with a few bytes from evenly spread places."""
    for name, tensor in _tensors(path):
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        step = max(1, (len(content) - SAMPLED_BYTES) // (SAMPLED_SPOTS - 1))
        starts = range(0, max(1, len(content) - SAMPLED_BYTES + 1), step)
        sample = b"".join(content[start : start + SAMPLED_BYTES] for start in starts)
        yield name, _dtype_name(tensor.dtype), list(tensor.shape), sample


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a file, mapped from it where that is possible: the disk is read where a tensor is used."""
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    else:
        with reading(path):
            tensors = unpickled(path, "cpu")
        yield from tensors.items()


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    ((_, tensor),) = safetensors.deserialize(save({"": torch.empty(0, dtype=dtype)}))
    return tensor["dtype"]
