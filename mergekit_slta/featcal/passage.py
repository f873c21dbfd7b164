"""Run a layer of the merged model from one group of linear maps to the next, and the experts' own layer beside it.

A layer runs once per stream and batch, although the merged maps become known one after another: each run goes on where
the run before it stopped. Modules that have run are not run again, their outputs are kept. Only what lies between maps
(norms, the attention's core, activations) may be computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.engine.streams import Streams
from mergekit_slta.featcal.groups import LayerMaps, MapGroup
from mergekit_slta.layers.calls import Weights, hidden_of
from mergekit_slta.layers.decoder import INPUT, Decoder
from mergekit_slta.layers.maps import RoutedInputs, routed_inputs

MERGED, EXPERT = range(2)  # the streams


@dataclass
class _Passing:
    """What is kept of a batch while it passes a layer.

    Attributes:
        outputs: what modules of the merged layer have returned, by their paths, for the runs that go on after them.
        targets: what modules of the expert's layer have returned; for a mixture's module, what it was given.
        added: the outputs of the expert's children that have written to the residual stream before other maps do.
        expert: the output of the expert's layer [B, S, D]; None as long as that has not run.
        state: what the merged layer passes to later layers.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Any] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)
    expert: torch.Tensor | None = None
    state: dict[Any, torch.Tensor] = field(default_factory=dict)


class LayerPassage:
    """Takes this process's batches through one layer, which is solved group by group.

    Args:
        decoder: the models' common decoder.
        layer: the layer's index.
        maps: the layer's groups of maps.
        experts: the layer's tensors of the ``T`` experts.
        streams: the merged model's stream and the experts' own, before this layer.
    """

    def __init__(
        self, decoder: Decoder, layer: int, maps: LayerMaps, experts: Sequence[Weights], streams: Streams
    ) -> None:
        self.decoder, self.layer, self.maps, self.experts, self.streams = decoder, layer, maps, experts, streams
        self._children = {group.child for group in maps.groups}
        self._modules = {module for group in maps.groups for module in group.modules}
        self._passing = [_Passing() for _ in streams.batches]

    def inputs(self, group: MapGroup, number: int, merged: Weights) -> tuple[Any, ...]:
        """The arguments that the merged layer gives to a group's first module for a batch."""
        given: tuple[Any, ...] = self._run_to(group.module, number, merged)
        return given

    def targets(self, group: MapGroup, number: int) -> dict[str, Any]:
        """By module of a group: what it returns in the expert's own layer for a batch [B, S, out], or, for a mixture,
        the ``RoutedInputs`` that it is given. They can be taken once.
        """
        if self._passing[number].expert is None:
            self._run_expert(number)
        targets = self._passing[number].targets
        return {module: self._back(targets.pop(module)) for module in group.modules}

    def drift(self, module: str, number: int) -> torch.Tensor | None:
        """By how much the expert's residual stream differs from the merged model's where a module writes to it.

        It is in units of the module's output [B, S, out]; None where there is nothing to correct. In the first layer
        the embeddings' difference does not count. The merged model has run as far as the module.
        """
        if (writer := self.maps.writers.get(module)) is None:
            return None
        passing, drift = self._passing[number], None
        for source, factor in writer.before.items():
            if source != INPUT:
                own, merged = map(self._back, (passing.added[source], hidden_of(passing.outputs[source])))
            elif self.layer:
                own, merged = (self.streams.hidden(stream, number) for stream in (EXPERT, MERGED))
            else:
                continue
            part = factor / writer.factor * (own - merged)
            drift = part if drift is None else drift + part
        return drift

    def routed(self, group: MapGroup, number: int, given: Sequence[torch.Tensor]) -> RoutedInputs:
        """Which inputs of a batch's tokens go to which of a mixture's experts, without padding."""
        experts = len(self.experts[0][group.maps[0].weight])
        batch = self.streams.batches[number]
        positions = batch.unpadded(torch.arange(batch.token_ids.numel())[:, None]).flatten()
        return routed_inputs(given, experts, positions)

    def finish(self, number: int, merged: Weights) -> dict[int, torch.Tensor]:
        """Set and return the outputs [B, S, D] of a batch in both streams, once all groups are solved."""
        passing = self._passing[number]
        if passing.expert is None:
            self._run_expert(number)
        output = self._run_to(None, number, merged)
        self.streams.set_output(MERGED, number, output, passing.state)
        expert = passing.expert
        self._passing[number] = _Passing()
        assert expert is not None
        return {MERGED: output, EXPERT: self._back(expert)}

    def _run_expert(self, number: int) -> None:
        """Run the expert's layer on a batch."""
        passing, batch = self._passing[number], self.streams.batches[number]
        mixtures = {group.module: group for group in self.maps.groups if group.fused}
        run = self.decoder.run(
            self.layer,
            self.experts[batch.task],
            self.streams.hidden(EXPERT, number),
            self.streams.call(EXPERT, number),
            capture=mixtures,
            keep=self._modules,
        )
        for module in self._modules:
            mixture = mixtures.get(module)
            found = self.routed(mixture, number, run.inputs[module]) if mixture else run.outputs[module]
            passing.targets[module] = self._wait(found)
        before = {source for writer in self.maps.writers.values() for source in writer.before} - {INPUT}
        passing.added = {source: self._wait(hidden_of(run.outputs[source])) for source in before}
        passing.expert = self.streams.kept(run.output)
        self.streams.set_output(EXPERT, number, run.output, run.state)

    def _run_to(self, until: str | None, number: int, merged: Weights) -> Any:
        """Run the merged layer on, up to a module, whose arguments are returned, or to the end, for its output."""
        passing = self._passing[number]
        run = self.decoder.run(
            self.layer,
            merged,
            self.streams.hidden(MERGED, number),
            self.streams.call(MERGED, number),
            until=until,
            replay=self._back(passing.outputs),
            keep=self._modules,
        )
        passing.state |= self._wait(dict(run.state))  # a child that is replayed later passes nothing on again
        finished = self._children & set(run.outputs)
        inside = {name for name in self._modules & set(run.outputs) if not finished & {name, name.partition(".")[0]}}
        kept = {name: self._wait(run.outputs[name]) for name in finished | inside}
        before = {name: own for name, own in passing.outputs.items() if not finished & {name, name.partition(".")[0]}}
        passing.outputs = before | kept
        return run.output if until is None else run.inputs[until]

    def _wait(self, values: Any) -> Any:
        """Tensors where they wait for their next use."""
        return tree_map_only(torch.Tensor, self.streams.kept, values)

    def _back(self, values: Any) -> Any:
        """Tensors on the device that computes."""
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.decoder.device), values)
