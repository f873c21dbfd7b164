"""The download, disk and memory of a merge, by the headers of the models' files."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mergekit_slta.checks.data import content_of
from mergekit_slta.featcal.scratch import resumable_bytes
from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.models.headers import Model, TensorHeader
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import CalibrationSettings, FeatcalSettings, SltaSettings
from mergekit_slta.tables import as_size

# What Python and the libraries take: 0.5 GB resident after a tiny merge on a CPU, and 0.75 GB beyond the formula at the
# peak of an slta merge of three models of 0.07 billion parameters.
LIBRARIES = 700_000_000
SUMS = 5  # matrices of the widest map's inputs in float64, while a method solves it
_LAYER = re.compile(r"^(.*?\.)(\d+)\.")  # the stack of layers, and a layer's number
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?")


@dataclass(frozen=True)
class Needs:
    """Sizes in bytes; printed, three lines.

    Attributes:
        download: the weights that are on the Hub alone, by model.
        merged: the merged model, as it is stored.
        solved: the layers that ``featcal`` keeps until the merged model is written.
        memory: of the machine, or of the GPU where one computes.
    """

    download: Mapping[str, int]
    merged: int
    solved: int
    memory: int

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in self.download.items())
        total = sum(self.download.values())
        parts = {"for the download": total, "for the merged model": self.merged, "for the solved layers": self.solved}
        disk = ", ".join(f"{as_size(nbytes)} {purpose}" for purpose, nbytes in parts.items() if nbytes)
        return "\n".join(
            [
                f"Download: {f'{as_size(total)} ({listed})' if total else 'nothing, all models are here'}",
                f"Disk: {as_size(sum(parts.values()))} ({disk})",
                f"Memory: about {as_size(self.memory)}",
            ]
        )


def needs(experiment: Experiment) -> Needs:
    """Find out what a recipe takes without reading weights; an SltaError if a model cannot be opened."""
    recipe, config = experiment.recipe, experiment.recipe.config
    return Needs(
        downloads(experiment),
        stored_bytes(experiment.model(recipe.base), config.out_dtype or config.dtype),
        solved_bytes(experiment),
        memory(experiment),
    )


def downloads(experiment: Experiment) -> dict[str, int]:
    """The bytes of the weights of each model that is on the Hub alone."""
    models = {str(model.model): experiment.model(model) for model in experiment.recipe.references}
    return {name: stored_bytes(model) for name, model in models.items() if model.folder is None}


def stored_bytes(model: Model, dtype: str | None = None) -> int:
    """The bytes that a model's tensors take in a data type, or in their own without one."""
    kind = getattr(torch, (dtype or "").removeprefix("torch."), None)
    return sum(stored.count * kind.itemsize if kind else stored.nbytes for stored in model.tensors.values())


def solved_bytes(experiment: Experiment) -> int:
    """The bytes of all layers in float32, which ``featcal`` keeps on the disk; 0 for other methods."""
    if not isinstance(experiment.recipe.settings, FeatcalSettings):
        return 0
    layers = _layers(experiment.model(experiment.recipe.base), _count)
    return 4 * sum(layers.values())


def still_to_solve(experiment: Experiment, out: Path) -> int:
    """The bytes of the layers that ``featcal`` still writes into a folder, where a killed merge may have left some."""
    nbytes, partial = solved_bytes(experiment), out / PARTIAL_OF_MERGE
    if not nbytes or not partial.is_dir():
        return nbytes
    experts = [content_of(experiment, expert.reference) for expert in experiment.recipe.experts]
    return max(nbytes - resumable_bytes(partial, experts), 0)


def memory(experiment: Experiment) -> int:
    """The bytes of memory that a merge takes, by one formula for all methods.

    The merge holds a tensor of the base model, of the T experts and of the merged model in the recipe's ``dtype``. A
    method that runs models holds, before that, their largest layer in float32 (of a mixture one expert), the next one
    as it is stored, and the hidden states of all samples, ``featcal`` of two models. Of these the larger counts; a
    method that solves matrices needs ``SUMS`` matrices of the widest one's inputs in float64 besides, and
    the libraries come on top.
    """
    recipe, settings = experiment.recipe, experiment.recipe.settings
    base, models = experiment.model(recipe.base), len(recipe.experts) + 2
    tensors = [header for header in base.tensors.values() if len(header.shape) > 1]
    stored = max(header.nbytes // header.count for header in tensors)  # bytes of a number
    kind = getattr(torch, (recipe.config.dtype or "").removeprefix("torch."), None)
    merging = models * (kind.itemsize if kind else stored) * max(header.count for header in tensors)
    sums = 0 if isinstance(settings, SltaSettings) else 8 * SUMS * max(header.shape[-1] for header in tensors) ** 2
    if not isinstance(settings, CalibrationSettings):
        return LIBRARIES + merging + sums
    layer = max(_layers(base, _resident).values(), default=0)
    tokens = len(recipe.tasks) * settings.samples * settings.max_tokens
    states = 4 * (1 + settings.runs_experts) * tokens * (base.size("hidden_size") or 0)
    return LIBRARIES + max(merging, (4 * models + stored * (models - 1)) * layer + states) + sums


def _count(name: str, header: TensorHeader) -> int:
    return header.count


def _resident(name: str, header: TensorHeader) -> int:
    """The numbers of a tensor that are in memory at once: of a mixture's experts, those of one."""
    expert = _EXPERT.search(name)
    if expert is None:
        return header.count
    if expert[1] is not None:  # stored one by one
        return header.count if expert[1] == "0" else 0
    return math.prod(header.shape[1:])


def _layers(model: Model, count: Callable[[str, TensorHeader], int]) -> dict[str, int]:
    """The size of each layer of the largest stack of layers, which is the language model's."""
    stacks = defaultdict[str, Counter[str]](Counter)
    for name, header in model.tensors.items():
        if found := _LAYER.match(name):
            stacks[found[1]][found[2]] += count(name, header)
    return dict(max(stacks.values(), key=lambda layers: sum(layers.values()), default={}))
