"""theta_0 + sum_t alpha_t tau_t: tensors of the base model plus weighted task vectors tau_t = theta_t - theta_0."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import transformers

from mergekit_slta.layers.maps import Weights
from mergekit_slta.models.checkpoint import Checkpoint, ExpertStack


def weighted_sum(base: torch.Tensor, experts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The base tensor plus the weighted task vectors, as (1 - sum alpha) theta_0 + sum alpha theta_t.

    That needs no memory for task vectors, and a tensor that no expert changed stays equal to the last bit. It is
    computed in at least float32. An expert's weights are one number, or a tensor that broadcasts to its own.
    """
    experts = [(tensor, weight) for tensor, weight in experts if bool(weight.any())]
    dtype = torch.promote_types(base.dtype, torch.float32)
    experts = [(tensor, weight) for tensor, weight in experts if not torch.equal(tensor, base)]
    if not experts:
        return base
    weights = [weight.to(base.device, dtype) for _, weight in experts]
    result = base.to(dtype) * (1 - torch.stack(weights).sum(0))
    for (tensor, _), weight in zip(experts, weights, strict=True):
        result.addcmul_(tensor, weight)
    return result.to(base.dtype)


def blend(base: Weights, experts: Sequence[Weights], alpha: torch.Tensor) -> dict[str, torch.Tensor]:
    """The ``weighted_sum`` of all floating-point tensors, with one weight for each expert [T].

    Other tensors stay the base model's.
    """
    blended = dict(base)
    for name, tensor in base.items():
        if tensor.is_floating_point():
            pairs = list(zip((expert[name] for expert in experts), alpha, strict=True))
            if isinstance(tensor, ExpertStack):
                blended[name] = ExpertStack(tensor.shape, tensor.device, functools.partial(_part, tensor, pairs))
            else:
                blended[name] = weighted_sum(tensor, pairs)
    return blended


def _part(base: ExpertStack, experts: Sequence[tuple[torch.Tensor, torch.Tensor]], expert: int) -> torch.Tensor:
    """The ``weighted_sum`` of one routed expert's matrices, from the stacks of all."""
    return weighted_sum(base[expert], [(stack[expert], weight) for stack, weight in experts])


class Blend:
    """A ``blend`` of the base model and the ``T`` experts that can be read like a checkpoint."""

    def __init__(self, models: Sequence[Checkpoint], alpha: torch.Tensor) -> None:
        self.models = models
        self._alpha = alpha

    def read(
        self, names: Mapping[str, str], model: transformers.PreTrainedModel, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does."""
        return self.of(names, [source.read(names, model, device) for source in self.models])

    def of(self, names: Mapping[str, str], tensors: Sequence[Weights]) -> dict[str, torch.Tensor]:
        """Blend tensors that have been read of the base model, then of the experts; ``names`` are those of ``read``."""
        base, *experts = tensors
        return blend(base, experts, self._alpha)
