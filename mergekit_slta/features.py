"""The feature deltas of one decoder layer's submodules, per level (Eq. 14 and A.3.3 of arXiv 2504.10902)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mergekit_slta.decoder import Decoder, LayerCall, LayerRun, Weights


class LayerFeatures:
    """One batch at one decoder layer: the base model's run, and the experts' feature deltas on the same inputs.

    Args:
        decoder: the decoder.
        layer: the layer's index.
        weights: the layer's tensors of the base model, then of each expert.
        hidden: [B, S, D], the base model's hidden states before the layer.
        call: the layer's other arguments.
        levels: the levels whose submodules are wanted.
    """

    def __init__(
        self,
        decoder: Decoder,
        layer: int,
        weights: Sequence[Weights],
        hidden: torch.Tensor,
        call: LayerCall,
        levels: Sequence[str],
    ) -> None:
        self.decoder = decoder
        self.layer = layer
        self.weights = weights
        self.hidden = hidden
        self.call = call
        self.levels = levels
        self.structure = decoder.structure(layer) if any(level != "layer" for level in levels) else None
        self.base = decoder.run(layer, weights[0], hidden, call)

    def deltas(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Each submodule's name and its ``T`` feature deltas, [B, S, D] each."""
        submodules: dict[str, list[torch.Tensor]] = {}
        for weights in self.weights[1:]:
            for name, delta in self._expert_deltas(weights):
                submodules.setdefault(name, []).append(delta)
        yield from submodules.items()

    def _expert_deltas(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        if "layer" in self.levels:
            own = self.decoder.run(self.layer, weights, self.hidden, self.call)
            yield f"layer.{self.layer}", _output_delta(own, self.base)
        if "attn_mlp" in self.levels:
            assert self.structure is not None
            replay = {}
            if "layer" in self.levels:  # the attention branch has the same input in both runs
                replay = {name: own.outputs[name] for name in self.structure.branches["attn"] if name in own.outputs}
            branches = self.decoder.run(
                self.layer, weights, self.hidden, self.call, mlp_input=self.base.mlp_input, replay=replay
            )
            for branch, children in self.structure.branches.items():
                yield f"layer.{self.layer}.{branch}", _branch_delta(branches, self.base, children)


def _branch_delta(expert: LayerRun, base: LayerRun, children: frozenset[str]) -> torch.Tensor:
    """What the branch adds to the residual stream, expert minus base."""
    assert expert.terms is not None and base.terms is not None
    parts = [expert.terms[name] - base.terms[name] for name in base.terms if name in children]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def _output_delta(expert: LayerRun, base: LayerRun) -> torch.Tensor:
    """The difference of the layer's outputs, term by term where they are known: the input cancels exactly."""
    if expert.terms is None or base.terms is None:
        return expert.output - base.output
    return _branch_delta(expert, base, frozenset(base.terms))
