"""The merge method ``sftm``: Superpose Features from Task Matrices (arXiv 2502.10698, Algorithm 2), without any data.

What a tensor is - linear map, convolution, norm or something else - is read off the module that owns it in
transformers' own model, built without weights. mergekit passes integer tensors through by itself.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import torch
import transformers
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import InputContract, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.base import (
    BasePolicy,
    OptionalTensorPolicy,
    ParameterScope,
    ParameterSpec,
    TensorMetadata,
)
from pydantic import BeforeValidator
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from mergekit_slta.errors import SltaError
from mergekit_slta.methods.base import CheckedMethod, not_finite
from mergekit_slta.models.skeleton import meta_model
from mergekit_slta.sftm.superpose import merge_task_matrices, trim

LOG = logging.getLogger(__name__)

TORCH_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, _NormBase)


class Role(Enum):
    """What a tensor is to its model, as far as Algorithm 2 tells tensors apart."""

    LINEAR = "linear map, or a stack of them"
    CONVOLUTION = "convolution kernel"
    NORM = "normalization"
    OTHER = "bias, embedding, output head and all else"


def tensor_role(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> Role:
    """The role of a module's own parameter or buffer.

    Normalizations and embeddings of transformers are classes of their own without a common base, hence told by their
    class names, and so are a mixture's fused experts [experts, ...]. A matrix named ``weight`` is a linear map in every
    other module (``Linear``, the transposed ``Conv1D``, routers); other matrices act element by element (Mamba's
    ``A_log``, tables of positions).
    """
    kind = type(module).__name__
    if isinstance(module, torch.nn.Embedding) or "Embedding" in kind:
        return Role.OTHER
    if isinstance(module, TORCH_NORMS) or "Norm" in kind:
        return Role.NORM
    if isinstance(module, _ConvNd) and tensor.ndim > 2:
        return Role.CONVOLUTION
    if tensor.ndim == 2 and name.endswith("weight"):
        return Role.LINEAR
    if tensor.ndim == 3 and "Expert" in kind:
        return Role.LINEAR
    return Role.OTHER


def role_by_shape(tensor: torch.Tensor, vocabulary_axis: int | None) -> Role:
    """The role of a tensor that no module is known for: a matrix without a vocabulary is taken for a linear map.

    What has four dimensions or more is taken for a convolution kernel. A vector may be a bias or a norm; it counts as a
    bias, and so does what has three dimensions (a kernel, a fused mixture or a table of positions).
    """
    if tensor.ndim == 2 and vocabulary_axis is None:
        return Role.LINEAR
    return Role.CONVOLUTION if tensor.ndim >= 4 else Role.OTHER


def dotted_tails(name: str) -> Iterator[str]:
    """The endings of a dotted name, the longest first, down to a parameter with the name of its module."""
    parts = name.split(".")
    for start in range(max(1, len(parts) - 1)):
        yield ".".join(parts[start:])


def tensor_roles(model: transformers.PreTrainedModel) -> dict[str, Role]:
    """The roles of a model's tensors by name, and by every ending of the names that has but one role.

    Endings serve checkpoints that spell the front of their names otherwise than the model does (with or without the
    base model's prefix, ``language_model.model.`` for ``model.language_model.``), and sliced recipes, whose output has
    more layers than the base model.
    """
    head = model.get_output_embeddings()
    head_parameters = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    named: dict[str, Role] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            role = Role.OTHER if id(tensor) in head_parameters else tensor_role(module, name, tensor)
            named[f"{path}.{name}" if path else name] = role
    endings: dict[str, set[Role]] = {}
    for full_name, role in named.items():
        for ending in dotted_tails(full_name):
            endings.setdefault(ending, set()).add(role)
    return {ending: next(iter(found)) for ending, found in endings.items() if len(found) == 1} | named


def merged_task(role: Role, tasks: Iterable[torch.Tensor], density: Sequence[float], rank: int) -> torch.Tensor:
    """Trim the experts' task vectors and merge them as their role asks, before the scaling factor γ (Algorithm 2).

    A stack [..., m, n] of linear maps is trimmed and merged matrix by matrix, as it would be in a checkpoint that keeps
    them apart. Sums need one task vector at a time, so ``tasks`` may be a generator.
    """
    if role is Role.LINEAR:
        stacks = list(tasks)
        if stacks[0].ndim > 2:
            return torch.stack([merged_task(role, matrices, density, rank) for matrices in zip(*stacks, strict=True)])
        return merge_task_matrices([trim(task, share) for task, share in zip(stacks, density, strict=True)], rank)
    trimmed = (trim(task, share) for task, share in zip(tasks, density, strict=True))
    if role is Role.CONVOLUTION:
        kernels = list(trimmed)
        return merge_task_matrices([kernel.flatten(1) for kernel in kernels], rank).view_as(kernels[0])
    total = functools.reduce(torch.add, trimmed)
    return total / len(density) if role is Role.NORM else total


def task_vectors(group: TensorGroup, start: torch.Tensor, weight: Mapping[Hashable, float]) -> Iterator[torch.Tensor]:
    """Each expert's task vector, its tensor minus the base model's ``start``, times its weight, in ``start``'s dtype.

    Raises:
        SltaError: the base model or the expert has a value that is not finite.
    """
    for entry in group.non_base:
        task = entry.tensor.to(start.dtype).sub(start).mul_(weight[entry.id])
        if not task.isfinite().all():
            raise not_finite(group, start.dtype)
        yield task


def checked_number(name: str, kind: type, valid: Callable[[float], bool], rule: str) -> Any:
    """The type of a parameter that must satisfy a rule; a value that does not raises an `SltaError`."""

    def check(value: Any) -> Any:
        try:
            number = kind(value)
            accepted = number == float(value) and valid(number)
        except (TypeError, ValueError, OverflowError):
            accepted = False
        if not accepted:
            raise SltaError(f"'{name}' of merge_method sftm must be {rule}, not {value!r}.")
        return value

    return Annotated[kind, BeforeValidator(check)]


class SftmMethod(CheckedMethod):
    """Superpose Features from Task Matrices: per tensor, data-free, on the tensors' device.

    Linear maps and convolutions keep the singular features of every expert's task matrix, biases, embeddings and the
    output head take the sum of the task vectors, both times ``lambda``; norms take the mean, unscaled. Task matrices
    are ``weight`` (expert − base) in float32 (float64 for float64 tensors), trimmed to the share ``density``.
    """

    spec = MergeMethodSpec(
        name="sftm",
        parameters=(
            ParameterSpec(
                "lambda",
                checked_number("lambda", float, math.isfinite, "a finite number"),
                ParameterScope.SHARED,
                default=0.6,
                description="the scaling factor γ of the merged task matrices",
            ),
            ParameterSpec(
                "rank",
                checked_number("rank", int, lambda rank: rank >= 0, "a whole number, 0 (full rank) or above"),
                ParameterScope.SHARED,
                default=0,
                description="how many singular features of a task matrix to keep; 0 keeps all",
            ),
            ParameterSpec(
                "weight",
                checked_number("weight", float, math.isfinite, "a finite number"),
                ParameterScope.NON_BASE,
                default=1.0,
                description="multiplies the expert's task vectors",
            ),
            ParameterSpec(
                "density",
                checked_number("density", float, lambda share: 0 < share <= 1, "above 0 and at most 1"),
                ParameterScope.NON_BASE,
                default=0.2,
                description="the share η of every task vector's entries to keep, the largest by magnitude",
            ),
        ),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        pretty_name="SFTM",
        reference_url="https://arxiv.org/abs/2502.10698",
        optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roles: dict[Hashable, Mapping[str, Role]] = {}
        self._trust_remote_code = False

    def validate_inputs(
        self, input_ids: Sequence[Hashable], base_id: Hashable | None = None, *, group_name: str | None = None
    ) -> None:
        """Check the inputs' structure; at the first slice, forget the previous merge and note the loader's settings."""
        if base_id is None:
            raise SltaError("'sftm' needs base_model: the model that the experts were fine-tuned from.")
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name is not None and group_name.endswith(".slices[0]"):
            # The settings are the planning thread's own: the threads that execute the merge do not see them.
            self._trust_remote_code = LoaderCache().trust_remote_code
            self._roles.pop(base_id, None)

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor (Algorithm 2).

        Raises:
            SltaError: the base model or an expert has a value that is not finite.
        """
        base = group.base
        assert base is not None, "the input contract requires a base"
        dtype = torch.promote_types(base.tensor.dtype, torch.float32)
        start = base.tensor.to(dtype)
        role = self._role(base.id, group.metadata, start)
        tasks = task_vectors(group, start, parameters["weight"])
        merged = merged_task(role, tasks, parameters["density"].values_for(group.non_base), parameters["rank"])
        scale = 1.0 if role is Role.NORM else parameters["lambda"]
        return start.add(merged, alpha=scale).to(base.tensor.dtype)

    def _role(self, base: Hashable, metadata: TensorMetadata, tensor: torch.Tensor) -> Role:
        with self._lock:
            if base not in self._roles:
                self._roles[base] = model_roles(base, self._trust_remote_code)
            roles = self._roles[base]
        known = (roles[ending] for ending in dotted_tails(metadata.name or "") if ending in roles)
        return next(known, None) or role_by_shape(tensor, metadata.vocabulary_axis)


def model_roles(base: Hashable, trust_remote_code: bool) -> Mapping[str, Role]:
    """The roles of the base model's tensors; none, and a warning, where transformers cannot build the model."""
    try:
        if not isinstance(base, ModelReference):
            raise SltaError("the tensors come without a model")
        return tensor_roles(meta_model(base.config(trust_remote_code), trust_remote_code))
    except Exception as error:
        LOG.warning(
            "sftm cannot see the structure of %s (%s). It goes by the shapes of its tensors: matrices are merged as "
            "linear maps, norms as biases.",
            base,
            error,
        )
        return {}
