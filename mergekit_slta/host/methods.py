"""The merge methods as mergekit knows them, and one merge by each.

mergekit knows one object per method for the whole process (`Method`). A merge's results are in a `Merge`,
which the method takes its tensors from while that merge runs (`host/run.py`): `SltaMerge` and `FeatcalMerge` run the
models first, `ActmatMerge` and `SftmMerge` merge tensor by tensor.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from mergekit.common import dtype_from_name
from mergekit.merge_methods import GroupMergeMethod, InputContract, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.base import BasePolicy

from mergekit_slta.actmat.covariance import merged_vector
from mergekit_slta.engine.partial import Partial
from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.groups import uncorrected
from mergekit_slta.featcal.merge import SolvedModel, solve_model
from mergekit_slta.layers.maps import Role, dotted_tails, role_by_shape, roles_by_ending, turned
from mergekit_slta.models.checkpoint import is_finite, task_vector, weighted_sum
from mergekit_slta.models.headers import exempt_types
from mergekit_slta.models.layout import Layout
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import (
    ACTMAT_RIDGE,
    ACTMAT_RIDGE_OF_ADAPTERS,
    ActmatSettings,
    FeatcalSettings,
    MethodSettings,
    SftmSettings,
    SltaSettings,
    are_adapters,
    parameter_specs,
)
from mergekit_slta.sftm.superpose import superposed_vector
from mergekit_slta.slta.grams import calibrate, solve_arguments
from mergekit_slta.slta.measure import statistics_of
from mergekit_slta.slta.statistics import Solution
from mergekit_slta.slta.weights import TensorWeights
from mergekit_slta.tables import short_names
from mergekit_slta.words import as_score

LOG = logging.getLogger(__name__)


def method_spec(settings: type[MethodSettings], pretty_name: str, paper: str, on_gpu: bool = True) -> MergeMethodSpec:
    """A method as mergekit declares it; ``paper`` is its number on arXiv. ``on_gpu``: a GPU gets all tensors."""
    return MergeMethodSpec(
        name=settings.method,
        parameters=parameter_specs(settings),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        pretty_name=pretty_name,
        reference_url=f"https://arxiv.org/abs/{paper}",
        uses_accelerator=on_gpu,
    )


class Merge:
    """One merge of a recipe; a class for each method."""

    spec: ClassVar[MergeMethodSpec]  # the method as mergekit declares it
    solution: Solution | None = None  # of an ``slta`` merge whose models have run
    result: str = ""  # how near the merge is to each model, in a sentence, if the method knows it once they have run
    caveat: str = ""  # what the method could not do, for the card
    page: Path | None = None  # the report that it wrote, if the recipe asks for one

    def prepare(self, experiment: Experiment, partial: Partial) -> None:
        """Do, in all processes, what comes before mergekit reads a tensor; ``partial`` keeps finished layers."""
        partial.begin({"method": self.spec.name}, experiment.ranks)

    def tensor(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor of all models; ``parameters`` are the recipe's for it."""
        raise NotImplementedError


class Method(GroupMergeMethod):
    """A merge method, registered with mergekit once per process."""

    def __init__(self, kind: type[Merge]) -> None:
        self.spec = kind.spec
        self.kind = kind
        self.experiment: Experiment | None = None  # of the merge that runs

    @contextlib.contextmanager
    def merging(self, experiment: Experiment, merge: Merge, progress: Callable[[str, int], object]) -> Iterator[None]:
        """Take the tensors of all models' groups from the merge of a recipe, also on other threads.

        ``progress`` is called with the name of each merged tensor, and 1.
        """
        self.experiment, self._merge, self._progress = experiment, merge, progress
        # Of tensors that the recipe's ``out_dtype`` is not for.
        self._types = exempt_types(experiment.base.model.tensors)
        try:
            yield
        finally:
            self.experiment = None

    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> torch.Tensor:
        if self.experiment is None:
            raise SltaError(
                f"'{self.spec.name}' looks at whole models before it merges tensors: run it with mergekit-yaml or "
                "mergekit's run_merge, on model folders or Hub ids."
            )
        merged, stored = self._merge.tensor(group, **parameters), group.metadata.name or ""
        config = self.experiment.recipe.config
        name = self._types.get(stored, config.out_dtype or config.dtype)
        dtype = dtype_from_name(name) or group.tensors[0].dtype
        if not is_finite(merged, dtype):
            raise not_finite(group, dtype)
        self._progress(stored, 1)
        return merged.to(dtype)


# Methods that run the models


class SltaMerge(Merge):
    """Merging weights in closed form, one for each submodule and expert."""

    spec = method_spec(SltaSettings, "SLTA", "2504.10902")
    _weights: TensorWeights

    def prepare(self, experiment: Experiment, partial: Partial) -> None:
        """Measure the models unless the statistics exist, and solve for the merging weights of every tensor."""
        settings = experiment.recipe.settings_of(SltaSettings)
        with experiment.ranks.one_refusal():
            experiment.check_edges(experts=settings.level == "model")
        if settings.statistics:
            statistics = statistics_of(experiment, partial=partial)
        else:
            statistics = calibrate(experiment, [settings.level], partial)
        self.solution = statistics.solve(**solve_arguments(experiment.recipe))
        self._weights = TensorWeights(experiment.decoder, settings.level, self.solution.submodules, experiment.layout)
        self._position = {expert.reference: index for index, expert in enumerate(experiment.recipe.experts)}
        for note in self.solution.notes():
            LOG.warning("%s", note)
        shares = zip(short_names(self.solution.models), self.solution.retained_overall.tolist(), strict=True)
        parts = ", ".join(f"{name} {as_score(share)}" for name, share in shares)
        if self.solution.has_base_task:
            parts += f"; kept of the base model on its prompts: {as_score(self.solution.kept_base_overall)}"
        self.result = f"Share retained of each expert's feature change: {parts}."
        if settings.report and experiment.ranks.first:
            from mergekit_slta.reports.merge import report  # imports matplotlib, which takes a second

            self.page = report(self.solution, settings.report)

    def tensor(self, group: TensorGroup, **parameters: object) -> torch.Tensor:
        assert group.base is not None and group.metadata.name
        alpha = self._weights[group.metadata.name]
        experts = [(entry.tensor, alpha[self._position[entry.id]]) for entry in group.non_base]
        return weighted_sum(group.base.tensor, experts)


class FeatcalMerge(Merge):
    """Solve each layer's linear maps so that their outputs are nearest to the experts'; after RegMean++ and FeatCal."""

    spec = method_spec(FeatcalSettings, "FeatCal", "2605.13030", on_gpu=False)  # the tensors are solved by then
    _solved: SolvedModel
    _share: torch.Tensor  # of each expert, in tensors that are not solved

    def prepare(self, experiment: Experiment, partial: Partial) -> None:
        """Solve the merged model's tensors into the folder of finished layers."""
        recipe, settings = experiment.recipe, experiment.recipe.settings_of(FeatcalSettings)
        solved, self.caveat = solve_model(experiment, partial), uncorrected(experiment.decoder)
        errors = solved.errors()
        tasks = [(recipe.names[task.reference], len(experiment.draw(task).token_ids)) for task in recipe.tasks]
        names = [*short_names([name for name, _ in tasks][: len(recipe.experts)]), "the base model"]
        distances = [f"{name} {as_score(error)}" for name, error in zip(names, errors[-1].tolist(), strict=False)]
        self.result = (
            "Distance between the features of the merge and of each model after the last layer, on that model's "
            f"prompts (lower is better): {', '.join(distances)}."
        )
        if settings.report and experiment.ranks.first:
            from mergekit_slta.reports.featcal import drift_page  # imports matplotlib, which takes a second

            self.page = drift_page(errors, tasks, settings).write(Path(settings.report).expanduser(), "report.html")
        count = sum(task.weight for task in recipe.tasks)
        self._solved, self._share = solved, torch.tensor(1 / count, dtype=torch.float64)

    def tensor(self, group: TensorGroup, **parameters: object) -> torch.Tensor:
        """The solved tensor, in at least float32; outside the layers, the base model's or the experts' average."""
        assert group.base is not None and group.metadata.name
        base, stored = group.base.tensor, group.metadata.name
        dtype = torch.promote_types(base.dtype, torch.float32)
        tensor = self._solved.tensor(stored)
        if tensor is None:
            if stored not in self._solved.language:
                return base
            experts = [(entry.tensor.to(dtype), self._share) for entry in group.non_base]
            tensor = weighted_sum(base.to(dtype), experts)
        return tensor.to(base.device)


# Methods without data


class DataFreeMerge(Merge):
    """A merge without data: tensor by tensor, each by its role in the base model's structure.

    mergekit passes integer tensors through by itself.
    """

    _layout: Layout  # of the base model
    _roles: Mapping[str, Role]

    def prepare(self, experiment: Experiment, partial: Partial) -> None:
        super().prepare(experiment, partial)
        self._layout = experiment.layout
        self._roles = roles_by_ending(self._layout.model) if self._layout.model is not None else {}

    def merge_task_vectors(
        self, role: Role, task_vectors: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        """The merged task vector of a tensor of this role, from the experts', and its scaling factor."""
        raise NotImplementedError

    def tensor(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Add the merged task vector to the base model's tensor, in at least float32."""
        base = group.base
        assert base is not None, "the input contract requires a base"
        start = base.tensor.to(torch.promote_types(base.tensor.dtype, torch.float32))
        role, vectors = self._role(group, start), task_vectors_of(group, start)
        merged, scale = self.merge_task_vectors(role, vectors, group, parameters)
        return start.add(merged.to(start.dtype), alpha=scale).to(base.tensor.dtype)

    def _role(self, group: TensorGroup, tensor: torch.Tensor) -> Role:
        stored = group.metadata.name or ""
        piece = self._layout.pieces.get(stored)
        endings = dotted_tails(piece.targets[0] if piece else stored)
        role = next((self._roles[ending] for ending in endings if ending in self._roles), None)
        if role is None:
            return role_by_shape(stored, tensor, group.metadata.vocabulary_axis)
        return turned(role) if self._layout.turned(stored) else role


class ActmatMerge(DataFreeMerge):
    """Every linear map by least squares, without data (``actmat/covariance.py``); the mean of all else.

    ``weight`` says how much an expert counts against the others, in the regression and in the mean: weight 0 leaves the
    expert out, and equal weights change nothing. It does not scale the task vectors: the regression would reproduce
    the scaled expert. ``lambda`` multiplies the merged change as a whole.
    """

    spec = method_spec(ActmatSettings, "ACTMat", "2604.01329")

    def merge_task_vectors(
        self, role: Role, task_vectors: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        weights, ridge = parameters["weight"].values_for(group.non_base), parameters["ridge"]
        if ridge == "auto":
            assert group.base is not None
            adapters = are_adapters(group.base.id, *(entry.id for entry in group.non_base))
            ridge = ACTMAT_RIDGE_OF_ADAPTERS if adapters else ACTMAT_RIDGE
        return merged_vector(role, list(task_vectors), ridge, weights), parameters["lambda"]


class SftmMerge(DataFreeMerge):
    """Superpose Features from Task Matrices, Algorithm 2 of the paper (``sftm/superpose.py``).

    Linear maps and convolutions get the singular features of every expert's task matrix, biases, embeddings and the
    output head take the sum of the task vectors, both times ``lambda``; norms take the mean, unscaled. Task matrices
    are ``weight`` (expert − base) in float32 (float64 for float64 tensors), trimmed to the share ``density``.
    """

    spec = method_spec(SftmSettings, "SFTM", "2502.10698")

    def merge_task_vectors(
        self, role: Role, task_vectors: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        weights = parameters["weight"].values_for(group.non_base)
        weighted = (vector.mul_(weight) for vector, weight in zip(task_vectors, weights, strict=True))
        merged = superposed_vector(role, weighted, parameters["density"].values_for(group.non_base), parameters["rank"])
        return merged, 1.0 if role is Role.NORM else parameters["lambda"]


# Tensors that are not finite


def task_vectors_of(group: TensorGroup, start: torch.Tensor) -> Iterator[torch.Tensor]:
    """Each expert's task vector, its tensor minus the base model's ``start``, in ``start``'s dtype, if it is finite."""
    for entry in group.non_base:
        change = task_vector(entry.tensor.to(start.dtype), start)
        if not is_finite(change, change.dtype):
            raise not_finite(group, start.dtype)
        yield change


def not_finite(group: TensorGroup, dtype: torch.dtype) -> SltaError:
    """The error for a merged tensor that is not finite; it names the models whose own tensor is not finite."""
    kind = str(dtype).removeprefix("torch.")
    if damaged := [str(entry.id) for entry in group.entries if not is_finite(entry.tensor, entry.tensor.dtype)]:
        return SltaError(
            f"The tensor '{group.metadata.name}' of {', '.join(damaged)} has NaN or infinite values as {kind}: set "
            "'dtype: float32' if they are too large for that type, or get a sound copy."
        )
    return SltaError(
        f"The merged tensor '{group.metadata.name}' is not finite as {kind}, although all models' tensors are: set "
        "'dtype: float32' and 'out_dtype: bfloat16', or give the experts less weight."
    )
