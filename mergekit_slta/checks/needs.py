"""The download, disk, memory and licences of a merge, by the headers of the models' files and by their cards."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
import yaml
from mergekit.common import ModelPath

from mergekit_slta.checks.data import content_of
from mergekit_slta.featcal.scratch import scratch_root, unfinished_merges
from mergekit_slta.models import hub
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
    """Sizes in bytes; printed, four lines.

    Attributes:
        download: the weights that are on the Hub alone, by model.
        merged: the merged model, as it is stored.
        solved: the layers that ``featcal`` keeps until the merged model is written.
        memory: of the machine, or of the GPU where one computes.
        licenses: of models and adapters, by their cards; "unknown" without one.
    """

    download: Mapping[str, int]
    merged: int
    solved: int
    memory: int
    licenses: Mapping[str, str]

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in self.download.items())
        total = sum(self.download.values())
        parts = {"for the download": total, "for the merged model": self.merged, "for the solved layers": self.solved}
        disk = ", ".join(f"{as_size(nbytes)} {purpose}" for purpose, nbytes in parts.items() if nbytes)
        by_license = defaultdict[str, list[str]](list)
        for name, license_name in self.licenses.items():
            by_license[license_name].append(name)
        licenses = "; ".join(f"{found} ({', '.join(names)})" for found, names in by_license.items())
        return "\n".join(
            [
                f"Download: {f'{as_size(total)} ({listed})' if total else 'nothing, all models are here'}",
                f"Disk: {as_size(sum(parts.values()))} ({disk})",
                f"Memory: about {as_size(self.memory)}",
                f"License: {licenses}",
            ]
        )


def needs(experiment: Experiment) -> Needs:
    """Find out what a recipe takes without reading weights; an SltaError if a model cannot be opened."""
    recipe, config = experiment.recipe, experiment.recipe.config
    paths = [path for model in recipe.references for path in (model.model, model.lora) if path is not None]
    return Needs(
        downloads(experiment),
        stored_bytes(experiment.model(recipe.base), config.out_dtype or config.dtype),
        solved_bytes(experiment),
        memory(experiment),
        {str(path): license_of(path) for path in dict.fromkeys(paths)},
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


def already_solved(experiment: Experiment) -> int:
    """The bytes of the layers that unfinished merges of the same experts have solved."""
    unfinished = unfinished_merges(solved_folder(experiment))
    experts = [content_of(experiment, own.reference) for own in experiment.recipe.experts] if unfinished else []
    return sum(nbytes for own, nbytes in unfinished if own == experts)


def solved_folder(experiment: Experiment) -> Path:
    """The folder of the solved layers."""
    settings = experiment.recipe.settings
    return scratch_root(settings.scratch if isinstance(settings, FeatcalSettings) else "")


def memory(experiment: Experiment) -> int:
    """The bytes of memory that a merge takes, by one formula for all methods.

    The merge holds a tensor of the base model, of the T experts and of the merged model in the recipe's ``dtype``. A
    method that runs models holds, before that, their largest layer in float32 (of a mixture one expert), the next one
    as it is stored, and the hidden states of all samples, ``featcal`` of two models. A method that solves matrices
    holds the widest one of each model, or the layer, beside ``SUMS`` matrices of its inputs in float64. The libraries
    come on top.
    """
    recipe, settings = experiment.recipe, experiment.recipe.settings
    base, models = experiment.model(recipe.base), len(recipe.experts) + 2
    tensors = [header for header in base.tensors.values() if len(header.shape) > 1]
    largest = max(header.count for header in tensors)
    widest = max(tensors, key=lambda header: header.shape[-1])
    stored = max(header.nbytes // header.count for header in tensors)  # bytes of a number
    kind = getattr(torch, (recipe.config.dtype or "").removeprefix("torch."), None)
    merging = models * (kind.itemsize if kind else stored) * largest
    sums = 0 if isinstance(settings, SltaSettings) else 8 * SUMS * widest.shape[-1] ** 2
    if not isinstance(settings, CalibrationSettings):
        return LIBRARIES + max(merging, 4 * models * widest.count + sums)
    layer = max(_layers(base, _resident).values(), default=0)
    tokens = len(recipe.tasks) * settings.samples * settings.max_tokens
    states = 4 * (1 + settings.runs_experts) * tokens * (base.size("hidden_size") or 0)
    return LIBRARIES + max(merging, (4 * models + stored * (models - 1)) * layer + states + sums)


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


def license_of(path: ModelPath) -> str:
    """A licence by a model's card, in its folder or on the Hub; "unknown" if there is none or nobody can be asked."""
    try:
        if Path(path.path).is_dir():
            card = huggingface_hub.ModelCard.load(Path(path.path) / "README.md", ignore_metadata_errors=True).data
        else:
            card = huggingface_hub.model_info(path.path, revision=path.revision, timeout=10).card_data
    except (*hub.HUB_ERRORS, yaml.YAMLError):
        return "unknown"
    found = card.to_dict() if card is not None else {}
    name = found.get("license")
    return str(found.get("license_name") or name if name == "other" else name or "unknown")
