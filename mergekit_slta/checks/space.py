"""What a merge takes, by the headers of the models' files, and whether folders and disks have room for it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from mergekit.common import ModelReference

from mergekit_slta.actmat import covariance
from mergekit_slta.engine.memory import LIBRARIES, NUMBER
from mergekit_slta.engine.partial import run_of
from mergekit_slta.errors import MachineError, SltaError
from mergekit_slta.featcal.merge import feature_merge_bytes
from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import on_device
from mergekit_slta.models.adapters import merged_name
from mergekit_slta.models.headers import Model, TensorHeader, refuse_adapter_in
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import (
    ActmatSettings,
    CalibrationSettings,
    FeatcalSettings,
    SftmSettings,
    SltaSettings,
)
from mergekit_slta.sftm import superpose
from mergekit_slta.slta.grams import calibration_bytes
from mergekit_slta.tables import as_size


@dataclass(frozen=True)
class Needs:
    """What a merge takes, in bytes; printed, three lines."""

    download: Mapping[str, int]  # the weights that are on the Hub alone, by model
    merged: int  # the merged model, as it is stored
    solved: int  # the layers that ``featcal`` keeps until the merged model is written
    adapters: int  # a whole model for each LoRA adapter, which is merged into the base model before
    memory: int = 0  # of the machine, or of the GPU where one computes; 0 where only the disk is asked for
    of_run: int = 0  # the same without what it takes to merge an adapter, which no GPU does
    of_machine: int = 0  # its ``machine_memory``; 0 where a GPU computes, and where the system does not tell

    def __str__(self) -> str:
        models = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in self.download.items())
        total = sum(self.download.values())
        parts = {"for the download": total, "for the merged model": self.merged, "for the solved layers": self.solved}
        parts["for the merged adapters"] = self.adapters
        disk = ", ".join(f"{as_size(nbytes)} {purpose}" for purpose, nbytes in parts.items() if nbytes)
        download = f"{as_size(total)} ({models})" if total else "nothing, all models are here"
        memory = f"about {as_size(self.memory)}"
        memory += f" (this machine has only {as_size(self.of_machine)})" * (0 < self.of_machine < self.memory)
        memory += f" to merge an adapter, which no GPU does; then {as_size(self.of_run)}" * (self.memory > self.of_run)
        return f"Download: {download}\nDisk: {as_size(sum(parts.values()))} ({disk})\nMemory: {memory}"


def needs(experiment: Experiment) -> Needs:
    """Find out what a recipe takes without reading weights; an SltaError if a model cannot be opened."""
    disk = _disk(experiment)
    running = _running(experiment) if isinstance(experiment.recipe.settings, CalibrationSettings) else 0
    adapted = _adapted(experiment) if disk.adapters else 0  # a whole model is in memory while an adapter is merged
    of_run = LIBRARIES + max(running, _merging(experiment))
    of_machine = machine_memory() if experiment.device in ("cpu", "mps") else 0
    return replace(disk, memory=max(LIBRARIES + adapted, of_run), of_run=of_run, of_machine=of_machine)


def machine_memory(groups: str = "/proc/self/cgroup", mounted: str = "/sys/fs/cgroup") -> int:
    """The bytes of memory that this machine has, or that a container or a job may take; 0 if the system does not say.

    ``groups`` is the file that names this process's control group (Linux's version 2), ``mounted`` has the groups.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    with contextlib.suppress(OSError):
        group = Path(mounted, Path(groups).read_text().rpartition("::")[2].strip().lstrip("/"))
        files = [folder / "memory.max" for folder in (group, *group.parents) if folder.is_relative_to(mounted)]
        limits += [int(text) for file in files if file.is_file() and (text := file.read_text().strip()).isdigit()]
    return min(limits, default=0)


def asking(experiment: Experiment, model: ModelReference) -> int:
    """The bytes of a whole model that answers prompts, without what it remembers of them."""
    return LIBRARIES + (_adapted(experiment) if model.lora else _stored_bytes(experiment.model(model)))


def _disk(experiment: Experiment) -> Needs:
    """What a recipe takes without the memory."""
    recipe = experiment.recipe
    base, config = experiment.model(recipe.base), recipe.config
    models = {str(reference.model): experiment.model(reference) for reference in recipe.references}
    return Needs(
        download={name: _stored_bytes(model) for name, model in models.items() if model.folder is None},
        merged=_stored_bytes(base, _dtype(config.out_dtype or config.dtype)),
        solved=_solved(experiment.decoder) if isinstance(recipe.settings, FeatcalSettings) else 0,
        adapters=sum(bool(reference.lora) for reference in recipe.references) * _adapted(experiment),
    )


def _adapted(experiment: Experiment) -> int:
    """The bytes of the base model with a merged adapter, in the type that the options name, or else its own."""
    return _stored_bytes(experiment.model(experiment.recipe.base), _dtype(experiment.options.lora_merge_dtype))


def _solved(decoder: Decoder) -> int:
    """The bytes of the layers and of the head that ``featcal`` solves."""
    tensors = [tensor for layer in decoder.layers for tensor in layer.state_dict().values()]
    if head := decoder.head:
        tensors.append(decoder.model.state_dict()[head.weight])
    return NUMBER * sum(tensor.numel() for tensor in tensors)


def _running(experiment: Experiment) -> int:
    """The bytes that a method takes to run the models; prompts of a dataset count as ``max_tokens`` tokens."""
    recipe, models = experiment.recipe, len(experiment.recipe.experts) + 1
    settings = recipe.settings_of(CalibrationSettings)
    decoder = on_device(experiment.decoder, experiment.device)
    drawn = {task: data.token_ids for (task, _), data in experiment.drawn.items()}
    tasks = [drawn.get(task) or [[0] * settings.max_tokens] * task.samples for task in recipe.tasks]
    if isinstance(settings, SltaSettings):
        return calibration_bytes(decoder, models, tasks, settings.level)
    return feature_merge_bytes(decoder, models, tasks)


def _merging(experiment: Experiment) -> int:
    """The bytes that mergekit takes to merge tensor by tensor, in the order of their names.

    All models' tensors are in the recipe's ``dtype``, mapped from their files if these have it, and the methods compute
    in float32. What is merged waits until a file is full.
    """
    recipe, settings, experts = experiment.recipe, experiment.recipe.settings, len(experiment.recipe.experts)
    base, dtype = experiment.model(recipe.base), _dtype(recipe.config.dtype)
    written = _dtype(recipe.config.out_dtype or recipe.config.dtype)
    of_adapters = experiment.options.lora_merge_dtype or base.dtype
    adapted = dtype == _dtype(of_adapters)  # adapters have been merged in that type
    others = sum(not (adapted and reference.lora) for reference in recipe.references)
    kinds = {experiment.model(one).dtype if not one.lora else of_adapters for one in recipe.references}
    vocabularies = base.vocabulary, getattr(base.text_config, "vocab_size_per_layer_input", None)  # Gemma 3n has two

    def held(header: TensorHeader) -> int:
        (rows, columns), numbers = header.shape[-2:], header.shape.numel()
        of_vocabulary = rows in vocabularies  # the embeddings or the output head
        loaded = others * dtype.itemsize * numbers if dtype and dtype.itemsize * numbers != header.nbytes else 0
        solving = 0
        if isinstance(settings, ActmatSettings) and not of_vocabulary:
            solving = covariance.matrix_bytes(rows, columns)
        if isinstance(settings, SftmSettings) and not of_vocabulary:
            solving = superpose.matrix_bytes(rows, columns, experts)
        # The merged tensor; or task vectors and their merge, which of a stack exists twice.
        copies = 1 if isinstance(settings, CalibrationSettings) else experts + 1 + (len(header.shape) > 2)
        if isinstance(settings, FeatcalSettings) and recipe.tokenizer_source is None and len(kinds) == 1:
            loaded, copies = 0, (experts + 2) * of_vocabulary  # the others are mapped from the layers' files
        if isinstance(settings, SltaSettings) and settings.level != "model" and of_vocabulary:
            copies = 0  # it stays the base model's
        return loaded + NUMBER * copies * numbers + solving

    most = waiting = 0
    for _, header in sorted(base.tensors.items()):
        if len(header.shape) > 1:
            most = max(most, held(header) + waiting)
        nbytes = header.shape.numel() * written.itemsize if written else header.nbytes
        waiting = min(waiting + nbytes, experiment.options.out_shard_size)
    return most


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, (name or "").removeprefix("torch."), None)


def _stored_bytes(model: Model, dtype: torch.dtype | None = None) -> int:
    """The bytes that a model's tensors take in a data type, or in their own without one."""
    return sum(stored.shape.numel() * dtype.itemsize if dtype else stored.nbytes for stored in model.tensors.values())


def folders(experiment: Experiment, out: Path | None) -> None:
    """Refuse folders to write to, the output's, the report's and that of merged adapters, that are not writable."""
    settings, cache = experiment.recipe.settings, experiment.options.lora_merge_cache
    if cache and any(reference.lora for reference in experiment.recipe.references):
        require_writable(f"'--lora-merge-cache {cache}'", Path(cache))
    if isinstance(settings, CalibrationSettings) and settings.report:
        require_writable(f"'report: {settings.report}'", Path(settings.report).expanduser())
    if out is not None:
        require_writable(str(out), out)


def require_writable(what: str, path: Path) -> None:
    """Refuse a path that cannot be created, because the nearest path above that exists is no writable folder."""
    nearest = path if path.is_symlink() else _nearest_path(path)  # a link may lead nowhere
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise SltaError(f"{what} cannot be created: {nearest} is not a writable folder; name another folder.")


def not_overwritten(models: Iterable[Model], out: Path) -> None:
    """Refuse to write the merged model into the folder of a model that it is made of, or of any adapter."""
    refuse_adapter_in(out)
    for model in models:
        if model.folder is not None and out.exists() and model.folder.samefile(out):
            raise SltaError(f"{out} is the folder of {model}, which the merge would overwrite: name another folder.")


def room(experiment: Experiment, out: Path | None) -> None:
    """Refuse disks that are too small for all that a merge writes to them."""
    needed, written = _disk(experiment), list[tuple[Path, str, int]]()
    if out is not None:
        # What a killed merge has left there is used, or refused.
        there = sum(layer.stat().st_size for layer in (out / PARTIAL_OF_MERGE).glob("*.safetensors"))
        begun = out.glob("model-*.safetensors") if run_of(out / PARTIAL_OF_MERGE) is not None else ()
        half = sum(file.stat().st_size for file in begun if "-of-" not in file.name)
        written.append((out, "the merged model", max(needed.merged - half, 0)))
        written.append((out, "the solved layers", max(needed.solved - there, 0)))
    downloads = Path(experiment.options.transformers_cache or HF_HUB_CACHE)
    written.append((downloads, "the download", sum(needed.download.values())))
    if cache := experiment.options.lora_merge_cache:
        names = (merged_name(reference) for reference in experiment.recipe.references if reference.lora)
        files = ([*Path(cache).glob(f"{name}_*/*.safetensors")] for name in names)  # of earlier merges
        there = sum(min(sum(file.stat().st_size for file in own), _adapted(experiment)) for own in files)
        written.append((Path(cache), "the merged adapters", needed.adapters - there))
    disks = defaultdict[int, list[tuple[Path, str, int]]](list)
    for folder, thing, nbytes in written:
        disks[_nearest_path(folder).stat().st_dev] += [(folder, thing, nbytes)] if nbytes else []
    for parts in filter(None, disks.values()):
        folder = parts[0][0]
        free = shutil.disk_usage(_nearest_path(folder)).free
        if sum(nbytes for *_, nbytes in parts) > free:
            things = " and ".join(f"{thing} (about {as_size(nbytes)})" for _, thing, nbytes in parts)
            raise MachineError(
                f"The disk with {folder} has {as_size(free)} free, too little for {things}: make room or name another "
                "folder."
            )


def _nearest_path(path: Path) -> Path:
    """The path itself if it exists, or the nearest one above it that does."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
