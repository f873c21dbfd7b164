"""Identify a model by its content, and tell what its configuration has it compute.

The content does not depend on the folder, the shards and the file format.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import save

from mergekit_slta.errors import reading
from mergekit_slta.files import digest
from mergekit_slta.models.headers import ADAPTER_CONFIG, CODE, WEIGHT_FILES, adapter_weights, unpickled, weight_map

SAMPLED_SPOTS = 8
SAMPLED_BYTES = 64


def fingerprint_of(folder: str | Path, adapter: Path | None = None) -> str:
    """Identify a model by the names, shapes and dtypes of its tensors and a sample of their bytes; sha256 in hex.

    Training changes nearly all bytes of a tensor. An edit of a few rows does not show; in files of this machine
    ``stamps`` shows it. ``adapter`` is the folder of an adapter that is merged into the model.
    """
    content = _content_hash(Path(folder) / file for file in weight_map(Path(folder)))
    if adapter is None:
        return content
    # With the None, fingerprints equal those that statistics files hold.
    merged = [content, _content_hash([adapter_weights(adapter)]), adapter_settings(adapter), None]
    return hashlib.sha256(json.dumps(merged, sort_keys=True).encode()).hexdigest()


def adapter_settings(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter without the paths; names, which peft writes in any order, are sorted."""
    file = folder / ADAPTER_CONFIG
    with reading(file):
        return {
            key: sorted(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value
            for key, value in json.loads(file.read_text(encoding="utf-8")).items()
            if key not in ("base_model_name_or_path", "revision")
        }


def source_files(folder: Path, adapter: Path | None) -> list[Path]:
    """The files that decide a model's tensors, and its own code; those that mergekit prefers need not exist."""
    preferred = [name + index for name in WEIGHT_FILES for index in ("", ".index.json")]
    weights = [folder / name for name in dict.fromkeys([*preferred, *weight_map(folder)])]
    of_adapter = [adapter / ADAPTER_CONFIG, adapter_weights(adapter)] if adapter else []
    return [*weights, *sorted(folder.glob(CODE)), *of_adapter]


def stamps(files: Iterable[Path]) -> dict[str, tuple[int, int, int]]:
    """By path, size, time of change and inode of the files that exist: one that is written or replaced gets others."""
    stamped = {}
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            stamped[str(path)] = status.st_size, status.st_mtime_ns, status.st_ino
    return stamped


def _content_hash(files: Iterable[Path]) -> str:
    """Hash the tensors in files, in the order of their names: a few bytes of each, from evenly spread places."""
    entries = list[tuple[str, bytes]]()
    for name, tensor in (entry for file in files for entry in _tensors(file)):
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        step = max(1, (len(content) - SAMPLED_BYTES) // (SAMPLED_SPOTS - 1))
        starts = range(0, max(1, len(content) - SAMPLED_BYTES + 1), step)
        sample = b"".join(content[start : start + SAMPLED_BYTES] for start in starts)
        entries.append((name, json.dumps([name, _dtype_name(tensor.dtype), list(tensor.shape)]).encode() + sample))
    return hashlib.sha256(b"".join(entry for _, entry in sorted(entries))).hexdigest()


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


# Configurations

# Entries of a configuration that change nothing of what a trained model's layers compute, and parts of such entries'
# names: names and versions, ids of tokens, what only training uses, what a forward pass returns beside its result, how
# weights are stored. All others are compared, also those that nobody knows yet.
_INERT = {
    "_name_or_path", "architectures", "auto_map", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "gradient_checkpointing", "id2label", "initializer_factor", "initializer_range", "is_encoder_decoder", "label2id",
    "output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type",
    "quantization_config", "return_dict", "task_specific_params", "torch_dtype", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache", "vocab_size",
}  # fmt: skip
_INERT_PARTS = ("dropout", "pdrop", "layerdrop", "jitter_noise", "aux_loss", "token_id", "tokenizer")


def computation(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of a configuration that may decide what layers compute; those of nested tables have dotted names."""
    deciding = dict[str, Any]()
    for name, value in entries.items():
        if name in _INERT or any(part in str(name) for part in _INERT_PARTS):
            continue
        nested = isinstance(value, dict) and value
        deciding |= computation(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return deciding


def hashed_computation(config: transformers.PretrainedConfig) -> dict[str, str]:
    """The entries of ``computation`` for the decoder's layers, with a hash of each value.

    Hashes show which entries have changed without publishing the values, which may be paths. 1 and 1.0 are equal.
    """
    text = json.dumps(computation(config.get_text_config().to_dict()), default=str)
    return {name: digest(value)[:12] for name, value in json.loads(text, parse_int=float).items()}
