"""One model's weights, read a layer at a time through mergekit's loader, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from mergekit.architecture.conversion import convert_checkpoint_tensors
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import ShardedTensorIndex
from mergekit.io.tasks import LoaderCache

from mergekit_slta.errors import SltaError, reading
from mergekit_slta.models.adapters import adapter_config, adapter_folder, adapter_weights
from mergekit_slta.models.skeleton import computation, model_tensor_name

SAMPLED_SPOTS = 8
SAMPLED_BYTES = 64


class Checkpoint:
    """A model that a recipe names, read through mergekit's ``LoaderCache``.

    Args:
        reference: the model as mergekit refers to it; a LoRA is merged by mergekit first.
        trust_remote_code: mergekit's flag of that name.

    Attributes:
        bytes_read: how many bytes of tensors have been read, in the checkpoint's own dtype.
    """

    def __init__(self, reference: ModelReference, trust_remote_code: bool = False) -> None:
        self.reference = reference
        self.trust_remote_code = trust_remote_code
        self.bytes_read = 0

    def __str__(self) -> str:
        return str(self.reference)

    @cached_property
    def config(self) -> transformers.PretrainedConfig:
        return self.reference.config(trust_remote_code=self.trust_remote_code)

    @cached_property
    def _loader(self):  # type: ignore[no-untyped-def]
        with reading(self, "cannot be opened", "get sound copies of its files"):
            return LoaderCache().get(self.reference)

    def open(self) -> None:
        """Find the checkpoint's files; mergekit downloads them, or merges the LoRA, where that is still to be done."""
        self._loader  # noqa: B018

    @property
    def settings(self) -> str:
        """The entries of the configuration that may decide what the layers compute, as text."""
        return json.dumps(computation(self.config), sort_keys=True, default=str)

    @property
    def folder(self) -> str:
        """The local folder with the checkpoint's files, its LoRA merged."""
        return self._loader.index.base_path

    @property
    def tensor_names(self) -> Mapping[str, str]:
        """The names of the checkpoint's tensors, each with the file that holds it."""
        return self._loader.index.tensor_paths

    @cached_property
    def dtype(self) -> str:
        """The dtype that most of the checkpoint's tensors have, by the config or else by a tensor."""
        declared = getattr(self.config, "dtype", None)
        if declared is None:
            declared = self._loader.get_tensor(next(iter(self.tensor_names))).dtype
        return str(declared).removeprefix("torch.")

    def read(
        self, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as float32 (integer ones as they are).

        Args:
            names: what to call each tensor, and the model's name of it.
            base_model_prefix: the prefix that checkpoints of the bare base model lack.
            device: where the tensors go.

        Raises:
            SltaError: a tensor is missing, or holds NaN or Inf.
        """
        tensors = {key: self._read(name, base_model_prefix, device) for key, name in names.items()}
        self._loader.flush()
        return tensors

    def prefetch(self, layer: int) -> None:
        """Ask the system to read a decoder layer from the disk while something else is computed; takes no memory.

        Args:
            layer: the layer's index, which is the first number in its tensors' names.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        for path, begin, end in self._places.get(layer, ()):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    @cached_property
    def _places(self) -> dict[int, list[tuple[Path, int, int]]]:
        """Where in which file each layer's tensors are, those side by side as one."""
        places: dict[int, list[tuple[Path, int, int]]] = {}
        for shard in self._loader.index.shards:
            path = Path(self.folder) / shard.filename
            for name, _, begin, end in _header(path) if path.suffix == ".safetensors" else ():
                number = next((part for part in name.split(".") if part.isdigit()), None)
                if number is not None:
                    places.setdefault(int(number), []).append((path, begin, end))
        return {layer: _joined(found) for layer, found in places.items()}

    def _read(self, name: str, base_model_prefix: str, device: torch.device | str) -> torch.Tensor:
        stored = model_tensor_name(name, self.tensor_names, base_model_prefix)
        with reading(f"The tensor {name} of {self}"):
            tensor = self._loader.get_tensor(stored, device=str(device)) if stored else self._convert(name)
        if tensor is None:
            raise SltaError(f"{self} lacks the tensor {name}: its checkpoint is incomplete or of another architecture.")
        self.bytes_read += tensor.nbytes
        if not tensor.is_floating_point():
            return tensor.to(device)
        # A sum is NaN or infinite if any element is; only then is a closer look needed, since it may also overflow.
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise SltaError(
                f"{self} holds NaN or Inf in the tensor {name}: the checkpoint is broken, get a sound copy."
            )
        return tensor.to(device=device, dtype=torch.float32)

    def _convert(self, name: str) -> torch.Tensor | None:
        """Build a tensor that the checkpoint stores under other names, such as the experts of a mixture."""
        indices = [part for part in name.split(".") if part.isdigit()]
        sources = {
            key: (lambda key=key: self._loader.get_tensor(key))
            for key in self.tensor_names
            if all(f".{index}." in f".{key}." for index in indices[:1])
        }
        # transformers lists what one class stores otherwise by its name, and what a family does by its model type.
        conversions = (*(self.config.architectures or ()), self.config.model_type)
        found = (convert_checkpoint_tensors(key, sources, name) for key in conversions)
        return next((tensor for tensor in found if tensor is not None), None)

    def fingerprint(self, cache_dir: str | None = None) -> str:
        """Identify the model by content: names, shapes, dtypes and some bytes of every tensor; sha256 in hex.

        The folder, the number of shards and the file format do not matter. A LoRA is identified by its base and its
        adapter, whatever it was merged into.
        """
        if self.reference.lora is None:
            return _folder_fingerprint(self.folder)
        base = ModelReference(model=self.reference.model).local_path(cache_dir=cache_dir)
        adapter = adapter_folder(self.reference.lora, cache_dir)
        return hashlib.sha256(f"{_folder_fingerprint(base)}+{_adapter_fingerprint(adapter)}".encode()).hexdigest()


def _folder_fingerprint(folder: str) -> str:
    index = ShardedTensorIndex.from_disk(folder)
    return _digest(entry for shard in index.shards for entry in _sampled_tensors(Path(folder) / shard.filename))


def _digest(entries: Iterator[tuple[str, str, list[int], bytes]]) -> str:
    digest = hashlib.sha256()
    for name, dtype, shape, sample in sorted(entries):
        digest.update(json.dumps([name, dtype, shape]).encode() + sample)
    return digest.hexdigest()


def _sampled_tensors(path: Path) -> Iterator[tuple[str, str, list[int], bytes]]:
    """Name, dtype, shape and some bytes of every tensor in a file."""
    if path.suffix != ".safetensors":
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for name, tensor in tensors.get("state_dict", tensors).items():
            content = tensor.contiguous().flatten().view(torch.uint8).numpy()
            yield name, _SAFETENSORS_DTYPE[tensor.dtype], list(tensor.shape), _spots(memoryview(content))
        return
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        for name, entry, begin, end in _header(path):
            yield name, entry["dtype"], entry["shape"], _spots(view[begin:end])


def _header(path: Path) -> list[tuple[str, dict[str, Any], int, int]]:
    """Each tensor of a safetensors file: its name, its entry in the header, and where its bytes are in the file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    return [(name, e, start + e["data_offsets"][0], start + e["data_offsets"][1]) for name, e in header.items()]


def _joined(places: list[tuple[Path, int, int]]) -> list[tuple[Path, int, int]]:
    """Ranges of bytes with neighbours made one."""
    joined: list[tuple[Path, int, int]] = []
    for path, begin, end in sorted(places):
        if joined and joined[-1][0] == path and joined[-1][2] == begin:
            joined[-1] = (path, joined[-1][1], end)
        else:
            joined.append((path, begin, end))
    return joined


_SAFETENSORS_DTYPE = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def _spots(content: memoryview) -> bytes:
    """A few bytes from evenly spread places: training changes every tensor nearly everywhere."""
    step = max(1, (len(content) - SAMPLED_BYTES) // (SAMPLED_SPOTS - 1))
    starts = range(0, max(1, len(content) - SAMPLED_BYTES + 1), step)
    return b"".join(bytes(content[start : start + SAMPLED_BYTES]) for start in starts)


def _adapter_fingerprint(folder: Path) -> str:
    tensors = _digest(_sampled_tensors(adapter_weights(folder)))
    config = adapter_config(folder)
    scaling = {key: config.get(key) for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")}
    return hashlib.sha256((tensors + json.dumps(scaling, sort_keys=True)).encode()).hexdigest()
