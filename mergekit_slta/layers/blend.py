"""theta_0 + sum_t alpha_t tau_t: tensors of the base model plus weighted task vectors tau_t = theta_t - theta_0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from mergekit_slta.layers.decoder import Weights
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.stacks import ExpertStack

# The experts' weights [T] or [T, ...] of a tensor, by its name.
Alpha = Callable[[str], torch.Tensor]


def weighted_sum(
    base: torch.Tensor, experts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, by_steps: bool = False
) -> torch.Tensor:
    """The base tensor plus the weighted task vectors.

    There are two ways to compute it, which round differently. Merges use (1 - sum alpha) theta_0 + sum alpha theta_t,
    in at least float32: it needs no memory for task vectors, and a tensor that no expert changed stays equal to the
    last bit. Comparisons with the base model add one alpha tau_t after the other to theta_0: a small step from the base
    model must not drown in the rounding of (1 - alpha) theta_0.

    Args:
        base: the base model's tensor.
        experts: each expert's tensor and its weights, one number or a tensor that broadcasts to it.
        by_steps: whether to add one task vector after the other; the weights are then numbers.
    """
    experts = [(tensor, weight) for tensor, weight in experts if bool(weight.any())]
    if by_steps:
        if len(experts) == 1 and experts[0][1] == 1:
            return experts[0][0]
        result = base
        for tensor, weight in experts:
            result = torch.add(result, tensor - base, alpha=float(weight))
        return result
    dtype = torch.promote_types(base.dtype, torch.float32)
    experts = [(tensor, weight) for tensor, weight in experts if not torch.equal(tensor, base)]
    if not experts:
        return base
    weights = [weight.to(base.device, dtype) for _, weight in experts]
    result = base.to(dtype) * (1 - torch.stack(weights).sum(0))
    for (tensor, _), weight in zip(experts, weights, strict=True):
        result.addcmul_(tensor, weight)
    return result.to(base.dtype)


def blend(
    base: Weights, experts: Sequence[Weights], alpha: Alpha, *, by_steps: bool = False
) -> dict[str, torch.Tensor]:
    """The ``weighted_sum`` of all floating-point tensors; other tensors stay the base model's."""
    blended = dict(base)
    for name, tensor in base.items():
        if tensor.is_floating_point():
            pairs = list(zip((expert[name] for expert in experts), alpha(name), strict=True))
            if isinstance(tensor, ExpertStack):
                part = functools.partial(_weighted_part, tensor, pairs, by_steps)
                blended[name] = ExpertStack(tensor.shape, tensor.device, part)
            else:
                blended[name] = weighted_sum(tensor, pairs, by_steps=by_steps)
    return blended


def _weighted_part(
    base: ExpertStack, experts: Sequence[tuple[torch.Tensor, torch.Tensor]], by_steps: bool, expert: int
) -> torch.Tensor:
    """The ``weighted_sum`` of one routed expert's matrices, from the stacks of all."""
    pairs = [(own[expert], weight[expert % len(weight)] if weight.ndim else weight) for own, weight in experts]
    return weighted_sum(base[expert], pairs, by_steps=by_steps)


class Blend:
    """A ``blend`` of models that can be read like a checkpoint.

    Args:
        models: the base model, then the ``T`` experts.
        alpha: the experts' weights by the model's name of a tensor; None for the base model alone.
        by_steps: as for ``weighted_sum``.
    """

    def __init__(self, models: Sequence[Checkpoint], alpha: Alpha | None = None, *, by_steps: bool = False) -> None:
        self.models = models
        self._alpha = alpha
        self._by_steps = by_steps

    def read(
        self, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does."""
        models = self.models[:1] if self._alpha is None else self.models
        return self.of(names, [model.read(names, base_model_prefix, device) for model in models])

    def of(self, names: Mapping[str, str], tensors: Sequence[Weights]) -> dict[str, torch.Tensor]:
        """Blend tensors that have been read.

        Args:
            names: each tensor's key in ``tensors``, and the model's name of it.
            tensors: the base model's, then the experts'.
        """
        base, *experts = tensors
        alpha = self._alpha
        if alpha is None:
            return dict(base)
        return blend(base, experts, lambda key: alpha(names[key]), by_steps=self._by_steps)
