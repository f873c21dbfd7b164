"""The files beside a model's weights: which of them a merge copies, and those that it must not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from mergekit_slta.errors import reading, refuse
from mergekit_slta.models.headers import CHAT_TEMPLATES, PROCESSOR

SHARED = ".huggingface-shared-blobs"  # huggingface_hub's mark


def beside_weights(folder: Path) -> list[Path]:
    """All that lies in a model's folder, with what a merge copies from folders in it."""
    return [*folder.iterdir(), *(path for name in (*CHAT_TEMPLATES, *PROCESSOR) for path in folder.glob(name))]


def refuse_links(folder: Path, paths: Iterable[Path]) -> None:
    """Refuse links to files outside of a model's folder, whose content would be merged and published.

    The files of a model in the Hub's cache are links to a folder ``blobs``, the model's or a marked one of all models.
    """
    targets = {path: path.resolve() for path in paths}
    cached = {at for at in targets.values() if at.match("models--*/blobs/*") or (at.parent.parent / SHARED).is_file()}
    refuse(
        f"{path} is a link to a file outside of {folder}: replace it with the file itself, or remove it."
        for path, target in targets.items()
        if target.is_file() and not target.is_relative_to(folder.resolve()) and target not in cached
    )


def code_of(folder: Path) -> Iterator[Path]:
    """The Python files of a model's own code: those that its configurations name, and what these import."""
    for config in folder.glob("*config.json"):
        if config.name[0] == ".":  # on disks of other systems, macOS adds a binary "._config.json"
            continue
        with reading(config):
            classes = (json.loads(config.read_bytes()).get("auto_map") or {}).values()
            names = [name for given in classes for name in (given if isinstance(given, list) else [given]) if name]
            modules = [folder / f"{name.rpartition('--')[2].partition('.')[0]}.py" for name in names]
            for module in filter(Path.is_file, modules[:]):
                modules += map(Path, get_relative_import_files(module))
            if odd := [module for module in modules if not (module.parent == folder and module.stem.isidentifier())]:
                raise ValueError(f"it needs the module {odd[0]}, which is not in its folder")
        yield from filter(Path.is_file, modules)
