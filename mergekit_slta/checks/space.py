"""Checks of disks, folders, memory and the device: whether a merge has room and a place to compute."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.featcal.scratch import scratch_root
from mergekit_slta.files import cache_folder
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import routed_tensors
from mergekit_slta.models.headers import Model
from mergekit_slta.models.merged_adapters import merged_folders
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.tables import as_size

FULL = (errno.ENOSPC, errno.EDQUOT)


def device(experiment: Experiment) -> None:
    """Refuse a device that PyTorch does not know, that this machine lacks, or without float64, as Apple's GPUs."""
    name = experiment.device
    try:
        torch.ones((), dtype=torch.float64, device=name).add(1).item()
    except Exception as error:  # of a kind that differs between devices
        raise SltaError(
            f"PyTorch cannot compute on the device '{name}' ({first_line(error)}): leave --device, --cuda and "
            "--multi-gpu out to compute on the CPU, or install the driver and the PyTorch that the device needs."
        ) from error


def folders(experiment: Experiment, out: Path | None) -> None:
    """Refuse folders to write to, the output's and those named in the recipe, that are not writable or hold a model."""
    recipe = experiment.recipe
    given = {name: getattr(recipe.settings, name) for name in recipe.method.folders}
    written = {f"'{name}: {folder}'": Path(folder).expanduser() for name, folder in given.items() if folder}
    for said, folder in (written | ({str(out): out} if out else {})).items():
        if parent := unwritable_folder(folder):
            raise SltaError(f"{said} cannot be created: {parent} is not a writable folder, name another.")
    if out is not None and out.exists():
        for model in map(experiment.model, recipe.references):
            if model.folder is not None and model.folder.samefile(out):
                raise SltaError(f"{out} is the folder of {model}, which the merge would overwrite: name another.")


def disk_space(experiment: Experiment, out: Path | None) -> None:
    """Refuse disks that are too small for the merged model, the adapters that mergekit merges, and solved layers."""
    needs: dict[int, list[tuple[Path, str, int]]] = {}
    for folder, what, nbytes in _written(experiment, out):
        needs.setdefault(nearest_folder(folder).stat().st_dev, []).append((folder, what, nbytes))
    for entries in needs.values():
        free = free_bytes(entries[0][0])
        if sum(nbytes for *_, nbytes in entries) > free:
            parts = " and ".join(f"{what} (about {as_size(nbytes)})" for _, what, nbytes in entries)
            raise SltaError(
                f"The disk with {entries[0][0]} has {as_size(free)} free, too little for {parts}: "
                "make room or choose another."
            )


def _written(experiment: Experiment, out: Path | None) -> Iterator[tuple[Path, str, int]]:
    """Everything that the merge writes: the folder, the thing, and its bytes."""
    recipe, options = experiment.recipe, experiment.options
    if out is not None:
        dtype = recipe.config.out_dtype or recipe.config.dtype
        yield out, "the merged model", stored_bytes(experiment.model(recipe.base), dtype)
    for model in map(experiment.model, recipe.references):
        cache = options.lora_merge_cache if model.reference.lora else None
        if cache and not merged_folders(model.reference, cache):
            yield Path(cache), f"the merged adapter {model}", stored_bytes(model, options.lora_merge_dtype)
    if isinstance(recipe.settings, FeatcalSettings):
        _, disk = solving_needs(experiment.decoder, len(recipe.experts))
        yield scratch_root(recipe.settings.scratch), "the solved layers", disk


def solving(experiment: Experiment) -> Iterator[str]:
    """The memory and the disk space that a method takes while it solves the layers."""
    settings = experiment.recipe.settings
    if isinstance(settings, FeatcalSettings):
        memory, disk = solving_needs(experiment.decoder, len(experiment.recipe.experts))
        yield (
            f"'{settings.method}' takes up to {as_size(memory)} of memory while it solves (the largest layer of all "
            f"models and the sums of its widest map), and {as_size(disk)} on the disk with "
            f"{scratch_root(settings.scratch)} until the output is written."
        )


def solving_needs(decoder: Decoder, experts: int) -> tuple[int, int]:
    """Estimate the bytes of memory and of disk that solving a decoder's layers takes.

    In memory are the largest layer of the base model, the experts and the merged model in float32, one expert of a
    mixture at a time, and four matrices of the widest map's inputs in float64. On the disk are the solved layers.
    """
    states = [layer.state_dict().values() for layer in decoder.layers]
    layers = [sum(tensor.numel() for tensor in state) for state in states]
    routed = [sum(tensor[1:].numel() for tensor in routed_tensors(layer).values()) for layer in decoder.layers]
    widest = max(tensor.shape[-1] for state in states for tensor in state if tensor.ndim > 1)
    memory = 4 * (experts + 2) * max(map(operator.sub, layers, routed)) + 8 * 4 * widest**2
    return memory, 4 * sum(layers)


@contextlib.contextmanager
def full_disk_said(experiment: Experiment, out: Path) -> Iterator[None]:
    """If a library fails because a disk is full, say which disk and how much space the merge lacks."""
    try:
        yield
    except SltaError:
        raise  # it names the file that could not be written
    except Exception as error:
        # Libraries in Rust say that a disk is full only in the error's text.
        if getattr(error, "errno", None) in FULL or any(os.strerror(number) in str(error) for number in FULL):
            raise SltaError(_full_disk(experiment, out)) from error
        raise


def _full_disk(experiment: Experiment, out: Path) -> str:
    """Say which disk of a merge is full, and how much space the merged model lacks."""
    config, options = experiment.recipe.config, experiment.options
    cache = [Path(options.lora_merge_cache)] if options.lora_merge_cache else []
    place = min([out, *cache, cache_folder()], key=free_bytes)
    said = f"The disk with {place} is full"
    if place == out:
        whole = stored_bytes(experiment.model(experiment.recipe.references[0]), config.out_dtype or config.dtype)
        written = sum(file.stat().st_size for file in out.glob("*") if file.is_file())
        said += (
            f": the merged model takes about {as_size(whole)}, of which {as_size(written)} are written, and "
            f"{as_size(max(0, whole - written - free_bytes(out)))} more are needed than there is room for"
        )
    return f"{said}; make room, or write to another disk, and run the same command again."


def free_bytes(path: Path) -> int:
    """The free space of the disk that a path is on, or will be on."""
    return shutil.disk_usage(nearest_folder(path)).free


def stored_bytes(model: Model, dtype: str | None) -> int:
    """The bytes that a model's tensors take in a data type, or in their own without one."""
    tensors = (model.tensors or {}).values()
    kind = getattr(torch, (dtype or "").removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        return sum(stored.nbytes for stored in tensors)
    return sum(stored.count * kind.itemsize for stored in tensors)


def nearest_folder(path: Path) -> Path:
    """The path itself if it exists, or the nearest folder above it that does."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def unwritable_folder(path: Path) -> Path | None:
    """The nearest existing path at or above ``path``, if it is not a folder that can be written to; else None."""
    nearest = nearest_folder(path)
    return None if nearest.is_dir() and os.access(nearest, os.W_OK) else nearest
