"""The branches of a decoder layer: which of its children make them, and how one of them runs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mergekit_slta.layers.calls import Weights, hidden_of
from mergekit_slta.layers.children import is_inside
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.residual import plain

Nodes = frozenset[str]


@dataclass(frozen=True)
class LayerStructure:
    """How a decoder layer splits into an attention (or other token mixing) branch and an MLP branch.

    Attributes:
        branches: the direct children of the layer in each branch, ``attn`` and ``mlp``, norms included; a child, or a
            tensor of the layer's own, that feeds both branches is in both. A layer that only mixes tokens, or never
            mixes them, has one branch.
        mixers: the children in the attention branch that let tokens see each other.
        boundary: the child whose output is all that the MLP branch reads, where the attention branch ends with a norm
            of the residual stream; None where its contribution is added to the stream.
        adding: the children that add to the residual stream by themselves.
    """

    branches: Mapping[str, Nodes]
    mixers: Nodes
    boundary: str | None = None
    adding: Nodes = frozenset()

    def only(self, branch: str) -> Nodes:
        """The children that serve no other branch."""
        return self.branches[branch].difference(*(own for name, own in self.branches.items() if name != branch))

    def alone(self, branch: str, weights: Weights, base: Weights, run: LayerRun) -> tuple[Weights, dict[str, Any]]:
        """The weights, and the outputs to replay, with which only one branch differs from the base model.

        The other branches return what they return in the base model. A child that adds to the residual stream by
        itself would return the base model's stream too, so it runs with the base model's weights instead. ``run`` is
        the base model's run of the layer on the same input.
        """
        others = frozenset().union(*(self.only(other) for other in self.branches if other != branch))
        again = others & self.adding
        replay = {name: run.returned[name] for name in others - again if name in run.returned}
        return {name: base[name] if is_inside(name, again) else own for name, own in weights.items()}, replay

    def features(self, branch: str, run: LayerRun) -> torch.Tensor:
        """The residual stream where a branch ends."""
        if self.boundary is None or branch != "attn":
            output: torch.Tensor = run.output
            return output
        found: torch.Tensor = plain(hidden_of(run.outputs[self.boundary]))
        return found
