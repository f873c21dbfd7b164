"""Identify a model by its content, independent of its folder, shards and file format."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import safetensors
import torch
from mergekit.common import ModelPath
from pydantic import ConfigDict, TypeAdapter
from safetensors.torch import save

from mergekit_slta import files
from mergekit_slta.errors import logger, reading
from mergekit_slta.files import cache_folder, digest
from mergekit_slta.models.adapters import adapter_config, adapter_weights
from mergekit_slta.models.headers import weight_map

LOG = logger(__name__)

SAMPLED_SPOTS = 8
SAMPLED_BYTES = 64
REMEMBERED_FROM = 2**26  # bytes: smaller files are hashed anew by one thread in a tenth of a second

# A tensor's name, its dtype as safetensors names it, its shape, and bytes that stand for its content.
_Entry = tuple[str, str, list[int], bytes]
_ENTRIES = TypeAdapter(list[_Entry], config=ConfigDict(ser_json_bytes="hex", val_json_bytes="hex"))


def fingerprint_of(folder: str | Path, adapter: Path | None = None, *, whole: bool = False) -> str:
    """Identify a model by the names, shapes, dtypes and bytes of its tensors; sha256 in hex.

    A LoRA is identified by its base model and its adapter.

    Args:
        folder: the folder with the model's files.
        adapter: the folder of a LoRA.
        whole: hash all bytes of each tensor instead of a sample, so that a change of a few rows shows. A large file is
            read once; its hashes are kept in the cache folder until the file changes.
    """
    entries = _remembered_hashes if whole else _sampled
    content = _digest(entry for file in weight_map(Path(folder)) for entry in entries(Path(folder) / file))
    if adapter is None:
        return content
    tensors = _digest(entries(adapter_weights(adapter)))
    config = adapter_config(ModelPath(path=str(adapter)))
    scaling = {key: config.get(key) for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")}
    scaled = hashlib.sha256((tensors + json.dumps(scaling, sort_keys=True)).encode()).hexdigest()
    return hashlib.sha256(f"{content}+{scaled}".encode()).hexdigest()


def _digest(entries: Iterable[_Entry]) -> str:
    found = hashlib.sha256()
    for name, dtype, shape, content in sorted(entries):
        found.update(json.dumps([name, dtype, shape]).encode() + content)
    return found.hexdigest()


def _remembered_hashes(path: Path) -> list[_Entry]:
    """Every tensor in a file with the hash of its bytes; a large file is read again only if it has changed."""
    status = path.stat()
    if status.st_size < REMEMBERED_FROM:
        return _hashed(path)
    # The ctime also differs when a file is replaced by one with an older date.
    key = [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    known = cache_folder() / "hashes" / f"{digest(key)}.json"
    try:
        return _ENTRIES.validate_json(known.read_bytes())
    except (OSError, ValueError):  # not hashed yet, or damaged
        LOG.info("Reading all of %s to identify its content.", path)
    with ThreadPoolExecutor() as pool:  # hashing releases Python's lock
        entries = _hashed(path, pool.map)
    with contextlib.suppress(OSError):
        files.write(known, _ENTRIES.dump_json(entries))
    return entries


def _hashed(path: Path, apply: Callable[..., Iterable[_Entry]] = map) -> list[_Entry]:
    return list(apply(lambda tensor: (*tensor[:3], hashlib.sha256(tensor[3]).digest()), _tensors(path)))


def _sampled(path: Path) -> Iterator[_Entry]:
    """Every tensor in a file with a few bytes from evenly spread places: training changes nearly all of a tensor."""
    for name, dtype, shape, content in _tensors(path):
        step = max(1, (len(content) - SAMPLED_BYTES) // (SAMPLED_SPOTS - 1))
        starts = range(0, max(1, len(content) - SAMPLED_BYTES + 1), step)
        yield name, dtype, shape, b"".join(content[start : start + SAMPLED_BYTES] for start in starts)


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], memoryview]]:
    """Every tensor in a file with its bytes, which are read from the disk when they are used.

    Like mergekit's own loader, this maps the file into memory. The system refuses files larger than its memory.
    """
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                header = file.get_slice(name)
                yield name, header.get_dtype(), header.get_shape(), _bytes(file.get_tensor(name))
    else:
        with reading(path):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for name, tensor in content.get("state_dict", content).items():
            yield name, _dtype_name(tensor.dtype), list(tensor.shape), _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    ((_, tensor),) = safetensors.deserialize(save({"": torch.empty(0, dtype=dtype)}))
    return tensor["dtype"]
