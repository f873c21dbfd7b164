"""Re-read a finished merge and compare it with what its recipe says, one tensor at a time."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from mergekit.architecture import get_architecture_info
from mergekit.common import ModelReference, dtype_from_name
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor, SaveTensor
from mergekit.plan import MergePlanner
from tqdm import tqdm

from mergekit_slta.errors import reading
from mergekit_slta.layers.parts import parts
from mergekit_slta.models.adapters import source_folders
from mergekit_slta.models.headers import folder_headers
from mergekit_slta.models.loaders import ONE_AT_A_TIME
from mergekit_slta.output.finite import is_finite
from mergekit_slta.output.usable import lacking_files, loading_problems
from mergekit_slta.recipe.configuration import expert_references
from mergekit_slta.recipe.experiment import Experiment, opened
from mergekit_slta.recipe.recipe import RecipeOrFile
from mergekit_slta.recipe.settings import SETTINGS, SltaSettings
from mergekit_slta.slta.measure import measured_statistics, solved
from mergekit_slta.slta.statistics import STATISTICS_OF_MERGE
from mergekit_slta.slta.weights import TensorWeights
from mergekit_slta.tables import Paragraphs


@dataclass(frozen=True, repr=False)
class Verification(Paragraphs):
    """What a second look at a merged model found; printed, it is sentences.

    Attributes:
        problems: what is wrong, one sentence each, in the order of the tensors; empty for a sound merge.
        tensors: how many tensors were read.
        method: the recipe's merge method.
        compared: how many of them were compared with the values that the recipe gives them.
        largest: the largest absolute difference from such a value; 0 where nothing was compared.
        where: the tensor that has it; "" where nothing differs.
        notes: files of the base model that the folder lacks, one sentence each.
    """

    problems: tuple[str, ...]
    tensors: int
    method: str
    compared: int
    largest: float
    where: str
    notes: tuple[str, ...] = ()

    def columns(self) -> dict[str, list[str]]:
        """The columns of ``to_frame``: a row for each problem, or the verdict without any, and for each note."""
        found = ["problem"] * len(self.problems) or ["verdict"]
        sentences = [*(self.problems or str(self).splitlines()[:1]), *self.notes]
        return {"kind": [*found, *["note"] * len(self.notes)], "sentence": sentences}

    def __str__(self) -> str:
        read = f"{self.tensors} tensors read, {self.compared} compared by value, largest difference {self.largest:.3g}"
        read += f" in {self.where}" if self.where else ""
        if not self.compared:
            read = f"Values of {self.method} cannot be compared; name, shape, data type and finiteness of "
            read += f"{self.tensors} tensors were checked"
        if not self.problems:
            said = f"No difference beyond rounding. {read}" if self.compared else f"{read}: nothing is wrong"
            said += ". transformers loads the folder, which has all tensors of the base model."
        else:
            count = len(self.problems)
            said = "\n- ".join([f"{count} problem{'s' * (count > 1)} found. {read}.", *self.problems])
        return "\n".join([said, *(f"Note: {note}" for note in self.notes)])


def verify(
    recipe: RecipeOrFile,
    merged: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    lora_merge_cache: str | None = None,
    transformers_cache: str | None = None,
    quiet: bool = False,
) -> Verification:
    """Re-read a merged model tensor by tensor, and compare it with what its recipe says.

    Names, shapes, data types and finiteness are compared for every method, and for ``slta``, whose statistics must have
    been measured, the values with theta_0 + sum alpha tau. One tensor of each model is in memory at a time. Then
    transformers loads the folder without its weights, and the base model's other tensors and files are looked for.

    Args:
        recipe: the recipe that was merged, or its file.
        merged: the folder that the merge was written to.
        device: where to compute: "cpu", "cuda", or a GPU such as "cuda:1".
        trust_remote_code: run the Python code that comes with a model (dangerous).
        lora_merge_cache: the folder to merge LoRA adapters in; without one, adapters are refused.
        transformers_cache: the folder for downloaded files; the Hub's own cache by default.
        quiet: no progress bars and no notes.

    Returns:
        The differences: values differ that are farther apart than the rounding of the merge allows.

    Raises:
        SltaError: the recipe or one of its models cannot be opened, the merged model's files cannot be read, or
            there are no statistics of an ``slta`` merge.
    """
    with ONE_AT_A_TIME:
        folder = Path(merged).expanduser()
        experiment = opened(recipe, device, trust_remote_code, lora_merge_cache, transformers_cache, quiet)
        stored = folder_headers(folder)
        experiment.open()
        experts = expert_references(experiment.recipe.config)
        weights = _weights(experiment, folder)
        planned = {task.tensor_name: task for task in _plan(experiment, folder)}
        lost = [name for name, task in planned.items() if name not in stored and not task.optional]
        problems = [f"The tensor {name} is missing." for name in lost]
        strange = [name for name in stored if name not in planned]
        problems += [f"The tensor {name} does not belong to the model." for name in strange]
        names = [name for name in planned if name in stored]
        differences, wrong = dict[str, float](), [*lost, *strange]
        loader = LazyTensorLoader.from_disk(str(folder))
        for name in tqdm(names, desc="Verifying", unit="tensor", leave=False, disable=experiment.quiet):
            with torch.no_grad():
                found, difference = _compared(planned[name], loader.get_tensor(name), experts, weights)
            LoaderCache().flush_all()
            problems += found
            wrong += [name] * bool(found)
            if difference is not None:
                differences[name] = difference
    config = experiment.recipe.config
    base = config.base_model or config.referenced_models()[0]
    problems += loading_problems(experiment.model(base), folder, wrong)
    base_folder, _ = source_folders(base, experiment.transformers_cache)
    own_tokenizer = experiment.recipe.tokenizer_source is not None
    notes = lacking_files(base_folder, folder, own_tokenizer, bool(config.chat_template))
    largest = max(differences.values(), default=0.0)
    where = max(differences, key=lambda name: differences[name]) if largest else ""
    method = config.merge_method
    return Verification(tuple(problems), len(names), method, len(differences), largest, where, tuple(notes))


def _weights(experiment: Experiment, folder: Path) -> TensorWeights | None:
    """The merging weights that a recipe for ``slta`` gives to each tensor."""
    if experiment.recipe.config.merge_method != SltaSettings.method:
        return None
    settings, beside = experiment.recipe.settings_of(SltaSettings), folder / STATISTICS_OF_MERGE
    path = beside if beside.is_file() and not settings.statistics else None
    return solved(experiment, measured_statistics(experiment, path=path, measuring=False))[1]


def _plan(experiment: Experiment, folder: Path) -> list[SaveTensor]:
    """The tensors that mergekit writes for the recipe, each with what it is made of."""
    recipe, options = experiment.recipe, experiment.options
    config = copy.deepcopy(recipe.config)  # the planner rewrites it
    base = config.base_model or config.referenced_models()[0]
    LoaderCache.loaders.clear()  # those of earlier merges may map files that were replaced
    architecture = experiment.architecture if config.merge_method in SETTINGS else None
    if architecture is None:
        architecture = get_architecture_info(config, options)
    else:
        experiment.adapt_loaders()
    planner = MergePlanner(config, architecture, options, base.config(trust_remote_code=options.trust_remote_code))
    return [task for task in planner.plan_to_disk(str(folder)) if isinstance(task, SaveTensor)]


def _loaded(load: LoadTensor) -> torch.Tensor | None:
    with reading(f"The tensor {load.tensor} of {load.model}"):
        tensor: torch.Tensor | None = load.execute()
        return tensor


def _compared(
    task: SaveTensor, merged: torch.Tensor, experts: Sequence[ModelReference], weights: TensorWeights | None
) -> tuple[list[str], float | None]:
    """What is wrong with a merged tensor, and its largest difference from its wanted value, if that is known."""
    name, made = task.tensor_name, task.tensor_task
    gathered = made.gather_tensors
    is_aligned = not isinstance(gathered, GatherTensors)  # its rows follow another vocabulary
    loads = (gathered if not is_aligned else gathered.gather_tensors).arguments().values()
    sources = {load.model: tensor for load in loads if (tensor := _loaded(load)) is not None}
    base = sources.pop(made.base_model, None)
    axis = made.output_weight.vocabulary_axis if is_aligned else None
    problems = list(_wrong_form(task, merged, base, axis)) if base is not None else []
    if not is_finite(merged, merged.dtype):
        count = int((~merged.double().isfinite()).sum())
        return [*problems, f"The tensor {name} has {count} values that are not finite."], None
    if weights is None or base is None or problems or is_aligned or not sources.keys() >= set(experts):
        return problems, None
    alpha = list(weights[name]) if base.is_floating_point() else [torch.zeros(())] * len(experts)
    difference, exceeds = _difference(merged, base, [sources[model] for model in experts], alpha)
    if exceeds:
        problems.append(f"The tensor {name} differs from what the recipe gives by up to {difference:.3g}.")
    return problems, difference


def _wrong_form(task: SaveTensor, merged: torch.Tensor, base: torch.Tensor, aligned_axis: int | None) -> Iterator[str]:
    dtype = dtype_from_name(task.dtype) if task.dtype else base.dtype
    if merged.dtype != dtype and (task.dtype or task.tensor_task.method_name in SETTINGS):
        yield f"The tensor {task.tensor_name} is of type {_name(merged.dtype)}, not {_name(dtype)}."
    found, wanted = list(merged.shape), list(base.shape)
    if aligned_axis is not None and len(found) == len(wanted):
        wanted[aligned_axis] = found[aligned_axis]
    if found != wanted:
        yield f"The tensor {task.tensor_name} has the shape {found}, not {wanted}."


def _difference(
    merged: torch.Tensor, base: torch.Tensor, experts: Sequence[torch.Tensor], alpha: Sequence[torch.Tensor]
) -> tuple[float, bool]:
    """The largest difference from theta_0 + sum alpha tau, and whether one exceeds what rounding allows.

    The tensors are in the types that they were written in, and merged in; ``alpha`` broadcasts to them.
    """
    if not any(bool(weight.any()) for weight in alpha):
        merged_base = base.to(merged.dtype)  # no rounding: bit by bit
        error = _largest(merged.double().sub_(merged_base.double()).abs_())
        return error, error > 0
    step = torch.finfo(torch.promote_types(base.dtype, torch.float32)).eps
    written = torch.finfo(merged.dtype)
    least = written.tiny * written.eps  # the distance of the smallest numbers
    last = written.eps + torch.finfo(base.dtype).eps
    error, exceeds = 0.0, False
    weights = [weight.double().expand(merged.shape) for weight in alpha]
    for own, source, *rest in parts(merged, base, *experts, *weights):
        first = source.double()
        wanted, size = first.clone(), first.abs()
        for expert, factor in zip(rest[: len(experts)], rest[len(experts) :], strict=True):
            wanted.addcmul_(expert.double() - first, factor)
            size += factor.abs() * (expert.double().abs() + first.abs())
        distance = (own.double() - wanted).abs_()
        error = max(error, _largest(distance))
        allowed = wanted.abs_().mul_(last).add_(least).add_(size, alpha=step * (len(experts) + 3))
        exceeds = exceeds or bool((distance > allowed).any())
    return error, exceeds


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
