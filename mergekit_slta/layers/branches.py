"""The branches of a decoder layer: which of its children make them, and how one of them runs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mergekit_slta.layers.calls import hidden_of
from mergekit_slta.layers.recording import LayerRun

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
    """

    branches: Mapping[str, Nodes]
    mixers: Nodes
    boundary: str | None = None

    def only(self, branch: str) -> Nodes:
        """The children that serve no other branch."""
        return self.branches[branch].difference(*(own for name, own in self.branches.items() if name != branch))

    def others_of(self, branch: str, base: LayerRun) -> dict[str, Any]:
        """The outputs to replay, so that only one branch differs from the base model, whose run is ``base``."""
        others = frozenset().union(*(self.only(other) for other in self.branches if other != branch))
        return {name: base.outputs[name] for name in others if name in base.outputs}

    def features(self, branch: str, run: LayerRun) -> torch.Tensor:
        """The residual stream where a branch ends."""
        if self.boundary is None or branch != "attn":
            output: torch.Tensor = run.output
            return output
        found: torch.Tensor = hidden_of(run.outputs[self.boundary])
        return found
