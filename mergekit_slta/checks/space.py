"""Checks of folders and disks: whether a merge has room to write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import ADAPTER_CONFIG, Model
from mergekit_slta.recipe.settings import MethodSettings
from mergekit_slta.tables import as_size


def folders(settings: MethodSettings, out: Path | None) -> None:
    """Refuse folders to write to, the output's and those named in the recipe, that are not writable."""
    named = {f"'{name}: {folder}'": folder for name in settings.folders if (folder := getattr(settings, name))}
    for said, folder in (named | ({str(out): out} if out else {})).items():
        require_writable(said, Path(folder).expanduser())


def require_writable(said: str, path: Path) -> None:
    """Refuse a path that cannot be created, because the nearest path above that exists is no writable folder."""
    nearest = nearest_path(path)
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise SltaError(f"{said} cannot be created: {nearest} is not a writable folder, name another.")


def not_overwritten(models: Iterable[Model], out: Path) -> None:
    """Refuse to write the merged model into the folder of a model that it is made of, or of any adapter."""
    if (out / ADAPTER_CONFIG).exists():
        raise SltaError(f"{out} is the folder of an adapter, which transformers would add to the merge: name another.")
    for model in models:
        if model.folder is not None and out.exists() and model.folder.samefile(out):
            raise SltaError(f"{out} is the folder of {model}, which the merge would overwrite: name another.")


def disk_space(needs: Sequence[tuple[Path, str, int]]) -> None:
    """Refuse disks that are too small for all that is written to them: each folder, the thing, and its bytes."""
    disks: dict[int, list[tuple[Path, str, int]]] = {}
    for need in needs:
        disks.setdefault(nearest_path(need[0]).stat().st_dev, []).append(need)
    for entries in disks.values():
        folder = entries[0][0]
        free = shutil.disk_usage(nearest_path(folder)).free
        if sum(nbytes for *_, nbytes in entries) > free:
            parts = " and ".join(f"{thing} (about {as_size(nbytes)})" for _, thing, nbytes in entries)
            raise SltaError(
                f"The disk with {folder} has {as_size(free)} free, too little for {parts}: make room or choose another."
            )


def nearest_path(path: Path) -> Path:
    """The path itself if it exists, or the nearest one above it that does."""
    return next(found for found in (path.absolute(), *path.absolute().parents) if found.exists())
