"""LoRA adapters: their files, in a folder or on the Hub, and what mergekit calls one that is merged."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import huggingface_hub
from mergekit.common import ModelPath, ModelReference

from mergekit_slta import hub
from mergekit_slta.errors import SltaError
from mergekit_slta.headers import (
    ADAPTER_CONFIG,
    Headers,
    file_headers,
    hub_file_headers,
    hub_files,
    hub_problem,
    listed,
)

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # in the order of preference


def adapter_headers(path: ModelPath) -> Headers | None:
    """The tensors of an adapter, or None where only a download would tell.

    Raises:
        SltaError: files are missing or damaged, or the Hub cannot be asked.
    """
    folder = Path(path.path) if os.path.isdir(path.path) else None
    files = [file.name for file in folder.iterdir()] if folder else hub_files(path)
    weights = next((name for name in ADAPTER_FILES if name in files), ADAPTER_FILES[0])
    if missing := [name for name in (ADAPTER_CONFIG, weights) if name not in files]:
        raise SltaError(f"{path} is no LoRA adapter: it lacks {listed(missing)}.")
    if folder:
        return file_headers(folder / weights)
    if not weights.endswith(".safetensors"):
        return None
    try:
        found = huggingface_hub.parse_safetensors_file_metadata(path.path, weights, revision=path.revision)
    except hub.ERRORS as error:
        raise hub_problem(path, error) from error
    return hub_file_headers(found)


def adapter_folder(path: ModelPath, cache_dir: str | None = None) -> Path:
    """The folder with an adapter's files: the one that the path names, or the download of one on the Hub."""
    if Path(path.path).exists():
        return Path(path.path)
    files = [*ADAPTER_FILES, ADAPTER_CONFIG]
    found = huggingface_hub.snapshot_download(
        path.path, revision=path.revision, cache_dir=cache_dir, allow_patterns=files
    )
    return Path(found)


def adapter_weights(folder: Path) -> Path:
    """The file with an adapter's tensors.

    Raises:
        SltaError: there is none.
    """
    files = [folder / name for name in ADAPTER_FILES if (folder / name).exists()]
    if not files:
        raise SltaError(f"{folder} holds no LoRA adapter ({ADAPTER_FILES[0]}).")
    return files[0]


def merged_name(reference: ModelReference) -> str:
    """What mergekit calls the folder of a merged adapter, by the paths alone."""
    assert reference.lora is not None
    return f"{reference.model._unique_id()}_{reference.lora._unique_id()}"


def merged_folders(reference: ModelReference, cache: str) -> list[Path]:
    """The folders that an adapter at these paths has been merged into, now or before its files changed."""
    found = sorted(Path(cache).glob(f"{glob.escape(merged_name(reference))}*"))
    return [folder for folder in found if folder.is_dir() and folder.suffix != ".partial"]
