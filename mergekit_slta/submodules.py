"""The submodules of each level, and which merging weights every tensor of the model takes.

Levels (section 2.2 and A.3.5 of arXiv 2504.10902): ``model``, ``layer``, ``attn_mlp``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mergekit_slta.decoder import Decoder
from mergekit_slta.errors import SltaError
from mergekit_slta.skeleton import model_tensor_name

LEVELS = ("layer", "attn_mlp")
EDGES = ("base", "mean")

AlphaTable = Mapping[str, torch.Tensor]


def layer_submodules(level: str, layer: int) -> list[str]:
    """The canonical names of a level's submodules in one layer, in the order of the forward pass."""
    if level == "layer":
        return [f"layer.{layer}"]
    return [f"layer.{layer}.{branch}" for branch in ("attn", "mlp")]


class TensorWeights:
    """The merging weights of every tensor, from those of the submodules.

    Args:
        decoder: the model's decoder.
        level: the level of ``alpha``.
        alpha: [T] float64 merging weights per submodule of the level.
        edges: ``base`` keeps the base model's tensors outside the decoder layers, ``mean`` gives them the mean of
            all submodules' weights.
    """

    def __init__(self, decoder: Decoder, level: str, alpha: AlphaTable, edges: str = "base") -> None:
        self.decoder = decoder
        self.level = level
        self.alpha = alpha
        experts = len(next(iter(alpha.values())))
        self.edge_alpha = (
            torch.stack(list(alpha.values())).mean(0) if edges == "mean" else torch.zeros(experts, dtype=torch.float64)
        )
        self._names = set(decoder.model.state_dict())

    def __getitem__(self, name: str) -> torch.Tensor:
        """The merging weights [T] of a tensor, by its name in a checkpoint.

        Raises:
            SltaError: the tensor belongs to a decoder layer but to none of its modules.
        """
        name = model_tensor_name(name, self._names, self.decoder.base_model_prefix) or name
        path = self.decoder.layers_path + "."
        if not name.startswith(path):
            return self.edge_alpha
        layer, _, inside = name.removeprefix(path).partition(".")
        if self.level == "layer":
            return self.alpha[f"layer.{layer}"]
        child = inside.partition(".")[0]
        branches = [b for b, children in self.decoder.structure(int(layer)).branches.items() if child in children]
        if not branches:
            raise SltaError(f"The tensor {name} feeds neither branch of its layer: use 'level: layer'.")
        return torch.stack([self.alpha[f"layer.{layer}.{branch}"] for branch in branches]).mean(0)
