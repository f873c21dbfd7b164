"""Solve one layer of a merge, one group of linear maps after another."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.engine.accumulator import Progress
from mergekit_slta.featcal.groups import MapGroup
from mergekit_slta.featcal.passage import LayerPassage
from mergekit_slta.featcal.solving import LayerTensors, Setting, Tokens, changed, prior_of, solve_maps
from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.maps import LinearMap, RoutedInputs, fused_hidden
from mergekit_slta.models.stacks import ExpertStack, stack_of

LOG = logging.getLogger(__name__)

# How far the point that a matrix stays near is from the base model, in units of the anchor's distance: the anchor is a
# mean of changes that are larger, each in the directions of its own task.
BEYOND = 1.5
# The share of the drift that each map which writes to the residual stream corrects.
DRIFT = 0.5
# A routed expert's map is solved if this many tokens per input dimension reach it.
ENOUGH_TOKENS = 1 / 16


class LayerMerge:
    """One layer of a merge in the making.

    Args:
        passage: takes the samples through the layer.
        models: the layer's tensors of the base model, the experts and the anchor.
        setting: how maps are solved.

    Attributes:
        merged: the layer's tensors; the anchor's where nothing is solved yet, or ever.
        ridges: the ridges that the maps were solved with.
    """

    def __init__(self, passage: LayerPassage, models: LayerTensors, setting: Setting) -> None:
        self.passage, self.models, self.setting = passage, models, setting
        self.merged = {**models.anchor}
        self._stacks: dict[str, torch.Tensor] = {}  # the matrices of routed experts, on the host
        self.ridges: list[float] = []
        self._kept: list[str] = []  # why maps of the group that is being solved keep the anchor's weights

    def solve(self, group: MapGroup, progress: Progress) -> None:
        """Solve the maps of ``group``, the first group that is not solved; ``progress`` is told the samples used."""
        (self._solve_routed if group.fused else self._solve_together)(group, progress)
        if self._kept:
            LOG.warning("Layer %d: %s keep the anchor's weights", self.passage.layer, ", ".join(self._kept))
            self._kept = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer's tensors, as they can be written to a file."""
        for name, tensor in self.merged.items():
            if isinstance(tensor, ExpertStack) and name not in self._stacks:
                self._make_writable(name)
        return {**self.merged, **self._stacks}

    def _solve_together(self, group: MapGroup, progress: Progress) -> None:
        """Solve maps of one input."""
        streams = self.passage.streams

        def tokens_of(task: int, expert: Weights) -> Iterator[Tokens]:
            for number, batch in streams.batches_of(task):
                targets = self.passage.targets(group, number)
                inputs = batch.unpadded(self.passage.inputs(group, number, self.merged)[0])
                outputs = []
                for linear_map in group.maps:
                    output, offset = batch.unpadded(targets[linear_map.module]), linear_map.offset(expert)
                    if (drift := self.passage.drift(linear_map.module, number)) is not None:
                        output = output + DRIFT * batch.unpadded(drift)
                    outputs.append(output if offset is None else output - offset)
                yield Tokens(inputs, torch.cat(outputs, 1), batch.samples, batch.join(self.setting.weights))
                progress(len(batch.rows))

        self._solve(group.maps, [tokens_of(*own) for own in enumerate(self.models.experts)], streams.tokens)

    def _solve_routed(self, group: MapGroup, progress: Progress) -> None:
        """Solve a mixture's experts one by one, each on the tokens that the merged model sends to it."""
        passage, given = self.passage, dict[int, tuple[RoutedInputs, torch.Tensor]]()
        routed = sorted({m.expert for m in group.maps if m.expert is not None})
        for number, batch in enumerate(passage.streams.batches):
            own: RoutedInputs = passage.targets(group, number)[group.module]
            merged = passage.routed(group, number, passage.inputs(group, number, self.merged))
            kept = passage.streams.kept
            given[number] = tree_map_only(torch.Tensor, kept, (merged, _at_places_of(merged, own)))
            progress(len(batch.rows))
        for name in {name for m in group.maps for name in (m.weight, m.bias) if name}:
            self._make_writable(name)
        module = passage.decoder.layers[passage.layer].get_submodule(group.module)
        for index in routed:
            first, down = (m for m in group.maps if m.expert == index)
            # By task: the merged model's inputs, the expert's own, and each token's sample and weight.
            reaching = [list(self._reaching(given, index, task)) for task in range(len(self.models.experts))]
            self._solve_reached(first, reaching)
            hidden = []
            for tokens, expert in zip(reaching, self.models.experts, strict=True):
                pairs = [(first.apply(self.merged, x), first.apply(expert, own), rest) for x, own, *rest in tokens]
                hidden.append([(fused_hidden(module, x), fused_hidden(module, own), *rest) for x, own, rest in pairs])
            self._solve_reached(down, hidden)

    def _reaching(self, given: Mapping[int, tuple[RoutedInputs, torch.Tensor]], index: int, task: int) -> Iterator[Any]:
        """The merged model's inputs and the expert's own [n, in] that go to a mixture's expert, samples and weights."""
        for number, batch in self.passage.streams.batches_of(task):
            merged, own = given[number]
            reached = (merged.routes == index).any(-1)
            parts = (part[reached.to(part.device)] for part in (merged.values, own, merged.tokens))
            values, own_values, tokens = (part.to(self.passage.decoder.device) for part in parts)
            weights = batch.join(self.setting.weights)[tokens.cpu()]
            yield values, own_values, batch.samples[tokens.cpu()], weights

    def _solve_reached(self, linear_map: LinearMap, reaching: Sequence[Sequence[Any]]) -> None:
        """Solve one map of a mixture's expert on the tokens of every task that reach it."""
        tasks = [
            [Tokens(x, own @ linear_map.matrix(expert).T, *rest) for x, own, *rest in tokens]
            for tokens, expert in zip(reaching, self.models.experts, strict=True)
        ]
        self._solve([linear_map], tasks, sum(len(tokens.inputs) for task in tasks for tokens in task))

    def _solve(self, maps: Sequence[LinearMap], tasks: Iterable[Iterable[Tokens]], expected: int) -> None:
        """Put new tensors of maps of one input in place, if there are any."""
        names, layer = ", ".join(linear_map.name for linear_map in maps), self.passage.layer
        prior, anchors = prior_of(maps, self.models, self.setting.counts)
        self.models.anchor.update(anchors)
        self.merged.update(anchors)
        base, anchor = (torch.cat([own.matrix(model) for own in maps]) for model in (self.models.base, self.merged))
        near, expert = torch.lerp(base, anchor, BEYOND), maps[0].expert
        least = 0 if expert is None else ENOUGH_TOKENS * near.shape[1]
        change = solve_maps(near, tasks, self.setting, expected=expected, prior=prior, least=least)
        if isinstance(change, int):
            self._kept.append(f"{names} ({change} tokens)")
            return
        LOG.info("Layer %d: %s solved with a ridge of %s", layer, names, change.ridge)
        if change.ridge is None:
            self._kept.append(f"{names} (their inputs are not finite)")
            return
        self.ridges.append(change.ridge)
        for name, tensor in changed(maps, near, change, self.merged, self.models.experts).items():
            if expert is None:
                self.merged[name] = tensor
            else:
                (self.merged | self._stacks)[name][expert] = tensor

    def _make_writable(self, name: str) -> None:
        """Copy a tensor of routed experts: matrices one by one to a mapped temporary file."""
        before = self.merged[name]
        if not isinstance(before, ExpertStack):
            self.merged[name] = before.clone()
            return
        self._stacks[name] = in_a_file(before, self.setting.folder)
        self.merged[name] = stack_of(self._stacks[name], self.passage.decoder.device)


def _at_places_of(merged: RoutedInputs, own: RoutedInputs) -> torch.Tensor:
    """An expert's own inputs [m, D] where the merged model has its inputs to the routed experts.

    Where each routed expert has inputs of its own, the task's expert may have none in some of these places, because
    its own router sends the token elsewhere. The merged model's stand there.
    """
    found = torch.full((int(max(merged.places.max(), own.places.max())) + 1,), -1, device=own.places.device)
    found[own.places] = torch.arange(len(own.places), device=own.places.device)
    at = found[merged.places]
    return torch.where((at >= 0)[:, None], own.values[at], merged.values)


def in_a_file(stack: ExpertStack, folder: Path) -> torch.Tensor:
    """A copy of a mixture's matrices in a mapped temporary file of a folder, whose space is freed with the tensor."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(stack.numel() * stack.dtype.itemsize)
        copy = torch.from_file(file.name, shared=True, size=stack.numel(), dtype=stack.dtype).view(stack.shape)
    for expert in range(len(copy)):
        copy[expert] = stack[expert]
    return copy
