"""The files of a LoRA adapter, in a folder or on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mergekit.common import ModelPath, ModelReference

from mergekit_slta.errors import SltaError, reading
from mergekit_slta.models import hub
from mergekit_slta.models.headers import ADAPTER_CONFIG, Headers, file_headers, weight_files

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # the first one is preferred

# A folder with one of the first three holds a tokenizer.
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")


def adapter_headers(path: ModelPath, cache_dir: str | None = None) -> Headers:
    """The tensors of an adapter; an adapter on the Hub is downloaded."""
    return file_headers(adapter_weights(adapter_folder(path, cache_dir)))


def adapter_settings(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter without the paths; names, which peft writes in any order, are sorted."""
    file = folder / ADAPTER_CONFIG
    with reading(file):
        return {
            key: sorted(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value
            for key, value in json.loads(file.read_text(encoding="utf-8")).items()
            if key not in ("base_model_name_or_path", "revision")
        }


def adapter_folder(path: ModelPath, cache_dir: str | None = None) -> Path:
    """The folder with an adapter's files; an adapter on the Hub is downloaded."""
    with hub.asking(path):
        return hub.folder_with([*ADAPTER_FILES, ADAPTER_CONFIG], path, cache_dir)


def source_folders(reference: ModelReference, cache_dir: str | None = None) -> tuple[Path, Path | None]:
    """The folders with the files of a model and of its adapter, if it has one; mergekit downloads them if necessary."""
    base = Path(ModelReference(model=reference.model).local_path(cache_dir=cache_dir))
    return base, adapter_folder(reference.lora, cache_dir) if reference.lora else None


def source_files(folder: Path, adapter: Path | None) -> list[Path]:
    """The files that decide a model's tensors, and its own code; some need not exist, see ``weight_files``."""
    code = sorted(folder.glob("*.py"))
    return [*weight_files(folder), *code, *([adapter / ADAPTER_CONFIG, adapter_weights(adapter)] if adapter else [])]


def tokenizer_folder(path: ModelPath, cache_dir: str | None = None) -> Path | None:
    """The folder with an adapter's own tokenizer; None if the adapter has none."""
    folder = hub.folder_with((*TOKENIZER_FILES, *CHAT_TEMPLATES, "*.py"), path, cache_dir)
    return folder if any((folder / name).exists() for name in TOKENIZER_FILES[:3]) else None


def adapter_weights(folder: Path) -> Path:
    for file in (folder / name for name in ADAPTER_FILES):
        if file.exists():
            return file
    raise SltaError(f"{folder} is not a LoRA adapter: it lacks {ADAPTER_FILES[0]}.")
