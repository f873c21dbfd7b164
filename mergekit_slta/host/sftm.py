"""The merge method ``sftm``: Superpose Features from Task Matrices (arXiv 2502.10698, Algorithm 2), without any data.

mergekit passes integer tensors through by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.host.method import DataFreeMerge, method_spec
from mergekit_slta.models.roles import Role
from mergekit_slta.recipe.settings import SftmSettings
from mergekit_slta.sftm.superpose import merge_task_matrices, trim


def superpose_task(role: Role, tasks: Iterable[torch.Tensor], density: Sequence[float], rank: int) -> torch.Tensor:
    """Trim the experts' task vectors and merge them by their role, before the scaling factor γ (Algorithm 2).

    A stack [..., m, n] of linear maps is trimmed and merged matrix by matrix, as if the checkpoint stored them apart.
    Sums need one task vector at a time, so ``tasks`` may be a generator.
    """
    if role in (Role.LINEAR, Role.TRANSPOSED):
        stacks = list(tasks)
        if stacks[0].ndim > 2:
            return torch.stack(
                [superpose_task(role, matrices, density, rank) for matrices in zip(*stacks, strict=True)]
            )
        return merge_task_matrices([trim(task, share) for task, share in zip(stacks, density, strict=True)], rank)
    trimmed = (trim(task, share) for task, share in zip(tasks, density, strict=True))
    if role is Role.CONVOLUTION:
        kernels = list(trimmed)
        return merge_task_matrices([kernel.flatten(1) for kernel in kernels], rank).view_as(kernels[0])
    total = functools.reduce(torch.add, trimmed)
    return total / len(density) if role is Role.NORM else total


class SftmMerge(DataFreeMerge):
    """Superpose Features from Task Matrices: per tensor, data-free, on the tensors' device.

    Linear maps and convolutions keep the singular features of every expert's task matrix, biases, embeddings and the
    output head take the sum of the task vectors, both times ``lambda``; norms take the mean, unscaled. Task matrices
    are ``weight`` (expert − base) in float32 (float64 for float64 tensors), trimmed to the share ``density``.
    """

    spec = method_spec(SftmSettings, "SFTM", "2502.10698")

    def merge_tasks(
        self, role: Role, tasks: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        """Superpose the experts' features (Algorithm 2)."""
        weights = parameters["weight"].values_for(group.non_base)
        weighted = (task.mul_(weight) for task, weight in zip(tasks, weights, strict=True))
        merged = superpose_task(role, weighted, parameters["density"].values_for(group.non_base), parameters["rank"])
        return merged, 1.0 if role is Role.NORM else parameters["lambda"]
