"""The merge method ``actmat``: every linear map solved by least squares without any data (arXiv 2604.01329).

``covariance.py`` is the regression. What is no linear map - embeddings, the output head, norms, biases, convolutions -
takes the experts' mean.
"""

from __future__ import annotations

from typing import Any

import torch
from mergekit.merge_methods import TensorGroup
from mergekit.merge_methods.base import OptionalTensorPolicy

from mergekit_slta.actmat.covariance import merged_task
from mergekit_slta.methods.base import method_spec
from mergekit_slta.methods.data_free import DataFreeMethod, task_vectors
from mergekit_slta.models.roles import Role
from mergekit_slta.recipe.settings import ActmatSettings


class ActmatMethod(DataFreeMethod):
    """Data-free covariance estimation: per tensor, on the tensors' device, in float64.

    ``weight`` says how much an expert counts against the others, in the regression and in the mean: an expert with 0 is
    as good as not listed, and equal weights change nothing. It does not scale the task vectors, because a regression
    that is told to reproduce half of an expert gives the half; ``scale`` multiplies the merged change as a whole.
    """

    settings = ActmatSettings
    spec = method_spec(
        ActmatSettings, "ACTMat", "2604.01329", optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON
    )

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor.

        Raises:
            SltaError: the base model or an expert has a value that is not finite.
        """
        base = group.base
        assert base is not None, "the input contract requires a base"
        start = base.tensor.to(torch.promote_types(base.tensor.dtype, torch.float32))
        role = self._role(base.id, group.metadata, start)
        if group.metadata.vocabulary_axis is not None:  # too large to solve for, whatever module holds it
            role = Role.OTHER
        tasks = list(task_vectors(group, start))
        merged = merged_task(role, tasks, parameters["ridge"], parameters["weight"].values_for(group.non_base))
        return start.add(merged.to(start.dtype), alpha=parameters["scale"]).to(base.tensor.dtype)
