"""The merge method ``actmat``: every linear map solved by least squares without any data (arXiv 2604.01329).

``actmat/covariance.py`` is the regression. Embeddings, the output head, norms, biases and convolutions take the
experts' mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.actmat.covariance import merged_task
from mergekit_slta.host.method import DataFreeMerge, method_spec
from mergekit_slta.models.roles import Role
from mergekit_slta.recipe.settings import ActmatSettings


class ActmatMerge(DataFreeMerge):
    """Data-free covariance estimation: per tensor, on the tensors' device, in float32.

    ``weight`` says how much an expert counts against the others, in the regression and in the mean: weight 0 leaves the
    expert out, and equal weights change nothing. It does not scale the task vectors: the regression would reproduce
    the scaled expert. ``scale`` multiplies the merged change as a whole.
    """

    spec = method_spec(ActmatSettings, "ACTMat", "2604.01329")

    def merge_tasks(
        self, role: Role, tasks: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        """Solve a linear map; average other tensors, and those that are too large to solve."""
        if group.metadata.vocabulary_axis is not None:  # too large to solve
            role = Role.OTHER
        weights = parameters["weight"].values_for(group.non_base)
        return merged_task(role, list(tasks), parameters["ridge"], weights), parameters["scale"]
