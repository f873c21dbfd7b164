"""The model that a feature merge stays near: the base model, its SLTA merge, or the experts' average."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.submodules import weighted_sum
from mergekit_slta.models.checkpoint import Checkpoint


class Anchor:
    """A weighted sum of the base model and the experts' task vectors, formed tensor by tensor.

    Args:
        models: the base model, then the ``T`` experts.
        weights: the experts' weights by the model's name of a tensor, as ``TensorWeights`` gives them; None for the
            base model itself.
    """

    def __init__(self, models: Sequence[Checkpoint], weights: Callable[[str], torch.Tensor] | None = None) -> None:
        self.models = models
        self._weights = weights

    def read(
        self, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does."""
        models = self.models[:1] if self._weights is None else self.models
        return self.blend(names, [model.read(names, base_model_prefix, device) for model in models])

    def blend(self, names: Mapping[str, str], tensors: Sequence[Weights]) -> dict[str, torch.Tensor]:
        """The anchor's tensors.

        Args:
            names: what each tensor is called in ``tensors``, and the model's name of it.
            tensors: the base model's, then the experts'.
        """
        base, *experts = tensors
        blended = dict(base)
        for key, name in names.items():
            if self._weights is not None and base[key].is_floating_point():
                weights = self._weights(name)
                blended[key] = weighted_sum(base[key], [(own[key], w) for own, w in zip(experts, weights, strict=True)])
        return blended
