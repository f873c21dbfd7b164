"""One model's weights, read a layer at a time through mergekit's loader, and its fingerprint."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from mergekit.architecture.conversion import convert_checkpoint_tensors
from mergekit.common import ModelPath, ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from pydantic import TypeAdapter

from mergekit_slta import files
from mergekit_slta.errors import SltaError, reading
from mergekit_slta.files import cache_folder, digest
from mergekit_slta.models.adapters import adapter_config, adapter_folder, adapter_weights, merged_folders, merged_name
from mergekit_slta.models.headers import ADAPTER_CONFIG
from mergekit_slta.models.skeleton import model_tensor_name

LOG = logging.getLogger(__name__)

SAMPLED_SPOTS = 8
SAMPLED_BYTES = 64
READ_AT_ONCE = 2**22
REMEMBERED_FROM = 2**26  # bytes: smaller files are hashed anew in a tenth of a second


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
            return current_loader(self.reference)

    def open(self) -> None:
        """Find the checkpoint's files; mergekit downloads them, or merges the LoRA, where that is still to be done."""
        self._loader  # noqa: B018

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

    def fingerprint(self, cache_dir: str | None = None, *, whole: bool = False) -> str:
        """Identify the model by content, as ``fingerprint_of`` does, after a download where there is no copy yet."""
        if self.reference.lora is None:
            return fingerprint_of(self.folder, whole=whole)
        base = ModelReference(model=self.reference.model).local_path(cache_dir=cache_dir)
        return fingerprint_of(base, adapter_folder(self.reference.lora, cache_dir), whole=whole)


def current_loader(reference: ModelReference) -> LazyTensorLoader:
    """mergekit's loader of a model; one of an adapter is made anew if its files changed since it was made."""
    cache = LoaderCache()
    if reference.lora is not None and cache.lora_cache_dir:  # other threads of a merge than the first know no folder
        merged = merge_adapter(reference, cache.lora_cache_dir, cache.trust_remote_code, cache.lora_merge_dtype)
        if reference in cache.loaders and cache.loaders[reference].index.base_path != merged.model.path:
            del cache.loaders[reference]
        if reference not in cache.loaders:
            cache.loaders[reference] = merged.lazy_loader(lazy_unpickle=cache.lazy_unpickle)
    return cache.get(reference)


_MERGED = getattr(ModelReference.merged, "__wrapped__", ModelReference.merged)  # mergekit's own


@functools.wraps(_MERGED)
def merge_adapter(
    self: ModelReference,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    lora_merge_dtype: str | None = None,
) -> ModelReference:
    """mergekit's ``ModelReference.merged``, with a folder for each content instead of one for each pair of paths.

    mergekit takes whatever is in its folder, though the base model or the adapter has changed since, and though the
    merge was interrupted. Here the folder's name tells the content of both and the type that they were merged in, and
    the folder gets its name when it is complete.
    """
    if self.lora is None or not cache_dir:
        return _MERGED(self, cache_dir, trust_remote_code, lora_merge_dtype)
    folder = Path(cache_dir) / f"{merged_name(self)}_{_merged_content(self, lora_merge_dtype)[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock := f"{folder}.lock"):
            if not folder.exists():
                _merge_into(folder, lambda part: _MERGED(self, part, trust_remote_code, lora_merge_dtype))
                if others := [other.name for other in merged_folders(self, cache_dir) if other != folder]:
                    LOG.warning(
                        "%s also holds %s as merged when its files or the type were others (%s): delete what is not "
                        "needed any more.",
                        cache_dir,
                        self,
                        ", ".join(others),
                    )
            with contextlib.suppress(OSError):  # Windows keeps a file that is open
                os.unlink(lock)
    return ModelReference(model=ModelPath(path=str(folder)))


def _merge_into(folder: Path, merge: Callable[[str], ModelReference]) -> None:
    part = folder.with_name(folder.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)  # of a merge that was killed
    try:
        os.replace(merge(str(part)).model.path, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _merged_content(reference: ModelReference, dtype: str | None) -> str:
    """What decides the files of a merged adapter: the base model's weights and configuration, the adapter, the type."""
    assert reference.lora is not None
    cache_dir = LoaderCache().hf_cache_dir
    base = Path(ModelReference(model=reference.model).local_path(cache_dir=cache_dir))
    adapter = adapter_folder(reference.lora, cache_dir)
    small = [base / "config.json", adapter / ADAPTER_CONFIG, adapter_weights(adapter)]
    return files.digest([fingerprint_of(base, whole=True), *map(_file_sha256, small), str(dtype)])


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint_of(folder: str | Path, adapter: Path | None = None, *, whole: bool = False) -> str:
    """Identify a model by content: names, shapes, dtypes and bytes of every tensor; sha256 in hex.

    The folder, the number of shards and the file format do not matter. A LoRA is identified by its base and its
    adapter, whatever it was merged into.

    Args:
        folder: the model's files.
        adapter: a LoRA's.
        whole: take all bytes of a tensor, so that a change of a few rows shows, rather than a sample. Large files are
            read once for it: their hashes are kept in the cache folder until the file changes.
    """
    read = _hashed_tensors if whole else _sampled_tensors
    shards = ShardedTensorIndex.from_disk(str(folder)).shards
    content = _digest(entry for shard in shards for entry in read(Path(folder) / shard.filename))
    if adapter is None:
        return content
    tensors = _digest(read(adapter_weights(adapter)))
    return hashlib.sha256(f"{content}+{_scaled(tensors, adapter)}".encode()).hexdigest()


# A tensor's name, dtype and shape, and bytes that stand for its content.
_Entry = tuple[str, str, list[int], bytes]


def _digest(entries: Iterable[_Entry]) -> str:
    found = hashlib.sha256()
    for name, dtype, shape, content in sorted(entries):
        found.update(json.dumps([name, dtype, shape]).encode() + content)
    return found.hexdigest()


def _hashed_tensors(path: Path) -> list[_Entry]:
    """Every tensor in a file with the hash of all its bytes, which are read again only if the file has changed."""
    status = path.stat()
    if status.st_size < REMEMBERED_FROM:
        return _hash_tensors(path)
    # A file that is replaced by one with an older date has another time of change (ctime).
    key = [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    known = cache_folder() / "hashes" / f"{digest(key)}.json"
    try:
        return [(name, dtype, shape, bytes.fromhex(content)) for name, dtype, shape, content in _read_known(known)]
    except (OSError, ValueError):  # not hashed yet, or damaged
        LOG.info("Reading all of %s, to know it by content.", path)
    entries = _hash_tensors(path)
    content = [(name, dtype, shape, content.hex()) for name, dtype, shape, content in entries]
    with contextlib.suppress(OSError):
        files.write(known, json.dumps(content).encode())
    return entries


def _read_known(file: Path) -> list[tuple[str, str, list[int], str]]:
    return TypeAdapter(list[tuple[str, str, list[int], str]]).validate_json(file.read_bytes())


def _hash_tensors(path: Path) -> list[_Entry]:
    if path.suffix != ".safetensors":
        return [
            (name, dtype, shape, hashlib.sha256(stored).digest()) for name, dtype, shape, stored in _unpickled(path)
        ]
    tensors = _header(path)
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        hashes = pool.map(lambda tensor: _hash_range(path, tensor[2], tensor[3]), tensors)
        return [(name, e["dtype"], e["shape"], found) for (name, e, *_), found in zip(tensors, hashes, strict=True)]


def _hash_range(path: Path, begin: int, end: int) -> bytes:
    found = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (part := file.read(min(READ_AT_ONCE, end - begin))):
            found.update(part)
            begin += len(part)
    return found.digest()


def _unpickled(path: Path) -> Iterator[tuple[str, str, list[int], memoryview]]:
    tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for name, tensor in tensors.get("state_dict", tensors).items():
        content = tensor.contiguous().flatten().view(torch.uint8).numpy()
        yield name, _SAFETENSORS_DTYPE[tensor.dtype], list(tensor.shape), memoryview(content)


def _sampled_tensors(path: Path) -> Iterator[_Entry]:
    """Every tensor in a file with some of its bytes."""
    if path.suffix != ".safetensors":
        for name, dtype, shape, stored in _unpickled(path):
            yield name, dtype, shape, _spots(stored)
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


def _scaled(tensors: str, folder: Path) -> str:
    """An adapter by its tensors' digest and by what their product is scaled with."""
    config = adapter_config(folder)
    scaling = {key: config.get(key) for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")}
    return hashlib.sha256((tensors + json.dumps(scaling, sort_keys=True)).encode()).hexdigest()
