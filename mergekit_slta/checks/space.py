"""The checks of disks, folders and memory: whether there is room for what a merge writes, and how much it takes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import torch

from mergekit_slta.checks.case import Case, attempt
from mergekit_slta.featcal.scratch import Needs, scratch_root
from mergekit_slta.files import cache_folder
from mergekit_slta.models.headers import Model
from mergekit_slta.models.merged_adapters import merged_folders
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import FeatcalSettings

FULL = (errno.ENOSPC, errno.EDQUOT)
WORTH_A_WORD = 100_000  # bytes that a finished part of a merge takes


def folders(case: Case) -> list[str]:
    """Folders for the report and for the layers of a feature merge that cannot be made or written to."""
    problems = []
    for name in case.method.folders:
        given = getattr(case.reading.settings, name)
        parent = unwritable_folder(Path(given).expanduser()) if given else None
        if parent:
            problems.append(f"'{name}: {given}' cannot be made, {parent} is no folder to write to: name another.")
    return problems


def disk_space(case: Case) -> list[str]:
    """Disks that are too small for the output and for the adapters that mergekit merges first."""
    needs: dict[int, list[tuple[Path, str, int]]] = {}
    for folder, what, nbytes in [*output_need(case), *adapter_needs(case), *scratch_need(case)]:
        needs.setdefault(nearest_folder(folder).stat().st_dev, []).append((folder, what, nbytes))
    problems = []
    for entries in needs.values():
        free = shutil.disk_usage(nearest_folder(entries[0][0])).free
        if sum(nbytes for *_, nbytes in entries) > free:
            parts = " and ".join(f"{what} (about {gigabytes(nbytes)})" for _, what, nbytes in entries)
            problems.append(
                f"The disk with {entries[0][0]} has {gigabytes(free)} free, too little for {parts}: "
                "make room or choose another."
            )
    return problems


def output_need(case: Case) -> list[tuple[Path, str, int]]:
    """The folder of the merged model, and its size by the base model's."""
    if case.out_path is None or case.base is None:
        return []
    name = case.config.out_dtype or case.config.dtype
    return [(case.out_path, "the merged model", stored_bytes(case.base, name))]


def adapter_needs(case: Case) -> list[tuple[Path, str, int]]:
    """The folders of adapters that are still to be merged, and their sizes."""
    if not case.options.lora_merge_cache:
        return []
    cache, dtype = case.options.lora_merge_cache, case.options.lora_merge_dtype
    return [
        (Path(cache), f"the merged adapter {model}", stored_bytes(model, dtype))
        for model in case.adapted
        if not merged_folders(model.reference, cache)
    ]


def scratch_need(case: Case) -> list[tuple[Path, str, int]]:
    """The folder that a feature merge is solved into, and its size."""
    needed = case.needs
    if not isinstance(needed, Needs):
        return []
    root = scratch_root(case.settings(FeatcalSettings).scratch)
    return [(root, "the layers as they are solved", needed.disk)]


def feature_merge_needs(case: Case) -> list[str]:
    """The memory and the disk space that a feature merge takes while it runs."""
    needed = case.needs
    if not isinstance(needed, Needs):
        return []
    root = scratch_root(case.settings(FeatcalSettings).scratch)
    said = [
        f"'{case.method.method}' takes about {gigabytes(needed.memory)} of memory while it solves, and "
        f"{gigabytes(needed.disk)} on the disk with {root} until the output is written."
    ]
    left = sum(file.stat().st_size for file in root.glob("featcal-*/*"))
    if left >= WORTH_A_WORD:
        said.append(
            f"{root} holds {gigabytes(left)} of merges that did not finish: this one goes on if it is among them; "
            "delete the folders featcal-* of those that are not wanted."
        )
    return said


def is_disk_full(error: Exception) -> bool:
    """Whether something could not be written for lack of space; libraries in Rust only say it in words."""
    return getattr(error, "errno", None) in FULL or any(os.strerror(number) in str(error) for number in FULL)


def full_disk_problem(experiment: Experiment, out: Path) -> str:
    """Which of the disks that a merge writes to is full, and how much it lacks for the merged model."""
    config, options = experiment.recipe.config, experiment.options
    cache = [Path(options.lora_merge_cache)] if options.lora_merge_cache else []
    place = min([out, *cache, cache_folder()], key=free_bytes)
    said = f"The disk with {place} is full"
    model = attempt(experiment.model, experiment.recipe.references[0])
    if place == out and isinstance(model, Model):
        whole = stored_bytes(model, config.out_dtype or config.dtype)
        written = sum(file.stat().st_size for file in out.glob("*") if file.is_file())
        said += (
            f": the merged model takes about {gigabytes(whole)}, of which {gigabytes(written)} are written, and "
            f"{gigabytes(max(0, whole - written - free_bytes(out)))} more are needed than there is room for"
        )
    return f"{said}; make room, or write to another disk, and run the same command again."


def free_bytes(path: Path) -> int:
    """What is free on the disk where a path is, or is to be."""
    return shutil.disk_usage(nearest_folder(path)).free


def stored_bytes(model: Model, dtype: str | None) -> int:
    """The bytes that a model's tensors take in a type, or in those that they have."""
    tensors = (model.tensors or {}).values()
    kind = getattr(torch, (dtype or "").removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        return sum(stored.nbytes for stored in tensors)
    return sum(stored.count * kind.itemsize for stored in tensors)


def nearest_folder(path: Path) -> Path:
    """The path itself, or the nearest of the folders above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def unwritable_folder(path: Path) -> Path | None:
    """The nearest existing folder above a path, if that is no folder or cannot be written to; None if it can."""
    nearest = nearest_folder(path)
    return None if nearest.is_dir() and os.access(nearest, os.W_OK) else nearest


def gigabytes(nbytes: int) -> str:
    """A size in words."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"
