"""A model's folder, its configuration and the headers of its weight files, also on the Hub, without reading weights."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
import transformers
from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError, RemoteEntryNotFoundError
from mergekit.common import ModelPath, ModelReference

from mergekit_slta.errors import SltaError, first_line, reading
from mergekit_slta.models import hub
from mergekit_slta.models.layout import Layout, meta_model
from mergekit_slta.words import listed

LOG = logging.getLogger(__name__)

# In mergekit's order of preference.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_CONFIG = "adapter_config.json"  # tells an adapter from a model
TOKENIZER_FILES = (  # a folder with one of the first three holds a tokenizer
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
PROCESSOR = (  # of images, video and sound, and how an embedding model makes one vector of many
    "*processor_config.json", "audio_tokenizer_config.json", "modules.json", "config_sentence_transformers.json",
    "sentence_bert_config.json", "*_Pooling/config.json", "*_Dense/*",
)  # fmt: skip
CODE = "*.py"
_LFS_POINTER = b"version https://git-lfs"


class TensorHeader(NamedTuple):
    """A stored tensor."""

    shape: torch.Size
    nbytes: int  # in the file
    integer: bool = False


Headers = Mapping[str, TensorHeader]


def config_entry(config: transformers.PretrainedConfig, name: str) -> Any:
    """An entry of a configuration; None without it, or where it differs from layer to layer, as in Gemma 4."""
    with contextlib.suppress(RuntimeError):  # by which transformers refuses the latter
        return getattr(config, name, None)
    return None


def exempt_types(tensors: Headers) -> dict[str, str]:
    """The types of those tensors of a base model that a recipe's type is not for: they stay as they are.

    They hold integers, or are stored wider than most: in bfloat16, a router's bias would have few values left.
    """
    widths = {name: header.nbytes // max(1, header.shape.numel()) for name, header in tensors.items()}
    counts = Counter(widths[name] for name, header in tensors.items() if not header.integer)
    usual, types = max(counts, key=counts.__getitem__, default=0), {4: "float32", 8: "float64"}
    special = {name: header for name, header in tensors.items() if header.integer or widths[name] > usual > 1}
    return {name: "int64" if header.integer else types[widths[name]] for name, header in special.items()}


@dataclass(frozen=True)
class Model:
    """A model without its weights; for a LoRA, the model that it adapts."""

    reference: ModelReference  # as the recipe names it
    config: transformers.PretrainedConfig
    text_config: transformers.PretrainedConfig  # of the language model in it, or the same
    tensors: Headers  # of its checkpoint, by name
    folder: Path | None  # None for a model on the Hub that has not been downloaded
    trust_remote_code: bool  # mergekit's flag of that name
    architecture: str  # the model's class as its configuration names it
    prefix: str  # which checkpoints of the bare base model lack
    vocabulary: Any  # how many token ids the model knows; None if it is no language model
    _layouts: dict[Any, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return str(self.reference)

    @property
    def dtype(self) -> str:
        """The data type that the configuration gives, or its part for the language model; "" if neither does."""
        declared = getattr(self.config, "dtype", None) or getattr(self.text_config, "dtype", None)
        return str(declared or "").removeprefix("torch.")

    @cached_property
    def built(self) -> transformers.PreTrainedModel | None:
        """transformers' own model without weights; None, with a warning, if transformers cannot build it."""
        try:
            return meta_model(self.config, self.trust_remote_code)
        except SltaError as error:
            LOG.warning("What needs the structure of %s is not checked, and goes by shapes: %s", self, error)
            return None

    def layout(self, built: transformers.PreTrainedModel | None) -> Layout:
        """How its checkpoint stores the tensors of a model, its own or the base model's, that is ``built``."""
        if built not in self._layouts:  # with a mixture's experts one by one, it takes seconds
            shapes = {name: header.shape for name, header in self.tensors.items()}
            self._layouts[built] = Layout(built, self.tensors, shapes)
        return self._layouts[built]


def open_model(reference: ModelReference, trust_remote_code: bool = False, cache_dir: str | None = None) -> Model:
    """Read the configuration and the headers of the weight files of a model, not its adapter, here or on the Hub."""
    path = reference.model
    folder = local_folder(path, cache_dir)
    if folder is None:
        tensors = hub_headers(path)
    else:
        needed = ["config.json"], [f"{name}{end}" for name in WEIGHT_FILES for end in ("", ".index.json")]
        whole = all(any((folder / name).is_file() for name in names) for names in needed)
        if (folder / ADAPTER_CONFIG).is_file() and not whole:
            raise SltaError(f"{folder} is a LoRA adapter: write 'BASE+{folder}', with the model it adapts as BASE.")
        tensors = folder_headers(folder)
    config = _config(reference, trust_remote_code)
    text_config = config.get_text_config()
    tied = all(getattr(part, "tie_word_embeddings", True) for part in (config, text_config))
    if not tied and any(name.endswith("lm_head.weight") for name in tensors):
        # Mistral Small's configuration ties by default, and transformers loads the model untied.
        config.tie_word_embeddings = False
    layers = max(getattr(part, "num_hidden_layers", None) or 0 for part in (config, text_config))
    if layers > len(tensors):  # building such a model may take forever
        why = f"more than the checkpoint has tensors ({len(tensors)}): get undamaged copies of its files"
        raise SltaError(f"The config.json of {path} gives {layers} layers, {why}.")
    width = config_entry(text_config, "hidden_size")
    most = max((max(header.shape, default=0) for header in tensors.values()), default=0)
    if isinstance(width, int) and width > most:
        why = f"and no tensor has more than {most} rows or columns: get undamaged copies of its files"
        raise SltaError(f"The config.json of {path} gives a hidden_size of {width}, {why}.")
    architecture = (config.architectures or [""])[0].removeprefix("FSDP")  # which some versions of transformers wrote
    vocabulary = getattr(text_config, "vocab_size", None)
    prefix = getattr(getattr(transformers, architecture, None), "base_model_prefix", "") or "model"
    return Model(reference, config, text_config, tensors, folder, trust_remote_code, architecture, prefix, vocabulary)


def _config(reference: ModelReference, trust_remote_code: bool) -> transformers.PretrainedConfig:
    try:
        config = reference.config(trust_remote_code=trust_remote_code)
    except Exception as error:  # a model's own code may raise anything
        if "trust_remote_code" in str(error):
            raise SltaError(f"{reference.model} needs its own code: allow it with --trust-remote-code.") from error
        problem = f"transformers cannot read the config.json of {reference.model} ({first_line(error)})"
        fix = "get an undamaged copy, or a version of transformers that knows the model"
        raise SltaError(f"{problem}: {fix}.") from error
    names = config.architectures
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise SltaError(f"The config.json of {reference.model} must name one class under 'architectures'.")
    return config


# The folders of models and adapters


def local_folder(path: ModelPath, cache_dir: str | None = None) -> Path | None:
    """The folder with a model's files, also that of an earlier download; None if the model was not downloaded."""
    if os.path.isdir(path.path):
        return Path(path.path)
    with contextlib.suppress(*hub.HUB_ERRORS, SltaError):
        # The Hub's client refuses a folder that lacks any file that is asked for.
        folder = snapshot_download(
            path.path, revision=path.revision, cache_dir=cache_dir, local_files_only=True, allow_patterns="config.json"
        )
        weight_map(Path(folder))
        return Path(folder)
    return None


def folder_with(files: Sequence[str], path: ModelPath, cache_dir: str | None) -> Path:
    """The folder that a path names; of a repository these files are downloaded, or those that fit these patterns."""
    if Path(path.path).exists():
        return Path(path.path)
    patterns = [*files, "*config.json"]  # which every repository has: the Hub's client warns where nothing fits
    return Path(snapshot_download(path.path, revision=path.revision, cache_dir=cache_dir, allow_patterns=patterns))


def source_folders(reference: ModelReference, cache_dir: str | None = None) -> tuple[Path, Path | None]:
    """The folders with the files of a model and of its adapter, if it has one; they are downloaded if necessary."""
    base = Path(reference.model.path)
    if not base.exists():
        with hub.asking(reference.model):
            base = Path(ModelReference(model=reference.model).local_path(cache_dir=cache_dir))
    return base, adapter_folder(reference.lora, cache_dir) if reference.lora else None


def adapter_folder(path: ModelPath, cache_dir: str | None = None) -> Path:
    """The folder with an adapter's files; an adapter on the Hub is downloaded."""
    with hub.asking(path):
        return folder_with([*ADAPTER_FILES, ADAPTER_CONFIG], path, cache_dir)


def refuse_adapter_in(folder: Path) -> None:
    """Refuse a model's folder that holds an adapter, too: mergekit reads the model alone."""
    if (folder / ADAPTER_CONFIG).exists():
        raise SltaError(f"{folder} holds an adapter, which transformers would add: move it, or name another folder.")


# The headers of weight files


def weight_map(folder: Path) -> dict[str, list[str]]:
    """The weight files that mergekit reads from a folder, each with its tensors' names if there is an index."""
    for name in WEIGHT_FILES:
        if (index := folder / f"{name}.index.json").is_file():
            files = _indexed_files(index)
            if (folder / name).is_file() and name not in files:
                why = "transformers reads the first, mergekit the second: remove the one that is not the model's"
                raise SltaError(f"{folder / name} and {index} are two sets of tensors; {why}.")
            return files
        if (folder / name).is_file():
            return {name: []}
    raise SltaError(f"{folder} has no tensors: mergekit needs {' or '.join(WEIGHT_FILES)}, whole or with an index.")


def adapter_weights(folder: Path) -> Path:
    """The weight file in an adapter's folder; an SltaError if it has none."""
    for file in (folder / name for name in ADAPTER_FILES):
        if file.exists():
            return file
    inner = sorted(str(config.parent) for config in folder.glob(f"*/{ADAPTER_CONFIG}"))
    name_one = f"; name one of the adapters in it, {listed(inner)}" if inner else ""
    raise SltaError(f"{folder} is not a LoRA adapter: it lacks {ADAPTER_FILES[0]}{name_one}.")


def _indexed_files(index: Path) -> dict[str, list[str]]:
    files: defaultdict[str, list[str]] = defaultdict(list)
    with reading(index):
        for tensor, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"it says that {tensor} is in {file!r}, which is not in the model's folder")
            files[file].append(tensor)
        missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise SltaError(f"{index.parent} lacks {listed(missing)}, which its index names: complete the download.")
    return dict(files)


def folder_headers(folder: Path) -> Headers:
    """The tensors of a folder's weight files; an SltaError if files are missing or damaged."""
    tensors: dict[str, TensorHeader] = {}
    places: dict[str, str] = {}
    for file, names in weight_map(folder).items():
        headers = file_headers(folder / file)
        if twice := [name for name in headers if places.setdefault(name, file) != file]:
            # Programs differ in which one they read: that of the index, of the last file, or of the one that is open.
            where = f"{twice[0]} in both {places[twice[0]]} and {file}"
            raise SltaError(f"{folder} has {where}: load the model with transformers, and save it.")
        if lost := [name for name in names if name not in headers]:
            raise SltaError(
                f"{folder / file} lacks {listed(lost)}, which the index expects there: get an undamaged copy."
            )
        tensors.update({name: headers[name] for name in names or headers})
    return tensors


def file_headers(path: Path) -> Headers:
    """The tensors of a ``.safetensors`` file, in the order of their bytes, or of a pickled checkpoint."""
    with reading(path):
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise SltaError(f"{path} is a git-lfs pointer without the tensors: run 'git lfs pull'.")
        if path.suffix != ".safetensors":
            return {
                name: TensorHeader(tensor.shape, tensor.nbytes, not tensor.is_floating_point())
                for name, tensor in unpickled(path, "meta").items()
            }
        try:
            with safetensors.safe_open(path, "np") as tensors:  # torch would reserve memory for the whole file
                slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
                return {name: _header(part.get_shape(), part.get_dtype()) for name, part in slices.items()}
        except safetensors.SafetensorError as error:
            raise ValueError(f"it is truncated or damaged: {error}") from error


def unpickled(path: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a pickled checkpoint; torch can map only its newer format, which is an archive, from the file."""
    try:
        content = torch.load(path, map_location=device, mmap=zipfile.is_zipfile(path), weights_only=True)
    except pickle.UnpicklingError as error:  # torch recommends to load it without this protection
        code = re.search(r"GLOBAL (\S+)", str(error))
        holds = f"contains code ({code[1]})" if code else "is damaged"
        raise SltaError(f"{path} {holds}: do not load it, and get the model's safetensors files.") from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise SltaError(f"{path} does not hold tensors alone: save what the model's state_dict() returns.")
    return content


def _header(shape: list[int], dtype: str) -> TensorHeader:
    """A tensor's header; a dtype's name holds the bits of an element, except for BOOL, which has 8."""
    bits, size = re.search(r"\d+", dtype), torch.Size(shape)
    nbytes = size.numel() * (int(bits[0]) if bits else 8) // 8
    return TensorHeader(size, nbytes, integer=dtype.startswith(("I", "U", "BOOL")))


def hub_headers(path: ModelPath) -> Headers:
    """The tensors of a model on the Hub, read by requests for parts of its files."""
    try:
        with hub.asking(path):
            files = get_safetensors_metadata(path.path, revision=path.revision).files_metadata
    except NotASafetensorsRepoError:
        with hub.asking(path), contextlib.suppress(RemoteEntryNotFoundError):  # whether there is such a model at all
            hf_hub_download(path.path, "config.json", revision=path.revision)
        raise SltaError(
            f"{path} has no model.safetensors on the Hub: instead of GGUF files, name the model that they were made "
            f"from; download pickled weights with 'hf download {path.path}' first; write an adapter after its base "
            f"model, 'BASE+{path.path}'."
        ) from None
    stored = {name: tensor for file in files.values() for name, tensor in file.tensors.items()}
    return {name: _header(tensor.shape, tensor.dtype) for name, tensor in stored.items()}
