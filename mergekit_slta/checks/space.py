"""What a merge takes, by the headers of the models' files, and whether folders and disks have room for it."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE

from mergekit_slta.errors import MachineError, SltaError
from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.models.headers import ADAPTER_CONFIG, Headers, Model, TensorHeader
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import CalibrationSettings, FeatcalSettings, MethodSettings, SftmSettings
from mergekit_slta.tables import as_size

# What Python and the libraries take: 0.5 GB resident after a tiny merge on a CPU, and 0.75 GB beyond the formula at the
# peak of an slta merge of three models of 0.07 billion parameters.
LIBRARIES = 700_000_000
SUMS = 5  # matrices of the widest map's inputs, while a method solves it
_LAYER = re.compile(r"^(.*?\.)(\d+)\.")  # the stack of layers, and a layer's number
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?")


@dataclass(frozen=True)
class Needs:
    """Sizes in bytes; printed, three lines.

    Attributes:
        download: the weights that are on the Hub alone, by model.
        merged: the merged model, as it is stored.
        solved: the layers that ``featcal`` keeps until the merged model is written.
        adapters: a whole model for each LoRA adapter, which mergekit merges into the base model before.
        memory: of the machine, or of the GPU where one computes.
    """

    download: Mapping[str, int]
    merged: int
    solved: int
    adapters: int
    memory: int

    def __str__(self) -> str:
        models = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in self.download.items())
        total = sum(self.download.values())
        parts = {"for the download": total, "for the merged model": self.merged, "for the solved layers": self.solved}
        parts["for the merged adapters"] = self.adapters
        disk = ", ".join(f"{as_size(nbytes)} {purpose}" for purpose, nbytes in parts.items() if nbytes)
        return "\n".join(
            [
                f"Download: {f'{as_size(total)} ({models})' if total else 'nothing, all models are here'}",
                f"Disk: {as_size(sum(parts.values()))} ({disk})",
                f"Memory: about {as_size(self.memory)}",
            ]
        )


def needs(experiment: Experiment) -> Needs:
    """Find out what a recipe takes without reading weights; an SltaError if a model cannot be opened."""
    recipe = experiment.recipe
    base, dtype = experiment.model(recipe.base), _dtype(recipe.config.out_dtype or recipe.config.dtype)
    models = {str(reference.model): experiment.model(reference) for reference in recipe.references}
    solved = [*_layers(base).values()] if isinstance(recipe.settings, FeatcalSettings) else []
    return Needs(
        {name: _stored_bytes(model) for name, model in models.items() if model.folder is None},
        _stored_bytes(base, dtype),
        4 * sum(map(_count, solved)),
        sum(bool(reference.lora) for reference in recipe.references) * _stored_bytes(base, _dtype(recipe.config.dtype)),
        _memory(experiment),
    )


def _memory(experiment: Experiment) -> int:
    """The bytes of memory that a merge takes, by one formula for all methods.

    The merge holds a tensor of the base model, of the T experts and of the merged model in the recipe's ``dtype``, and
    for ``actmat`` and ``sftm`` ``SUMS`` matrices of the widest map's inputs, in float32 and float64. A method that runs
    models holds, before that, their largest layer in float32 (of a mixture one expert), the next one as it is stored,
    and the hidden states of all samples; ``featcal`` those of two models, and the ``SUMS`` matrices. Of merging and
    running the larger counts, and the libraries come on top.
    """
    recipe, settings = experiment.recipe, experiment.recipe.settings
    base, models = experiment.model(recipe.base), len(recipe.experts) + 2
    tensors = [header for header in base.tensors.values() if len(header.shape) > 1]
    stored = max(header.nbytes // header.count for header in tensors)  # bytes of a number
    dtype = _dtype(recipe.config.dtype)
    merging = models * (dtype.itemsize if dtype else stored) * max(header.count for header in tensors)
    number = 8 if isinstance(settings, SftmSettings) else 4
    sums = number * SUMS * max(header.shape[-1] for header in tensors) ** 2
    if not isinstance(settings, CalibrationSettings):
        return LIBRARIES + merging + sums
    layers = _layers(base).values()
    layer = max((sum(_in_memory(name, layer[name]) for name in layer) for layer in layers), default=0)
    tokens = sum(task.samples for task in recipe.tasks) * settings.max_tokens
    states = 4 * tokens * (base.size("hidden_size") or 0)
    passing = (4 * models + stored * (models - 1)) * layer + states
    if isinstance(settings, FeatcalSettings):
        passing += states + sums
    return LIBRARIES + max(merging, passing)


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, (name or "").removeprefix("torch."), None)


def _stored_bytes(model: Model, dtype: torch.dtype | None = None) -> int:
    """The bytes that a model's tensors take in a data type, or in their own without one."""
    return sum(stored.count * dtype.itemsize if dtype else stored.nbytes for stored in model.tensors.values())


def _layers(model: Model) -> Mapping[str, Headers]:
    """The tensors of each layer of the largest stack of layers, which is the language model's."""
    stacks = defaultdict[str, dict[str, dict[str, TensorHeader]]](lambda: defaultdict(dict))
    for name, header in model.tensors.items():
        if place := _LAYER.match(name):
            stacks[place[1]][place[2]][name] = header
    return max(stacks.values(), key=lambda layers: sum(map(_count, layers.values())), default={})


def _count(tensors: Headers) -> int:
    return sum(header.count for header in tensors.values())


def _in_memory(name: str, header: TensorHeader) -> int:
    """The numbers of a tensor that are in memory at once: of a mixture's experts, those of one."""
    expert = _EXPERT.search(name)
    if expert is None or expert[1] == "0":
        return header.count
    return 0 if expert[1] else math.prod(header.shape[1:])  # stored one by one, or in one tensor


def folders(settings: MethodSettings, out: Path | None) -> None:
    """Refuse folders to write to, the output's and the report's, that are not writable."""
    if isinstance(settings, CalibrationSettings) and settings.report:
        require_writable(f"'report: {settings.report}'", Path(settings.report).expanduser())
    if out is not None:
        require_writable(str(out), out)


def require_writable(what: str, path: Path) -> None:
    """Refuse a path that cannot be created, because the nearest path above that exists is no writable folder."""
    nearest = _nearest_path(path)
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise SltaError(f"{what} cannot be created: {nearest} is not a writable folder; name another folder.")


def not_overwritten(models: Iterable[Model], out: Path) -> None:
    """Refuse to write the merged model into the folder of a model that it is made of, or of any adapter."""
    if (out / ADAPTER_CONFIG).exists():
        raise SltaError(f"{out} holds an adapter, which transformers would add to the merge: name another folder.")
    for model in models:
        if model.folder is not None and out.exists() and model.folder.samefile(out):
            raise SltaError(f"{out} is the folder of {model}, which the merge would overwrite: name another folder.")


def room(experiment: Experiment, out: Path | None) -> None:
    """Refuse disks that are too small for all that a merge writes to them."""
    taken, written = needs(experiment), list[tuple[Path, str, int]]()
    if out is not None:
        # What a killed merge has left there is used or replaced.
        there = sum(layer.stat().st_size for layer in (out / PARTIAL_OF_MERGE).glob("*.safetensors"))
        written += [(out, "the merged model", taken.merged), (out, "the solved layers", max(taken.solved - there, 0))]
    written.append(
        (Path(experiment.options.transformers_cache or HF_HUB_CACHE), "the download", sum(taken.download.values()))
    )
    if taken.adapters and experiment.options.lora_merge_cache:
        written.append((Path(experiment.options.lora_merge_cache), "the merged adapters", taken.adapters))
    disks = defaultdict[int, list[tuple[Path, str, int]]](list)
    for folder, thing, nbytes in written:
        disks[_nearest_path(folder).stat().st_dev] += [(folder, thing, nbytes)] if nbytes else []
    for parts in filter(None, disks.values()):
        folder = parts[0][0]
        free = shutil.disk_usage(_nearest_path(folder)).free
        if sum(nbytes for *_, nbytes in parts) > free:
            things = " and ".join(f"{thing} (about {as_size(nbytes)})" for _, thing, nbytes in parts)
            raise MachineError(
                f"The disk with {folder} has {as_size(free)} free, too little for {things}: make room or name another."
            )


def _nearest_path(path: Path) -> Path:
    """The path itself if it exists, or the nearest one above it that does."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
