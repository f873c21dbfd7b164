"""The merge method ``actmat``: every linear map solved by least squares without any data (arXiv 2604.01329).

``covariance.py`` is the regression. What is no linear map - embeddings, the output head, norms, biases, convolutions -
takes the experts' mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.actmat.covariance import merged_task
from mergekit_slta.methods.base import method_spec
from mergekit_slta.methods.data_free import DataFreeMethod
from mergekit_slta.models.roles import Role
from mergekit_slta.recipe.settings import ActmatSettings


class ActmatMethod(DataFreeMethod):
    """Data-free covariance estimation: per tensor, on the tensors' device, in float64.

    ``weight`` says how much an expert counts against the others, in the regression and in the mean: an expert with 0 is
    as good as not listed, and equal weights change nothing. It does not scale the task vectors, because a regression
    that is told to reproduce half of an expert gives the half; ``scale`` multiplies the merged change as a whole.
    """

    settings = ActmatSettings
    spec = method_spec(ActmatSettings, "ACTMat", "2604.01329")

    def merge_tasks(
        self, role: Role, tasks: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        """Solve a linear map; average what is none, or is too large to solve for."""
        if group.metadata.vocabulary_axis is not None:  # too large to solve for, whatever module holds it
            role = Role.OTHER
        weights = parameters["weight"].values_for(group.non_base)
        return merged_task(role, list(tasks), parameters["ridge"], weights), parameters["scale"]
