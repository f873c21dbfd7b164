"""What merge methods have in common: finite tensors only, and one result for all tensors where models are run first."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import GroupMergeMethod, InputContract, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.base import BasePolicy, OptionalTensorPolicy, ParameterScope

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import listed
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import CalibrationSettings, MethodSettings, parameter_specs

if TYPE_CHECKING:
    from mergekit_slta.reports.page import Page

LOG = logging.getLogger(__name__)

PROCESSOR = "*processor_config.json"  # of images, video and sound
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
    _out_dtype: torch.dtype | None = None
    _base: ModelReference | None = None

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor."""
        raise NotImplementedError

    def begin(self, experiment: Experiment) -> None:
        """A recipe that has been examined is going to be merged: take what the checks have opened of it."""
        out_dtype = experiment.recipe.config.out_dtype
        self._out_dtype = dtype_from_name(out_dtype) if out_dtype else None
        self._base = experiment.recipe.base

    def share(self, experiment: Experiment) -> None:
        """Compute with all processes what the merge would compute with one before its first tensor."""

    def forget(self) -> None:
        """Another merge begins."""

    def written(self, folder: Path) -> None:
        """mergekit has written all tensors: put the base model's processor beside them, of which it copies a part."""
        base, self._base = self._base, None
        for file in sorted(Path(LoaderCache().get(base).index.base_path).glob(PROCESSOR)) if base else ():
            shutil.copy(file, folder / file.name)
            LOG.info("Copied %s from %s", file.name, base)

    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> torch.Tensor:
        """Merge one tensor.

        Raises:
            SltaError: the merged tensor is not finite in the data type that it is written in.
        """
        merged = self.merge(group, **parameters)
        dtype = self._out_dtype or merged.dtype
        if not is_finite(merged, dtype):
            raise not_finite(group, dtype)
        return merged


@dataclass
class Merge:
    """One merge in progress.

    Attributes:
        references: the experts, in mergekit's order.
        base: the base model.
        experiment: the opened recipe; None until the first tensor, where only the parameters of tensors tell it.
        trust_remote_code, transformers_cache: mergekit's options, which its other threads do not know.
        parameters: those of the tensors that have been merged.
        result: what every tensor is made from.
        failure: why there is no result.
    """

    references: tuple[ModelReference, ...]
    base: ModelReference
    experiment: Experiment | None
    trust_remote_code: bool
    transformers_cache: str | None
    parameters: dict[str, Any] | None = None
    result: Any = None
    failure: Exception | None = None

    def open(self, settings: type[MethodSettings]) -> Experiment:
        """The merge's models and data.

        Raises:
            SltaError: the first tensor is an optional one that an expert lacks, and nothing else tells its parameters.
        """
        if self.experiment is not None:
            return self.experiment
        given = self.parameters or {}
        own = list(settings.expert.model_fields)
        if unknown := [str(model) for model in self.references if model not in given[own[0]]]:
            raise SltaError(
                f"mergekit begins with a tensor that {listed(unknown)} lacks, so that the parameters are not known: "
                "merge with 'mergekit-slta merge', which reads the whole recipe."
            )
        experts = {str(model): {name: given[name][model] for name in own} for model in self.references}
        shared = {name: given[name] for name in settings.model_fields}
        return Experiment(
            Recipe(str(self.base), experts, settings.method, **shared),
            trust_remote_code=self.trust_remote_code,
            transformers_cache=self.transformers_cache,
            lora_merge_cache=LoaderCache().lora_cache_dir,
        )


class CalibratedMethod(FiniteMethod):
    """A merge method that looks at whole models and their tasks' data before it merges the first tensor.

    mergekit plans a merge on its main thread and executes it tensor by tensor, perhaps on several threads. What a
    method computes from the whole, its result, is computed once, when the first tensor is asked for, and whoever asks
    meanwhile waits for it.
    """

    settings: type[CalibrationSettings]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._merge: Merge | None = None
        self._experiment: Experiment | None = None

    def compute(self, experiment: Experiment) -> Any:
        """What every tensor of the merge is made from."""
        raise NotImplementedError

    def merge_tensor(self, group: TensorGroup, merge: Merge) -> torch.Tensor:
        """Merge one tensor, when the result is there."""
        raise NotImplementedError

    def begin(self, experiment: Experiment) -> None:
        """Take what the checks have opened of the recipe."""
        super().begin(experiment)
        self._experiment = experiment

    def forget(self) -> None:
        """Another merge begins."""
        self._merge = self._experiment = None

    def validate_inputs(
        self, input_ids: Sequence[Hashable], base_id: Hashable | None = None, *, group_name: str | None = None
    ) -> None:
        """Check the inputs' structure; at a module's first slice, begin a merge and note the loader's settings."""
        if group_name is None or not all(isinstance(model, ModelReference) for model in input_ids):
            raise SltaError(NOT_A_FOLDER.format(method=self.spec.name))
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name.endswith(".slices[0]"):
            self._begin_module(input_ids, base_id)
        elif ".slices[" in group_name:
            raise SltaError(f"'{self.spec.name}' merges whole models, not slices: list the experts under 'models'.")

    def _begin_module(self, input_ids: Sequence[Any], base: Any) -> None:
        """Begin a merge, unless a module is the next one of a model whose merge is being planned."""
        experts, merge = tuple(model for model in input_ids if model != base), self._merge
        if merge is not None and merge.parameters is None and (merge.references, merge.base) == (experts, base):
            return
        loaders = LoaderCache()
        experiment, self._experiment = self._experiment, None
        self._merge = Merge(experts, base, experiment, loaders.trust_remote_code, loaders.hf_cache_dir)

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor; the first one waits for the result."""
        merge, base = self._merge, group.base
        if merge is None or base is None or group.metadata.name is None:
            raise SltaError(NOT_A_FOLDER.format(method=self.spec.name))
        with self._lock:
            self._refuse_changing(merge, parameters)
            if merge.failure is not None:
                raise merge.failure
            if merge.result is None:
                try:
                    merge.experiment = merge.open(self.settings)
                    merge.experiment.device = str(base.tensor.device)
                    merge.result = self.compute(merge.experiment)
                except Exception as error:
                    merge.failure = error
                    raise
        return self.merge_tensor(group, merge)

    def _refuse_changing(self, merge: Merge, parameters: dict[str, Any]) -> None:
        """Every tensor must be merged under the same parameters; optional tensors may lack some experts."""
        known = merge.parameters
        if known is None:
            merge.parameters = dict(parameters)
            return
        for parameter in self.spec.parameters:
            new, old = parameters[parameter.name], known[parameter.name]
            if parameter.scope == ParameterScope.SHARED:
                changed = new != old
            else:
                changed = any(new[expert] != old.get(expert, new[expert]) for expert in new)
                known[parameter.name] = {**old, **new}
            if changed:
                raise SltaError(
                    f"'{parameter.name}' changes between tensors: '{self.spec.name}' needs one value for the whole "
                    "merge, not a list or a filter."
                )


def write_report(folder: str, make: Callable[[], Page]) -> None:
    """Write a report; the pictures are drawn by matplotlib, whose second of import other merges are spared."""
    try:
        path = make().write(Path(folder).expanduser(), "report.html")
    except OSError as error:
        raise SltaError(f"The report cannot be written to {folder} ({error}): name another folder.") from error
    LOG.info("Report written to %s", path)


def is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all of a tensor's values are finite in a data type; the smallest and the largest decide for all."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.stack(tensor.aminmax()).to(dtype).isfinite().all())


def not_finite(group: TensorGroup, dtype: torch.dtype) -> SltaError:
    """That a merged tensor is not finite in a data type, with the models whose own tensor is not, if there are some."""
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
