"""What the merge methods share: they write finite tensors only, and those that run models do so once per merge."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.merge_methods import GroupMergeMethod, InputContract, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.base import BasePolicy, OptionalTensorPolicy

from mergekit_slta import files
from mergekit_slta.errors import SltaError, logger
from mergekit_slta.models.headers import WEIGHT_FILES
from mergekit_slta.output.companions import copy_companions
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import CalibrationSettings, MethodSettings, parameter_specs

if TYPE_CHECKING:
    from mergekit_slta.reports.page import Page
    from mergekit_slta.slta.solution import Solution

LOG = logger(__name__)

NOT_A_FOLDER = (
    "'{method}' measures whole models, so it runs in mergekit-yaml on model folders or Hub ids; "
    "mergekit-pytorch and tensor-level calls name checkpoint files or tensors only."
)


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


class FiniteMethod(GroupMergeMethod):
    """A merge method that refuses to write a tensor that is not finite."""

    spec: MergeMethodSpec
    settings: type[MethodSettings]
    in_words: str  # what the method does, as a model card goes on after its name and a colon
    solution: Solution | None = None  # the merging weights of the last merge, if it had some
    _experiment: Experiment | None = None  # what is merged, until it is written

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor."""
        raise NotImplementedError

    def begin(self, experiment: Experiment) -> None:
        """Start the merge of a recipe that the checks have opened."""
        self.forget()
        self._experiment = experiment

    def share(self, experiment: Experiment) -> None:
        """Compute with all processes of torchrun what the merge needs before its first tensor."""

    def forget(self) -> None:
        """Drop the previous merge."""
        self._experiment = None

    def written(self, folder: Path, weights: str) -> None:
        """Clean up after mergekit has written the whole output, and add files that it does not copy.

        Args:
            folder: the output.
            weights: the name of the file with the weights, or of their index.
        """
        for part in folder.glob(files.UNFINISHED_TENSORS):
            part.unlink()
        experiment, self._experiment = self._experiment, None
        if experiment is not None:
            _set_aside(folder, weights)
            copy_companions(experiment, folder)

    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> torch.Tensor:
        """Merge one tensor.

        Raises:
            SltaError: the merged tensor is not finite in the data type that it is written in.
        """
        merged = self.merge(group, **parameters)
        out_dtype = self._experiment.recipe.config.out_dtype if self._experiment else None
        dtype = dtype_from_name(out_dtype) if out_dtype else merged.dtype
        if not is_finite(merged, dtype):
            raise not_finite(group, dtype)
        return merged


class CalibratedMethod(FiniteMethod):
    """A merge method that runs whole models on their tasks' data before it merges the first tensor.

    It does so before mergekit executes its plan: the first tensors that mergekit reads are often the embeddings of all
    models, which would take more memory than the layers that run.
    """

    settings: type[CalibrationSettings]
    _result: Any = None  # what every tensor is made from

    def compute(self, experiment: Experiment) -> Any:
        """Compute what every tensor of the merge is made from."""
        raise NotImplementedError

    def merge_tensor(self, group: TensorGroup, result: Any, experiment: Experiment) -> torch.Tensor:
        """Merge one tensor from the result."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the previous merge."""
        super().forget()
        self._result = None

    def prepare(self) -> None:
        """Run the models, after the merge is planned."""
        assert self._experiment is not None
        self._result = self.compute(self._experiment)

    def written(self, folder: Path, weights: str) -> None:
        """Refuse an output whose tensors are of other files than those that were measured."""
        experiment = self._experiment
        super().written(folder, weights)
        for model in (experiment.base, *experiment.experts) if experiment is not None else ():
            model.refuse_changes()

    def validate_inputs(
        self, input_ids: Sequence[Hashable], base_id: Hashable | None = None, *, group_name: str | None = None
    ) -> None:
        """Refuse to merge without the whole recipe, which the planner shows only in merges of whole models."""
        if group_name is None or not all(isinstance(model, ModelReference) for model in input_ids):
            raise SltaError(NOT_A_FOLDER.format(method=self.spec.name))
        if self._experiment is None:
            raise SltaError(
                f"mergekit has shown '{self.spec.name}' no recipe of this merge: if mergekit-slta's start-up file "
                "did not run, merge with 'mergekit-slta merge'; if another merge was planned in between, plan each "
                "merge when the one before is written."
            )
        super().validate_inputs(input_ids, base_id, group_name=group_name)

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor from the result."""
        experiment, result = self._experiment, self._result
        if experiment is None or result is None or group.base is None or group.metadata.name is None:
            raise SltaError(NOT_A_FOLDER.format(method=self.spec.name))
        return self.merge_tensor(group, result, experiment)


def _set_aside(folder: Path, written: str) -> None:
    """Rename weights and indices of an earlier merge that programs may read instead of the file just written."""
    for name in (name + index for name in WEIGHT_FILES for index in ("", ".index.json")):
        if name != written and (old := folder / name).is_file():
            aside = old.replace(folder / f"{name}.old")
            LOG.warning(
                "%s is of an earlier merge, and programs would read it instead of this one: now %s.", old, aside
            )


def write_report(folder: str, name: str, page: Page) -> None:
    """Write a report under this name into a folder that the recipe names; other merges may share the folder."""
    try:
        path = page.write(Path(folder).expanduser(), name)
    except OSError as error:
        raise SltaError(f"The report cannot be written to {folder} ({error}): name another folder.") from error
    LOG.info("Report written to %s", path)


def is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's values are finite in a data type; it is enough to look at the smallest and the largest."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # torch computes little in 8 bits
    return bool(torch.stack(tensor.aminmax()).to(dtype).double().isfinite().all())


def not_finite(group: TensorGroup, dtype: torch.dtype) -> SltaError:
    """The error for a merged tensor that is not finite; it names the models whose own tensor is not finite."""
    damaged = [str(entry.id) for entry in group.entries if not is_finite(entry.tensor, entry.tensor.dtype)]
    if damaged:
        return SltaError(
            f"The tensor '{group.metadata.name}' of {', '.join(damaged)} has NaN or infinite values: the checkpoint is "
            "damaged (save or download it again), or too large for the recipe's 'dtype' (set 'dtype: float32')."
        )
    experts = ", ".join(str(entry.id) for entry in group.non_base)
    return SltaError(
        f"The merged tensor '{group.metadata.name}' is not finite as {str(dtype).removeprefix('torch.')}, although it "
        f"is in the base model and in {experts}: set 'dtype: float32' and 'out_dtype: bfloat16', or give these "
        "experts less weight."
    )
