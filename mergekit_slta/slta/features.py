"""The Gram matrices of one decoder layer's submodules on one batch, per level (Eq. 14, A.3.3 and A.3.5)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mergekit_slta.layers.calls import LayerCall, Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.heads import Heads, find_heads
from mergekit_slta.layers.maps import LinearMap, MapDeltas, fused_hidden, linear_maps
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.structure import LayerStructure, structure
from mergekit_slta.levels import head_part, submodule_name
from mergekit_slta.slta.gram import sample_grams


@dataclass(frozen=True)
class ExpertRun:
    """Runs of a layer with other weights than the base model's, on the base model's inputs.

    Attributes:
        weights: the layer's tensors.
        own: the run on the layer's input; only for level ``layer``.
        branches: the run whose MLP branch reads the base model's input to it; only for levels of branches.
    """

    weights: Weights
    own: LayerRun | None
    branches: LayerRun | None


@dataclass
class LayerFeatures:
    """The structure and the weights of one layer that the levels need for all batches.

    Args:
        decoder: the decoder.
        layer: the layer's index.
        weights: the layer's tensors of the base model, then of each of the ``T`` experts.
        levels: the levels whose submodules are wanted.
        tokens: how many tokens the batches have in all.
    """

    decoder: Decoder
    layer: int
    weights: Sequence[Weights]
    levels: Sequence[str]
    tokens: int
    structure: LayerStructure | None = field(init=False, default=None)
    heads: Heads | None = field(init=False, default=None)
    maps: dict[LinearMap, MapDeltas] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if {"attn_mlp", "head_mlp"} & set(self.levels):
            self.structure = structure(self.decoder, self.layer)
        if "head_mlp" in self.levels:
            self.heads = find_heads(self.decoder, self.layer)
        if "linear" in self.levels:
            for linear_map in linear_maps(self.decoder.layers[self.layer]):
                self.maps[linear_map] = MapDeltas(linear_map, self.weights, self.tokens)

    def run_base(self, hidden: torch.Tensor, call: LayerCall) -> LayerRun:
        """Run the base model's layer on a batch [B, S, D]."""
        capture = {linear_map.module for linear_map in self.maps} | self._head_modules()
        mlp_reads = self.structure.mlp_reads if self.structure else None
        return self.decoder.run(self.layer, self.weights[0], hidden, call, mlp_reads=mlp_reads, capture=capture)

    def grams(
        self, base: LayerRun, hidden: torch.Tensor, call: LayerCall, lengths: Sequence[int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each submodule's name and its Gram matrices [B, T, T] float64 on a batch.

        Args:
            base: the base model's run on the batch.
            hidden: [B, S, D], what it ran on.
            call: the layer's other arguments.
            lengths: the samples' numbers of tokens.
        """
        runs = [self.run(weights, base, hidden, call) for weights in self.weights[1:]]
        for name, deltas in self.deltas(base, runs):
            yield name, sample_grams(deltas, lengths)
        for linear_map, deltas_of_map in self.maps.items():
            grams = [deltas_of_map.gram(inputs) for inputs in self._inputs(linear_map, base, lengths)]
            yield submodule_name(self.layer, linear_map.name), torch.stack(grams).cpu()

    def deltas(self, base: LayerRun, runs: Sequence[ExpertRun]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Each submodule's name and its feature deltas, one [B, S, D] per run; linear maps are left out."""
        if "layer" in self.levels:
            yield submodule_name(self.layer), [_delta(run.own, base) for run in runs]
        if self.structure is None:
            return
        for branch, children in self.structure.branches.items():
            if branch == "mlp" or "attn_mlp" in self.levels:
                deltas = [_delta(run.branches, base, children) for run in runs]
                yield submodule_name(self.layer, branch), deltas
        for head in range(self.heads.count if self.heads is not None else 0):
            features = self._head_features(head, base, self.weights[0])
            deltas = [self._head_features(head, run.branches, run.weights) - features for run in runs]
            yield submodule_name(self.layer, head_part(head)), deltas

    def run(self, weights: Weights, base: LayerRun, hidden: torch.Tensor, call: LayerCall) -> ExpertRun:
        """Run the layer with other weights on the base model's input, and its branches each on theirs."""
        own = branches = None
        if "layer" in self.levels:
            own = self.decoder.run(self.layer, weights, hidden, call, capture=self._head_modules())
        if self.structure is not None:
            attention = self.structure.branches["attn"]
            done = own.outputs if own is not None else {}  # the attention branch has the same input in both runs
            branches = self.decoder.run(
                self.layer,
                weights,
                hidden,
                call,
                mlp_reads=self.structure.mlp_reads,
                mlp_input=base.mlp_input,
                replay={name: output for name, output in done.items() if name in attention},
                capture=self._head_modules(),
            )
            if own is not None:
                branches.inputs.update(own.inputs)
        return ExpertRun(weights, own, branches)

    def _head_modules(self) -> set[str]:
        return {self.heads.output.module} if self.heads is not None else set()

    def _head_features(self, head: int, run: LayerRun | None, weights: Weights) -> torch.Tensor:
        """o_proj restricted to a head's columns, applied to that head's output (A.3.5)."""
        assert self.heads is not None and run is not None
        output = self.heads.output
        part = run.inputs[output.module][0].unflatten(-1, (self.heads.count, -1))[..., head, :]
        columns = output.matrix(weights).unflatten(-1, (self.heads.count, -1))[:, head, :]
        return part @ columns.T

    def _inputs(self, linear_map: LinearMap, base: LayerRun, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
        """Each sample's inputs [S, D] to a map in the base model, of the tokens that reach it, without padding."""
        if linear_map.module not in base.inputs:  # the layer never calls it, or no token reaches it
            width = linear_map.matrix(self.weights[0]).shape[-1]
            yield from [torch.zeros(0, width, device=self.decoder.device)] * len(lengths)
            return
        values, *chosen = base.inputs[linear_map.module]
        values = values.reshape(-1, values.shape[-1])
        positions = torch.arange(len(values), device=values.device)
        width = len(values) // len(lengths)
        if linear_map.expert is not None:
            positions = positions[(chosen[0] == linear_map.expert).any(-1)]
            values = values[positions]
            if linear_map.name.endswith(".down_proj"):
                values = self._fused_hidden(linear_map, values)
        for row, length in enumerate(lengths):
            yield values[(positions >= row * width) & (positions < row * width + length)]

    def _fused_hidden(self, down: LinearMap, inputs: torch.Tensor) -> torch.Tensor:
        """What the base model feeds to a fused expert's down projection, by the module's own gate."""
        module = self.decoder.layers[self.layer].get_submodule(down.module)
        first = next(m for m in self.maps if m.module == down.module and m.expert == down.expert and m is not down)
        return fused_hidden(module, first.apply(self.weights[0], inputs))


def _delta(expert: LayerRun | None, base: LayerRun, children: Collection[str] | None = None) -> torch.Tensor:
    """What some children, or all, add to the residual stream, expert minus base.

    The difference of the layers' outputs is taken term by term where the terms are known: the input cancels exactly.
    """
    assert expert is not None
    if expert.terms is None or base.terms is None:
        return expert.output - base.output
    parts = [expert.terms[name] - base.terms[name] for name in base.terms if children is None or name in children]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
