"""A batch on its way through a layer: the merged model's run, from one group of maps to the next, and the expert's own.

The layer runs once on each stream, although the merged maps become known one after another: every run goes on where the
run before it stopped. Modules that have run are not run again, their outputs are kept. Only what lies between maps
(norms, the attention's core, activations) may be computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.engine.streams import Streams
from mergekit_slta.featcal.groups import LayerMaps, MapGroup
from mergekit_slta.layers.decoder import INPUT, hidden_of
from mergekit_slta.layers.maps import RoutedInputs, Weights, routed_inputs

MERGED, EXPERT = range(2)  # the streams


class Passage:
    """Runs the expert's layer on one batch, and then the merged layer, which is solved group by group.

    Args:
        streams: the merged model's stream and the experts' own, before this layer.
        number: the batch's number.
        maps: the layer's groups of maps.
        expert: the layer's tensors of the model whose task the batch is of.
    """

    def __init__(self, streams: Streams, number: int, maps: LayerMaps, expert: Weights) -> None:
        self.streams, self.number, self.maps = streams, number, maps
        self.batch = streams.batches[number]
        self._children = {group.child for group in maps.groups}
        self._modules = {module for group in maps.groups for module in group.modules}
        # What modules of the merged layer have returned, by their paths, and what it passes to later layers.
        self._outputs: dict[str, Any] = {}
        self._state: dict[Any, torch.Tensor] = {}
        mixtures = {group.module: group for group in maps.groups if group.fused}
        run = streams.decoder.run(
            streams.layer,
            expert,
            streams.hidden(EXPERT, number),
            streams.call(EXPERT, number),
            capture=mixtures,
            keep=self._modules,
        )
        streams.set_output(EXPERT, number, run.output, run.state)
        targets = {
            module: self._routed(mixtures[module], run.inputs[module]) if module in mixtures else run.outputs[module]
            for module in self._modules
        }
        before = {source for writer in maps.writers.values() for source in writer.before} - {INPUT}
        added = {source: hidden_of(run.outputs[source]) for source in before}
        # Of the expert's layer: what modules have returned (a mixture's, what it was given), the outputs of children
        # that have written to the residual stream before a writer does, and the layer's own.
        self._targets, self._added, self._expert_output = self._wait((targets, added, run.output))

    def inputs(self, group: MapGroup, merged: Weights) -> tuple[Any, ...]:
        """The arguments that the merged layer gives to a group's first module."""
        given: tuple[Any, ...] = self._run_to(group.module, merged)
        return given

    def targets(self, group: MapGroup) -> dict[str, Any]:
        """By module of a group: what it returns in the expert's own layer [B, S, out], or, for a mixture, the
        ``RoutedInputs`` that it is given. They can be taken once.
        """
        return {module: self._back(self._targets.pop(module)) for module in group.modules}

    def drift(self, module: str) -> torch.Tensor | None:
        """By how much the expert's residual stream differs from the merged model's where a module writes to it.

        It is in units of the module's output [B, S, out]; None where there is nothing to correct. In the first layer
        the embeddings' difference does not count. The merged model has run as far as the module.
        """
        if (writer := self.maps.writers.get(module)) is None:
            return None
        drift = None
        for source, factor in writer.before.items():
            if source != INPUT:
                kept = self._added[source], hidden_of(self._outputs[source])
                expert, merged = map(self._back, kept)
            elif self.streams.layer:
                expert, merged = (self.streams.hidden(stream, self.number) for stream in (EXPERT, MERGED))
            else:
                continue
            part = factor / writer.factor * (expert - merged)
            drift = part if drift is None else drift + part
        return drift

    def routed(self, group: MapGroup, merged: Weights) -> tuple[RoutedInputs, torch.Tensor]:
        """What the merged layer gives to a mixture's experts, and what the expert's layer gives in the same places."""
        inputs, targets = self._routed(group, self.inputs(group, merged)), self.targets(group)[group.module]
        routed: tuple[RoutedInputs, torch.Tensor] = self._wait((inputs, _at_places_of(inputs, targets)))
        return routed

    def _routed(self, group: MapGroup, given: Sequence[torch.Tensor]) -> RoutedInputs:
        """Which inputs of the batch's tokens go to which of a mixture's experts, without padding."""
        experts = len({linear_map.expert for linear_map in group.maps})
        positions = self.batch.unpadded(torch.arange(self.batch.token_ids.numel())[:, None]).flatten()
        return routed_inputs(given, experts, positions)

    def finish(self, merged: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """Set and return the layer's outputs [B, S, D] in both streams, once all groups are solved."""
        output = self._run_to(None, merged)
        self.streams.set_output(MERGED, self.number, output, self._state)
        return output, self._back(self._expert_output)

    def _run_to(self, until: str | None, merged: Weights) -> Any:
        """Run the merged layer on, up to a module, whose arguments are returned, or to the end, for its output."""
        run = self.streams.decoder.run(
            self.streams.layer,
            merged,
            self.streams.hidden(MERGED, self.number),
            self.streams.call(MERGED, self.number),
            until=until,
            replay=self._back(self._outputs),
            keep=self._modules,
        )
        self._state |= self._wait(dict(run.state))  # a child that is replayed later passes nothing on again
        finished = self._children & set(run.outputs)
        outside = {name for name in (*self._modules, *self._outputs) if not finished & {name, name.partition(".")[0]}}
        before = {name: output for name, output in self._outputs.items() if name in outside}
        inside = self._modules & set(run.outputs) & outside
        self._outputs = before | {name: self._wait(run.outputs[name]) for name in finished | inside}
        return run.output if until is None else run.inputs[until]

    def _wait(self, values: Any) -> Any:
        """Tensors where they wait for their next use."""
        return tree_map_only(torch.Tensor, self.streams.kept, values)

    def _back(self, values: Any) -> Any:
        """Tensors on the device that computes."""
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.streams.decoder.device), values)


def _at_places_of(merged: RoutedInputs, expert: RoutedInputs) -> torch.Tensor:
    """An expert's inputs [m, D] where the merged model has its inputs to the routed experts.

    Where each routed expert has inputs of its own, the task's expert may have none in some of these places, because
    its own router sends the token elsewhere. The merged model's stand there.
    """
    index = torch.full((int(max(merged.places.max(), expert.places.max())) + 1,), -1, device=expert.places.device)
    index[expert.places] = torch.arange(len(expert.places), device=expert.places.device)
    at = index[merged.places]
    return torch.where((at >= 0)[:, None], expert.values[at], merged.values)
