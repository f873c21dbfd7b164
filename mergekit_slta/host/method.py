"""A merge method as mergekit knows it, and one merge by it.

mergekit knows one object per method for the whole process (`Method`). A merge's recipe and results are in a `Merge`,
which the method takes its tensors from while that merge runs (`host/run.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from mergekit.architecture import ModelArchitecture
from mergekit.common import ModelReference, dtype_from_name
from mergekit.merge_methods import GroupMergeMethod, InputContract, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.base import BasePolicy, OptionalTensorPolicy

from mergekit_slta.engine.partial import Partial
from mergekit_slta.errors import SltaError
from mergekit_slta.models.checkpoint import is_finite
from mergekit_slta.models.roles import Role, dotted_tails, model_roles, role_by_shape, turned
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import MethodSettings, parameter_specs

if TYPE_CHECKING:
    from mergekit_slta.reports.page import Page
    from mergekit_slta.slta.statistics import Solution


def method_spec(settings: type[MethodSettings], pretty_name: str, paper: str) -> MergeMethodSpec:
    """A method as mergekit declares it; ``paper`` is its number on arXiv.

    A tensor that no expert has, such as one of a vision tower that they lack, stays the base model's.
    """
    return MergeMethodSpec(
        name=settings.method,
        parameters=parameter_specs(settings),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        pretty_name=pretty_name,
        reference_url=f"https://arxiv.org/abs/{paper}",
        optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
    )


class Merge:
    """One merge of a recipe; a class for each method.

    Attributes:
        spec: the method as mergekit declares it.
        solution: the merging weights, of an ``slta`` merge whose models have run.
        kept: a sentence on what is kept of each model, of a method that knows it once its models have run.
        page: the report that it wrote, if the recipe asks for one.
        experiment: the opened recipe; None where mergekit merges tensors that belong to no recipe of models.
    """

    spec: ClassVar[MergeMethodSpec]
    solution: Solution | None = None
    kept: str = ""
    page: Path | None = None

    def __init__(self, experiment: Experiment | None) -> None:
        self.experiment = experiment

    @property
    def opened(self) -> Experiment:
        """The opened recipe.

        Raises:
            SltaError: mergekit merges tensors that belong to no recipe of models.
        """
        if self.experiment is None:
            raise SltaError(
                f"'{self.spec.name}' measures whole models before it merges their tensors: run it by mergekit-yaml or "
                "mergekit's run_merge, on model folders or Hub ids."
            )
        return self.experiment

    def prepare(self, out: Path, partial: Partial) -> None:
        """Run the models, before mergekit reads the first tensor; under torchrun, with all processes.

        Args:
            out: the folder of the merged model.
            partial: the folder of finished layers in it.
        """
        partial.begin({"method": self.spec.name}, self.opened.ranks, replace=True)

    def tensor(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor of all models; ``parameters`` are the recipe's for it."""
        raise NotImplementedError


class Method(GroupMergeMethod):
    """A merge method, registered with mergekit once per process."""

    def __init__(self, kind: type[Merge]) -> None:
        self.spec = kind.spec
        self.kind = kind
        self._merge = self._without_recipe = kind(None)

    @property
    def architecture(self) -> ModelArchitecture | None:
        """The architecture of the merge that runs; None where mergekit's own decides."""
        return self._merge.experiment.architecture if self._merge.experiment else None

    @contextlib.contextmanager
    def merging(self, merge: Merge) -> Iterator[None]:
        """Take the tensors of all models' groups from a merge, also on other threads."""
        self._merge = merge
        try:
            yield
        finally:
            self._merge = self._without_recipe

    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> torch.Tensor:
        """Merge one tensor.

        Raises:
            SltaError: the merged tensor is not finite in the data type that it is written in, or the method runs whole
                models, but mergekit-pytorch or a tensor-level call names files or tensors.
        """
        of_models = all(isinstance(entry.id, ModelReference) for entry in group.entries)
        merge = self._merge if of_models else self._without_recipe
        merged = merge.tensor(group, **parameters)
        out_dtype = merge.experiment.recipe.config.out_dtype if merge.experiment else None
        dtype = dtype_from_name(out_dtype) if out_dtype else merged.dtype
        if not is_finite(merged, dtype):
            raise not_finite(group, dtype)
        return merged


class DataFreeMerge(Merge):
    """A merge without data: tensor by tensor, each by its role in the base model's structure.

    mergekit passes integer tensors through by itself.
    """

    def __init__(self, experiment: Experiment | None) -> None:
        super().__init__(experiment)
        self._lock = threading.Lock()
        self._roles: dict[Hashable, Mapping[str, Role]] = {}  # by base model: each slice may have its own

    def merge_tasks(
        self, role: Role, tasks: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        """Return the merged task vector of a tensor, and its scaling factor.

        Args:
            role: the tensor's role in its model.
            tasks: the experts' task vectors, made one by one.
            group: the tensor in all models.
            parameters: the method's parameters for the tensor.
        """
        raise NotImplementedError

    def tensor(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Add the merged task vector to the base model's tensor, in at least float32.

        Raises:
            SltaError: the base model or an expert has a value that is not finite.
        """
        base = group.base
        assert base is not None, "the input contract requires a base"
        start = base.tensor.to(torch.promote_types(base.tensor.dtype, torch.float32))
        merged, scale = self.merge_tasks(self._role(group, start), task_vectors(group, start), group, parameters)
        return start.add(merged.to(start.dtype), alpha=scale).to(base.tensor.dtype)

    def _role(self, group: TensorGroup, tensor: torch.Tensor) -> Role:
        assert group.base is not None
        base = group.base.id if isinstance(group.base.id, ModelReference) else None
        with self._lock:
            if base not in self._roles:
                trusted = self.experiment is not None and self.experiment.options.trust_remote_code
                self._roles[base] = model_roles(base, trusted, self.spec.name)
            roles = self._roles[base]
        name, layout = group.metadata.name or "", self.experiment.layout if self.experiment else None
        piece = layout.pieces.get(name) if layout else None
        endings = dotted_tails(piece.targets[0] if piece else name)
        role = next((roles[ending] for ending in endings if ending in roles), None)
        if role is None:
            return role_by_shape(name, tensor, group.metadata.vocabulary_axis)
        return turned(role) if layout and layout.turned(name) else role


def task_vectors(group: TensorGroup, start: torch.Tensor) -> Iterator[torch.Tensor]:
    """Each expert's task vector, its tensor minus the base model's ``start``, in ``start``'s dtype.

    Raises:
        SltaError: the base model or the expert has a value that is not finite.
    """
    for entry in group.non_base:
        task = entry.tensor.to(start.dtype).sub(start)
        if not is_finite(task, task.dtype):
            raise not_finite(group, start.dtype)
        yield task


def not_finite(group: TensorGroup, dtype: torch.dtype) -> SltaError:
    """The error for a merged tensor that is not finite; it names the models whose own tensor is not finite."""
    damaged = [str(entry.id) for entry in group.entries if not is_finite(entry.tensor, entry.tensor.dtype)]
    if damaged:
        return SltaError(
            f"The tensor '{group.metadata.name}' of {', '.join(damaged)} has NaN or infinite values: get a sound "
            "copy, or set 'dtype: float32' if the recipe's is too small for them."
        )
    return SltaError(
        f"The merged tensor '{group.metadata.name}' is not finite as {str(dtype).removeprefix('torch.')}, although all "
        "models' are: set 'dtype: float32' and 'out_dtype: bfloat16', or give the experts less weight."
    )


def write_report(folder: str, name: str, page: Page) -> Path:
    """Write a report under this name into a folder that the recipe names, and return its path; merges may share it.

    Raises:
        SltaError: it cannot be written there.
    """
    try:
        return page.write(Path(folder).expanduser(), name)
    except OSError as error:
        raise SltaError(f"The report cannot be written to {folder} ({error}): name another folder.") from error
