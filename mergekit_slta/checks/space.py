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

from mergekit_slta.checks.case import Case, attempt
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


def device(case: Case) -> list[str]:
    """A device that PyTorch does not know, that this machine does not have, or that has no float64, as Apple's GPUs."""
    name = case.experiment.device
    try:
        torch.ones((), dtype=torch.float64, device=name).add(1).item()
    except Exception as error:  # of a kind that differs between devices
        return [
            f"PyTorch cannot compute on the device '{name}' ({first_line(error)}): leave --device, --cuda and "
            "--multi-gpu out to compute on the CPU, or install the driver and the PyTorch that the device needs."
        ]
    return []


def folders(case: Case) -> list[str]:
    """Folders to write to, the output's and those named in the recipe, that cannot be written to or hold a model."""
    problems, out = [], case.out_path
    if out is not None and (parent := unwritable_folder(out)):
        problems.append(f"{out} cannot be created: {parent} is not a writable folder, name another.")
    if out is not None and out.exists():
        problems += [
            f"{out} is the folder of {model}, which the merge would overwrite: name another."
            for model in case.models
            if model.folder is not None and model.folder.samefile(out)
        ]
    for name in case.method.folders:
        given = getattr(case.reading.settings, name)
        parent = unwritable_folder(Path(given).expanduser()) if given else None
        if parent:
            problems.append(f"'{name}: {given}' cannot be created: {parent} is not a writable folder, name another.")
    return problems


def disk_space(case: Case) -> list[str]:
    """Disks that are too small for the merged model, the adapters that mergekit merges, and solved layers."""
    needs: dict[int, list[tuple[Path, str, int]]] = {}
    for folder, what, nbytes in _needs(case):
        needs.setdefault(nearest_folder(folder).stat().st_dev, []).append((folder, what, nbytes))
    problems = []
    for entries in needs.values():
        free = free_bytes(entries[0][0])
        if sum(nbytes for *_, nbytes in entries) > free:
            parts = " and ".join(f"{what} (about {as_size(nbytes)})" for _, what, nbytes in entries)
            problems.append(
                f"The disk with {entries[0][0]} has {as_size(free)} free, too little for {parts}: "
                "make room or choose another."
            )
    return problems


def _needs(case: Case) -> Iterator[tuple[Path, str, int]]:
    """Everything that the merge writes: the folder, what it is, and its bytes."""
    if case.out_path is not None and case.base is not None:
        name = case.config.out_dtype or case.config.dtype
        yield case.out_path, "the merged model", stored_bytes(case.base, name)
    cache = case.options.lora_merge_cache
    for model in case.adapted if cache else ():
        if not merged_folders(model.reference, cache):
            nbytes = stored_bytes(model, case.options.lora_merge_dtype)
            yield Path(cache), f"the merged adapter {model}", nbytes
    if case.method.solves_layers and isinstance(case.decoder, Decoder):
        _, disk = solving_needs(case.decoder, len(case.reading.experts))
        yield scratch_root(case.settings(FeatcalSettings).scratch), "the solved layers", disk


def solving(case: Case, decoder: Decoder) -> list[str]:
    """The memory and the disk space that a method takes while it solves the layers."""
    if not case.method.solves_layers:
        return []
    memory, disk = solving_needs(decoder, len(case.reading.experts))
    root = scratch_root(case.settings(FeatcalSettings).scratch)
    return [
        f"'{case.method.method}' takes up to {as_size(memory)} of memory while it solves (the largest layer of all "
        f"models and the sums of its widest map), and {as_size(disk)} on the disk with {root} until the output is "
        "written."
    ]


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
            raise SltaError(full_disk_problem(experiment, out)) from error
        raise


def full_disk_problem(experiment: Experiment, out: Path) -> str:
    """Say which disk of a merge is full, and how much space the merged model lacks."""
    config, options = experiment.recipe.config, experiment.options
    cache = [Path(options.lora_merge_cache)] if options.lora_merge_cache else []
    place = min([out, *cache, cache_folder()], key=free_bytes)
    said = f"The disk with {place} is full"
    model = attempt(experiment.model, experiment.recipe.references[0])
    if place == out and isinstance(model, Model):
        whole = stored_bytes(model, config.out_dtype or config.dtype)
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
