"""The anchor ``actmat``: the model that a feature merge stays near is what ``merge_method: actmat`` gives."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from mergekit_slta.actmat.covariance import merged_task
from mergekit_slta.layers.blend import Alpha, Blend
from mergekit_slta.layers.calls import Weights
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.roles import Role
from mergekit_slta.models.stacks import in_parts
from mergekit_slta.recipe.settings import ActmatSettings


def equal_weights(experts: int) -> Alpha:
    """The weights that give the average of the experts."""
    share = torch.full((experts,), 1 / experts, dtype=torch.float64)
    return lambda name: share


class ActmatAnchor(Blend):
    """The experts' average, with linear maps solved as ``actmat`` solves them.

    Args:
        models: the base model, then the ``T`` experts.
        maps: the roles of the tensors to solve, by the model's names.
    """

    def __init__(self, models: Sequence[Checkpoint], maps: Mapping[str, Role]) -> None:
        super().__init__(models, equal_weights(len(models) - 1))
        self._maps = maps

    def of(self, names: Mapping[str, str], tensors: Sequence[Weights]) -> dict[str, torch.Tensor]:
        """The anchor's tensors, from those that have been read; see ``Blend.of``."""
        base, *experts = tensors
        blended = super().of(names, tensors)
        for key, name in names.items():
            if name in self._maps:
                solved = functools.partial(_solved, self._maps[name])
                blended[key] = in_parts(solved, base[key], *(own[key] for own in experts))
        return blended


def _solved(role: Role, base: torch.Tensor, *experts: torch.Tensor) -> torch.Tensor:
    tasks = [own - base for own in experts]
    change = merged_task(role, tasks, ActmatSettings().ridge, [1.0] * len(tasks))
    return base + change.to(base.dtype)
