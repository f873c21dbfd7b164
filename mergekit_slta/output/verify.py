"""Re-read a finished merge and compare it with what its recipe says, one tensor at a time."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from mergekit.architecture import WeightInfo, get_architecture_info
from mergekit.common import dtype_from_name
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor, SaveTensor
from tqdm import tqdm

from mergekit_slta.errors import reading
from mergekit_slta.featcal.anchor import equal_weights
from mergekit_slta.layers.ends import output_head
from mergekit_slta.layers.parts import parts
from mergekit_slta.layers.submodules import resolve_name
from mergekit_slta.models.headers import folder_headers
from mergekit_slta.models.spellings import ONE_AT_A_TIME, adapt_loaders, renew_loaders
from mergekit_slta.output.finite import is_finite
from mergekit_slta.recipe.configuration import expert_references
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.options import ModelOptions
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SETTINGS, FeatcalSettings, SltaSettings
from mergekit_slta.slta.measure import measured_statistics
from mergekit_slta.slta.statistics import STATISTICS_OF_MERGE
from mergekit_slta.slta.weights import TensorWeights

PLAIN_METHOD = "task_arithmetic"  # of the recipes that 'mergekit-slta solve --recipe' writes


@dataclass(frozen=True)
class Verification:
    """What a second look at a merged model found; printed, it is sentences.

    Attributes:
        problems: what is wrong, one sentence each, in the order of the tensors; empty for a sound merge.
        tensors: how many tensors were read.
        compared: how many of them were compared with the values that the recipe gives them.
        largest: the largest absolute difference from such a value; 0 where nothing was compared.
        where: the tensor that has it; "" where nothing differs.
        dtype: that tensor's data type; "" where nothing differs.
    """

    problems: tuple[str, ...]
    tensors: int
    compared: int
    largest: float
    where: str
    dtype: str = ""

    def __str__(self) -> str:
        values = f"{self.compared} compared by value, largest difference {self.largest:.3g}"
        if not self.compared:
            values = "none compared by value, only by name, shape, data type and whether they are finite"
        read = f"{self.tensors} tensors read, {values}{f' in {self.where}' if self.where else ''}"
        if not self.problems:
            rounding = f", within the rounding of {self.dtype}" if self.where else ""
            found = "No difference beyond rounding" if self.compared else "No difference found"
            return f"{found}. {read}{rounding}."
        count = len(self.problems)
        return "\n- ".join([f"{count} problem{'s' * (count > 1)} found. {read}.", *self.problems])


def verify(recipe: Recipe, merged: str | os.PathLike[str], **options: Unpack[ModelOptions]) -> Verification:
    """Re-read a merged model tensor by tensor, and compare it with what its recipe says.

    Names, shapes, data types and finiteness are compared for every method. The values are compared with theta_0 +
    sum alpha tau for ``slta``, whose statistics must have been measured, and for ``task_arithmetic``, as in a plain
    recipe that ``Solution.save_recipe`` wrote. For ``featcal`` those tensors are compared that it does not solve, and
    for ``actmat`` and ``sftm`` those that no expert changes: they must equal their source. One tensor of each model is
    in memory at a time.

    Args:
        recipe: the recipe that was merged.
        merged: the folder that the merge was written to.
        options: where to compute, and how to get models; see ``ModelOptions``.

    Returns:
        The differences: values differ that are farther apart than the rounding of the merge allows.

    Raises:
        SltaError: the recipe or one of its models cannot be opened, the merged model's files cannot be read, or
            there are no statistics of an ``slta`` merge.
    """
    with ONE_AT_A_TIME:
        return _verified(Experiment(recipe, **options), Path(merged).expanduser())


def _verified(experiment: Experiment, folder: Path) -> Verification:
    stored = folder_headers(folder)
    experiment.open()
    expected = _Expected(experiment, folder)
    problems, compared, largest, where, dtype = [], 0, 0.0, "", ""
    planned = {task.tensor_name: task for task in _plan(experiment, folder)}
    lost = [name for name, task in planned.items() if name not in stored and not task.optional]
    problems += [f"The tensor {name} is missing." for name in lost]
    problems += [f"The tensor {name} does not belong to the model." for name in stored if name not in planned]
    loader = LazyTensorLoader.from_disk(str(folder))
    for name in tqdm(
        [name for name in planned if name in stored],
        desc="Verifying",
        unit="tensor",
        leave=False,
        disable=experiment.quiet,
    ):
        with torch.no_grad():
            tensor = loader.get_tensor(name)
            found, error = expected.compare(planned[name], tensor)
        LoaderCache().flush_all()
        problems += found
        compared += error is not None
        if error is not None and error > largest:
            largest, where, dtype = error, name, _name(tensor.dtype)
    return Verification(tuple(problems), len(planned.keys() & stored.keys()), compared, largest, where, dtype)


def _plan(experiment: Experiment, folder: Path) -> list[SaveTensor]:
    """The tensors that mergekit writes for the recipe, each with what it is made of.

    The planner is mergekit's own, without what `host/patches.py` adds to it for a merge.
    """
    recipe, options = experiment.recipe, experiment.options
    config = copy.deepcopy(recipe.config)  # the planner rewrites it
    base = config.base_model or config.referenced_models()[0]
    architecture = get_architecture_info(config, options)
    renew_loaders(())  # those of earlier merges may map files that were replaced
    if config.merge_method in SETTINGS:
        adapt_loaders(experiment.model(recipe.base), recipe.references, architecture)
    from mergekit.plan import MergePlanner  # not above: the start-up hook waits for a program to import it

    planner = MergePlanner(config, architecture, options, base.config(trust_remote_code=options.trust_remote_code))
    planner._plan = functools.partial(inspect.unwrap(MergePlanner._plan), planner)
    return [task for task in planner.plan_to_disk(str(folder)) if isinstance(task, SaveTensor)]


def _loaded(load: LoadTensor) -> torch.Tensor | None:
    """A tensor of a model; None where the model lacks one that it need not have."""
    with reading(f"The tensor {load.tensor} of {load.model}"):
        tensor: torch.Tensor | None = load.execute()
        return tensor


class _Expected:
    """What a recipe says of the tensors of its merge."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.config = experiment.recipe.config
        self.method = self.config.merge_method
        self.experts = expert_references(self.config)
        self._alpha: Callable[[str], torch.Tensor | None] | None = None
        if self.method == SltaSettings.method:
            self._alpha = _solved_weights(experiment, folder).__getitem__
        elif self.method == FeatcalSettings.method:
            self._alpha = _unsolved_weights(experiment)

    def compare(self, task: SaveTensor, merged: torch.Tensor) -> tuple[list[str], float | None]:
        """What is wrong with a merged tensor, and its largest difference from its wanted value, if that is known."""
        name, made = task.tensor_name, task.tensor_task
        gathered = made.gather_tensors
        is_aligned = not isinstance(gathered, GatherTensors)  # its rows follow another vocabulary
        loads = (gathered if not is_aligned else gathered.gather_tensors).arguments().values()
        sources = {load.model: tensor for load in loads if (tensor := _loaded(load)) is not None}
        base = sources.get(self.config.base_model)
        problems = list(self._form_problems(task, merged, base, made.output_weight if is_aligned else None))
        if not is_finite(merged, merged.dtype):
            count = int((~merged.double().isfinite()).sum())
            return [*problems, f"The tensor {name} has {count} values that are not finite."], None
        experts = [sources.get(reference) for reference in self.experts]
        if base is None or problems or is_aligned or any(expert is None for expert in experts):
            return problems, None
        tensors = [expert for expert in experts if expert is not None]
        alpha = self._weights(task, base, tensors)
        if alpha is None:
            return problems, None
        error, exceeds = _difference(merged, base, tensors, alpha, self.method == PLAIN_METHOD)
        if exceeds:
            problems.append(f"The tensor {name} differs from what the recipe gives by up to {error:.3g}.")
        return problems, error

    def _form_problems(
        self, task: SaveTensor, merged: torch.Tensor, base: torch.Tensor | None, aligned: WeightInfo | None
    ) -> Iterator[str]:
        name = task.tensor_name
        if base is None:
            return
        dtype = dtype_from_name(task.dtype) if task.dtype else base.dtype
        if merged.dtype != dtype and (task.dtype or self.method in SETTINGS):
            yield f"The tensor {name} is of type {_name(merged.dtype)}, not {_name(dtype)}."
        found, wanted = list(merged.shape), list(base.shape)
        if aligned is not None and aligned.vocabulary_axis is not None and len(found) == len(wanted):
            wanted[aligned.vocabulary_axis] = found[aligned.vocabulary_axis]
        if found != wanted:
            yield f"The tensor {name} has the shape {found}, not {wanted}."

    def _weights(
        self, task: SaveTensor, base: torch.Tensor, experts: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor] | None:
        """The experts' merging weights of a tensor; None where the recipe does not tell its value."""
        untouched = [torch.zeros(())] * len(experts)
        if not base.is_floating_point():
            return untouched
        if self.method == PLAIN_METHOD:
            made = task.tensor_task
            if made.parameters["normalize"]:
                return None
            factor = made.parameters["lambda"]
            own = made.input_parameters
            return [torch.tensor(own[expert]["weight"] * factor, dtype=torch.float64) for expert in self.experts]
        if self._alpha is not None:
            alpha = self._alpha(task.tensor_name)
            return None if alpha is None else list(alpha)
        if self.method in SETTINGS and all(torch.equal(expert, base) for expert in experts):
            return untouched
        return None


def _solved_weights(experiment: Experiment, folder: Path) -> TensorWeights:
    """The merging weights of an ``slta`` merge, from statistics that are there."""
    settings = experiment.recipe.settings_of(SltaSettings)
    beside = folder / STATISTICS_OF_MERGE
    path = beside if beside.is_file() and not settings.statistics else None
    statistics = measured_statistics(experiment, path=path, measuring=False)
    solution = statistics.solve(settings.level, balance=settings.balance, ridge=settings.ridge)
    return TensorWeights(experiment.decoder, settings.level, solution.submodules, settings.edges, settings.towers)


def _unsolved_weights(experiment: Experiment) -> Callable[[str], torch.Tensor | None]:
    """The experts' weights of the tensors that ``featcal`` does not solve: those outside the layers, but the head."""
    settings, decoder = experiment.recipe.settings_of(FeatcalSettings), experiment.decoder
    head = output_head(decoder) if settings.head else None
    solved = {head.weight, head.bias} if head else set()
    mean = equal_weights(len(experiment.recipe.experts))("")

    def alpha(name: str) -> torch.Tensor | None:
        known, _ = resolve_name(decoder, name)
        if known in solved or known.startswith(decoder.layers_path + "."):
            return None
        averaged = settings.averages_edges if decoder.is_language(known) else settings.towers == "mean"
        return mean if averaged else torch.zeros_like(mean)

    return alpha


def _difference(
    merged: torch.Tensor,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    alpha: Sequence[torch.Tensor],
    in_dtype: bool,
) -> tuple[float, bool]:
    """The largest difference from theta_0 + sum alpha tau, and whether one exceeds what rounding allows.

    Args:
        merged: the tensor to compare, in the type that it was written in.
        base, experts: the tensors that it was made of, in the type that they were merged in.
        alpha: each expert's weights, one number or a tensor that broadcasts to the tensor.
        in_dtype: each step of the merge was rounded to the type of ``base``, rather than the result alone.
    """
    if not any(bool(weight.any()) for weight in alpha) or all(torch.equal(expert, base) for expert in experts):
        unchanged = base.to(merged.dtype)  # no rounding: bit by bit
        error = 0.0
        for own, wanted in () if torch.equal(merged, unchanged) else parts(merged, unchanged):
            error = max(error, _largest((own.double() - wanted.double()).abs()))
        return error, error > 0
    step = torch.finfo(base.dtype if in_dtype else torch.promote_types(base.dtype, torch.float32)).eps
    written = torch.finfo(merged.dtype)
    least = written.tiny * written.eps  # the distance of the smallest numbers
    last = written.eps + torch.finfo(base.dtype).eps
    error, exceeds = 0.0, False
    weights = [weight.double().expand(merged.shape) for weight in alpha]
    for own, source, *rest in parts(merged, base, *experts, *weights):
        first, factors = source.double(), rest[len(experts) :]
        tasks = [expert.double().sub_(first) for expert in rest[: len(experts)]]
        wanted = first.clone()
        for task, factor in zip(tasks, factors, strict=True):
            wanted.addcmul_(task, factor)
        distance = (own.double() - wanted).abs_()
        error = max(error, _largest(distance))
        distance -= wanted.abs_().mul_(last).add_(least)
        if _largest(distance) > 0:  # more than the result's rounding, so the size of what it is the sum of matters
            size = first.abs()
            for task, factor in zip(tasks, factors, strict=True):
                size += factor.abs() * ((task + first).abs() + first.abs())
            exceeds = exceeds or _largest(distance - size * step * (len(experts) + 3)) > 0
    return error, exceeds


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
