"""The anchor ``actmat``: a feature merge begins with what ``merge_method: actmat`` gives."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import torch

from mergekit_slta.actmat.covariance import merged_task
from mergekit_slta.layers.blend import Alpha, Blend
from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.roles import Role, tensor_roles
from mergekit_slta.models.stacks import in_parts
from mergekit_slta.recipe.settings import ActmatSettings


def equal_weights(experts: int, keep_weight: float = 0.0) -> Alpha:
    """The weights that give the average of the experts, and of the base model where its task counts."""
    share = torch.full((experts,), 1 / (experts + keep_weight), dtype=torch.float64)
    return lambda name: share


class ActmatAnchor(Blend):
    """The experts' average, with linear maps solved as ``actmat`` solves them.

    Args:
        models: the base model, then the ``T`` experts.
        decoder: their common decoder; the linear maps of its layers are solved.
        keep_weight: how much the base model's task counts; it is then an expert whose task vector is zero.
    """

    def __init__(self, models: Sequence[Checkpoint], decoder: Decoder, keep_weight: float = 0.0) -> None:
        super().__init__(models, equal_weights(len(models) - 1, keep_weight))
        self._keep_weight = keep_weight
        roles = tensor_roles(decoder.model)
        names = [name for layer in range(len(decoder)) for name in decoder.layer_tensors(layer).values()]
        self._maps = {name: roles[name] for name in names if roles.get(name) in (Role.LINEAR, Role.TRANSPOSED)}

    def of(
        self, names: Mapping[str, str], tensors: Sequence[Weights], later: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """The anchor's tensors, from those that have been read; see ``Blend.of``.

        Args:
            names: each tensor's key in ``tensors``, and the model's name of it.
            tensors: the base model's, then the experts'.
            later: the keys of maps that stay the base model's, because ``solved_map`` is called for them.
        """
        base, *experts = tensors
        now = [{key: tensor for key, tensor in own.items() if key not in later} for own in tensors]
        blended = {**base, **super().of(names, now)}
        for key in self.solved_keys(names) - set(later):
            solved = functools.partial(_solved, self._maps[names[key]], self._keep_weight)
            blended[key] = in_parts(solved, base[key], *(own[key] for own in experts))
        return blended

    def solved_keys(self, names: Mapping[str, str]) -> set[str]:
        """Which of the tensors are solved."""
        return {key for key, name in names.items() if name in self._maps}


def _solved(role: Role, keep_weight: float, base: torch.Tensor, *experts: torch.Tensor) -> torch.Tensor:
    if base.ndim > 2:  # a mixture, whose solutions in float64 may not fit on a GPU that has room for all its experts
        stacks = zip(base, *experts, strict=True)
        return torch.stack([_solved(role, keep_weight, *matrices) for matrices in stacks])
    kept = [base] * bool(keep_weight)
    tasks = [own - base for own in (*experts, *kept)]
    counts = [1.0] * len(experts) + [keep_weight] * len(kept)
    return base + merged_task(role, tasks, ActmatSettings().ridge, counts).to(base.dtype)
