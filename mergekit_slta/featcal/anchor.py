"""The model that a feature merge stays near: the base model, its SLTA or actmat merge, or the experts' average."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mergekit_slta.actmat.covariance import merged_task
from mergekit_slta.layers.decoder import Weights
from mergekit_slta.layers.submodules import weighted_sum
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.roles import Role
from mergekit_slta.recipe.recipe import ActmatSettings


class Anchor:
    """A merge of the base model and the experts, formed tensor by tensor: a weighted sum, or what ``actmat`` gives.

    Args:
        models: the base model, then the ``T`` experts.
        weights: the experts' weights by the model's name of a tensor, as ``TensorWeights`` gives them; None for the
            base model itself.
        solved: the roles of the tensors that ``actmat`` merges, by the model's names, whatever the weights are.
    """

    def __init__(
        self,
        models: Sequence[Checkpoint],
        weights: Callable[[str], torch.Tensor] | None = None,
        solved: Mapping[str, Role] | None = None,
    ) -> None:
        self.models = models
        self._weights = weights
        self._solved = solved or {}

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
            if name in self._solved:
                start, tasks = base[key], [own[key] - base[key] for own in experts]
                change = merged_task(self._solved[name], tasks, ActmatSettings().ridge, [1.0] * len(tasks))
                blended[key] = start + change.to(start.dtype)
            elif self._weights is not None and base[key].is_floating_point():
                weights = self._weights(name)
                blended[key] = weighted_sum(base[key], [(own[key], w) for own, w in zip(experts, weights, strict=True)])
        return blended
