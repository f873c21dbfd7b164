"""The merge method ``sftm``: Superpose Features from Task Matrices (arXiv 2502.10698, Algorithm 2), without any data.

mergekit passes integer tensors through by itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import TensorGroup
from mergekit.merge_methods.base import OptionalTensorPolicy, TensorMetadata

from mergekit_slta.errors import SltaError
from mergekit_slta.methods.base import FiniteMethod, method_spec, not_finite
from mergekit_slta.recipe.settings import SftmSettings
from mergekit_slta.sftm.roles import Role, dotted_tails, model_roles, role_by_shape
from mergekit_slta.sftm.superpose import merge_task_matrices, trim


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


class SftmMethod(FiniteMethod):
    """Superpose Features from Task Matrices: per tensor, data-free, on the tensors' device.

    Linear maps and convolutions keep the singular features of every expert's task matrix, biases, embeddings and the
    output head take the sum of the task vectors, both times ``lambda``; norms take the mean, unscaled. Task matrices
    are ``weight`` (expert − base) in float32 (float64 for float64 tensors), trimmed to the share ``density``.
    """

    settings = SftmSettings
    spec = method_spec(
        SftmSettings, "SFTM", "2502.10698", optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON
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
