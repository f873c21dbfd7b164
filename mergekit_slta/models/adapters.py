"""LoRA adapters: their files, in a folder or on the Hub, and the folder that mergekit merges one into."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
from mergekit.common import ModelPath, ModelReference

from mergekit_slta.errors import SltaError, reading
from mergekit_slta.models import hub
from mergekit_slta.models.headers import (
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
        adapter_config(folder)
        return file_headers(folder / weights)
    if not weights.endswith(".safetensors"):
        return None
    try:
        found = huggingface_hub.parse_safetensors_file_metadata(path.path, weights, revision=path.revision)
    except hub.ERRORS as error:
        raise hub_problem(path, error) from error
    return hub_file_headers(found)


def adapter_config(folder: Path) -> dict[str, Any]:
    """An adapter's configuration.

    Raises:
        SltaError: it cannot be read.
    """
    with reading(folder / ADAPTER_CONFIG):
        content = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object with named entries")
        return content


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


def last_change(path: ModelPath) -> float:
    """When an adapter's files last changed, in seconds since 1970; 0 for one that is not in a folder here."""
    files = [Path(path.path) / name for name in (*ADAPTER_FILES, ADAPTER_CONFIG)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0)


def merged_folder(reference: ModelReference, cache: str) -> Path:
    """Where mergekit keeps a merged adapter, which it tells by the paths alone."""
    assert reference.lora is not None
    return Path(cache) / f"{reference.model._unique_id()}_{reference.lora._unique_id()}"
