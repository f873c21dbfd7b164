"""Solve the linear maps of one decoder layer, one group after another, on streams that stop at each group.

A layer runs once per stream and batch, although its maps become known one after another: each run goes on where the
run before it stopped. Modules that have run are not run again, their outputs are kept. Only what lies between maps
(norms, the attention's core, activations) may be computed twice.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.actmat.covariance import merge_by_covariance
from mergekit_slta.engine.loop import Progress
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, mapped
from mergekit_slta.featcal.groups import LayerMaps, MapGroup
from mergekit_slta.featcal.regression import Change, RidgeRegression
from mergekit_slta.layers.calls import State, Weights
from mergekit_slta.layers.children import is_inside
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import LinearMap, RoutedInputs, fused_hidden, routed_inputs
from mergekit_slta.models.stacks import ExpertStack, stack_of
from mergekit_slta.numerics.symmetric import with_ridge
from mergekit_slta.recipe.settings import ActmatSettings

LOG = logging.getLogger(__name__)

MERGED, EXPERT = range(2)  # the streams
# A routed expert's map is solved if so many tokens per input dimension reach it.
ENOUGH_TOKENS = 1 / 16


class Inputs(NamedTuple):
    """Tokens that reach a mixture's expert: the merged model's inputs and the task's expert's own [n, in], and each
    token's sample and weight [n].
    """

    merged: torch.Tensor
    own: torch.Tensor
    samples: torch.Tensor
    weights: torch.Tensor


@dataclass
class Coverage:
    """How the calibration samples reach the ``E`` routed experts of a mixture, and what was made of them.

    Attributes:
        tokens: [E] int64, the tokens that the merged model sends to each.
        solved: [E] bool, which are solved; the others are the anchor's.
        chosen: [T, 2] int64, for each task the choices of the expert's own router, and how many of them the merged
            model's router made too.
    """

    tokens: torch.Tensor
    solved: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def empty(cls, routed: int, tasks: int) -> Coverage:
        """Nothing counted yet."""
        counts = torch.zeros(routed, dtype=torch.int64), torch.zeros(tasks, 2, dtype=torch.int64)
        return cls(counts[0], torch.zeros(routed, dtype=torch.bool), counts[1])

    def add(self, task: int, merged: RoutedInputs, own: RoutedInputs) -> None:
        """Count the routed experts that the merged model and the task's expert choose for the same tokens."""
        count = len(self.tokens)
        self.tokens += merged.routes.flatten().bincount(minlength=count)[:count].cpu()
        routes = 1 + int(max(merged.routes.max(), own.routes.max()))  # some may lead to no expert
        theirs, choices = ((given.tokens[:, None] * routes + given.routes).flatten() for given in (merged, own))
        self.chosen[task] += torch.tensor([len(choices), int(torch.isin(choices, theirs).sum())])

    @property
    def agreement(self) -> torch.Tensor:
        """[T] float64, the share of each expert's own choices that the merged model's router makes too."""
        return self.chosen[:, 1].double() / self.chosen[:, 0]

    def __str__(self) -> str:
        solved, count = int(self.solved.sum()), len(self.solved)
        shares = ", ".join(f"{share:.0%}" for share in self.agreement.tolist())
        return (
            f"{int(self.tokens.min())} to {int(self.tokens.max())} tokens for each of {count} routed experts, "
            f"{int(self.tokens.median())} in the middle; {solved} solved and {count - solved} kept from the anchor; "
            f"the merged router makes {shares} of the experts' own choices"
        )


@dataclass
class LayerSolver:
    """One layer of a merge in the making.

    Attributes:
        decoder: the models' common decoder.
        layer: the layer's index.
        maps: the layer's groups of maps.
        anchor: the anchor's tensors by their names inside the layer.
        later: those maps among them that the anchor solves as ``actmat`` does, once their group is reached.
        known: tensors that earlier layers, which share them, have solved.
        base: the base model's.
        experts: those of the ``T`` experts.
        streams: the merged model's stream and the experts' own, before this layer.
        weights: the weights [S] of the tokens of every sample.
        ridge: how strongly the solution is drawn towards the anchor; None to choose it by left-out samples.
        by_tasks: whether it is drawn the more in a direction of the input the larger the task vectors are there, as in
            ``actmat``, so that the sums over tokens add to those that ``actmat`` takes for them.
        ranks: the processes that share the batches.
        merged: the layer's tensors; the anchor's where nothing is solved yet, or ever.
        folder: where the routed experts' matrices are while they are solved.
        stacks: these matrices, on the host, by the names of their tensors.
        coverage: by module of routed experts, how the samples reach them.
    """

    decoder: Decoder
    layer: int
    maps: LayerMaps
    anchor: dict[str, torch.Tensor]
    later: Collection[str]
    known: Weights
    base: Weights
    experts: Sequence[Weights]
    streams: Streams
    weights: Sequence[torch.Tensor]
    ridge: float | None
    by_tasks: bool
    ranks: Ranks
    folder: Path

    def __post_init__(self) -> None:
        self.merged = {**self.anchor, **self.known}
        self._children = {group.child for group in self.maps.groups}
        self._outputs: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)  # that wait, by stream and batch
        self._inputs: dict[int, torch.Tensor] = {}  # of the group that is being solved, by batch
        self._targets: dict[tuple[int, str], Any] = {}  # the expert's outputs, by batch and module
        self._final: dict[tuple[int, int], torch.Tensor] = {}
        self._handed: dict[tuple[int, int], dict[Any, torch.Tensor]] = defaultdict(dict)  # to later layers
        self._kept: list[str] = []
        self.coverage: dict[str, Coverage] = {}
        self.stacks: dict[str, torch.Tensor] = {}

    def solve(self, group: MapGroup, progress: Progress) -> None:
        """Solve the maps of ``group``, the first group that is not solved; ``progress`` is told the samples used."""
        if group.fused:
            self._solve_routed(group, progress)
        else:
            self._solve_shared(group, progress)
        if self._kept:
            LOG.warning("Layer %d: %s keep the anchor's weights", self.layer, ", ".join(self._kept))
            self._kept = []

    def output(self, stream: int, number: int) -> tuple[torch.Tensor, State]:
        """What the layer, once it is solved, makes of a batch [B, S, D] and hands to later layers."""
        if (stream, number) not in self._final:
            weights = self.merged if stream == MERGED else self.experts[self.streams.batches[number].task]
            self._go_on(stream, number, weights, None)
        return self._final.pop((stream, number)), self._handed.pop((stream, number), {})

    # Maps with one input

    def _solve_shared(self, group: MapGroup, progress: Progress) -> None:
        equations = self._equations(group.maps, self.streams.tokens)
        for task, expert in enumerate(self.experts):
            for number, batch in self.streams.batches_of(task):
                targets = self._targets_of(group, number)
                given = self._merged_inputs(group, number)[0]
                if group.empty is not None:
                    self._inputs[number] = self.streams.kept(given)
                inputs = batch.unpadded(given)
                residuals = torch.cat([batch.unpadded(targets[linear_map.module]) for linear_map in group.maps], 1)
                self._subtract(group.maps, expert, inputs, residuals)
                equations.add(inputs, residuals, batch.samples, batch.join(self.weights))
                progress(len(batch.rows))
            equations.finish_task()
        change = equations.solve()
        del equations  # its memory is needed
        self._apply(group.maps, change)
        self._forget_targets(group)
        if group.empty is not None:
            self._close(group)

    def _close(self, group: MapGroup) -> None:
        """Compute what a child returns from the inputs of its last map, so that it need not run again."""
        for number in list(self._inputs):
            inputs = self._inputs.pop(number).to(self.decoder.device)
            output = self.streams.kept(group.maps[0].apply(self.merged, inputs))
            done = self._outputs[MERGED, number]
            for name in [name for name in done if is_inside(name, {group.child})]:
                del done[name]
            done[group.child] = (output, *[None] * group.empty) if group.empty else output

    def _subtract(
        self, maps: Sequence[LinearMap], expert: Weights, inputs: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Turn the maps' outputs in the expert's own stream [n, out], biases included, into residuals, in place."""
        start = 0
        for linear_map in maps:
            anchor = linear_map.matrix(self.merged)
            part = outputs[:, start : start + len(anchor)]
            if (offset := linear_map.offset(expert)) is not None:
                part -= offset
            part.addmm_(inputs, anchor.T, alpha=-1)
            start += len(anchor)

    def _equations(self, maps: Sequence[LinearMap], tokens: int) -> RidgeRegression:
        """The equations of maps of one input, before their anchor is used."""
        sizes = [linear_map.matrix(self.merged).shape for linear_map in maps]
        return RidgeRegression(
            sizes[0][1],
            sum(rows for rows, _ in sizes),
            self.ridge,
            self.decoder.device,
            tokens=tokens,
            ranks=self.ranks,
            prior=self._prior(maps) if self.by_tasks else None,
        )

    def _prior(self, maps: Sequence[LinearMap]) -> torch.Tensor | None:
        """The system of ``actmat`` for maps of one input, with a unit mean diagonal; None if no expert changed them.

        Maps that the anchor solves with that system are solved with it here.
        """
        size, ridge = maps[0].matrix(self.base).shape[1], ActmatSettings().ridge
        total = torch.zeros(size, size, dtype=torch.float64, device=self.decoder.device)
        for linear_map in maps:
            base = linear_map.matrix(self.base)
            found = merge_by_covariance([linear_map.matrix(expert) - base for expert in self.experts], ridge)
            total += found.covariance
            if linear_map.weight in self.later:
                self.anchor[linear_map.weight] = linear_map.stored(base + found.change.to(base.dtype))
                self.merged[linear_map.weight] = self.anchor[linear_map.weight]
        if not total.any():
            return None
        system = with_ridge(total, ridge)
        return system.div_(system.diagonal().mean())

    # Routed experts

    def _solve_routed(self, group: MapGroup, progress: Progress) -> None:
        """Solve a mixture's experts one by one, each on the tokens that the merged model sends to it."""
        given: dict[int, tuple[RoutedInputs, torch.Tensor]] = {}
        routed = sorted({m.expert for m in group.maps if m.expert is not None})
        coverage = Coverage.empty(len(routed), len(self.experts))
        for number, batch in enumerate(self.streams.batches):
            own: Any = self._targets_of(group, number)[group.module]
            merged = self._routed(group, number, self._merged_inputs(group, number))
            coverage.add(batch.task, merged, own)
            given[number] = tree_map_only(torch.Tensor, self.streams.kept, (merged, _at_places_of(merged, own)))
            progress(len(batch.rows))
        self._forget_targets(group)
        for name in {name for m in group.maps for name in (m.weight, m.bias) if name}:
            self._make_writable(name)
        for index in routed:
            first, down = (m for m in group.maps if m.expert == index)
            reaching = functools.partial(self._reaching, given, index)
            tokens = sum(int((merged.routes == index).any(-1).sum()) for merged, _ in given.values())
            solved = self._solve_routed_map(first, reaching, tokens)
            solved &= self._solve_routed_map(down, functools.partial(self._hidden, first, reaching), tokens)
            coverage.solved[index] = solved
        self.ranks.sum(coverage.tokens)
        self.ranks.sum(coverage.chosen)
        self.coverage[group.module] = coverage
        LOG.info("Layer %d, %s: %s", self.layer, group.module, coverage)

    def _routed(self, group: MapGroup, number: int, given: Sequence[torch.Tensor]) -> RoutedInputs:
        """Which inputs of a batch's tokens go to which routed expert, without padding."""
        batch = self.streams.batches[number]
        positions = batch.unpadded(torch.arange(batch.token_ids.numel())[:, None]).flatten()
        return routed_inputs(given, len(self.merged[group.maps[0].weight]), positions)

    def _make_writable(self, name: str) -> None:
        """Copy a tensor of routed experts: matrices one by one to a mapped temporary file."""
        before = self.merged[name]
        if not isinstance(before, ExpertStack):
            self.merged[name] = before.clone()
            return
        self.stacks[name] = in_a_file(before, self.folder)
        self.merged[name] = stack_of(self.stacks[name], self.decoder.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer's tensors, as they can be written to a file."""
        for name, tensor in self.merged.items():
            if isinstance(tensor, ExpertStack) and name not in self.stacks:
                self._make_writable(name)
        return {**self.merged, **self.stacks}

    def _solve_routed_map(
        self, linear_map: LinearMap, inputs_of: Callable[[int], Iterator[Inputs]], tokens: int
    ) -> bool:
        """Solve one map from this process's tokens by task; returns whether it is solved, rather than the anchor's."""
        equations, columns = self._equations([linear_map], tokens), linear_map.matrix(self.merged).shape[1]
        for task, expert in enumerate(self.experts):
            for merged, own, samples, weights in inputs_of(task):
                residuals = own @ linear_map.matrix(expert).T - merged @ linear_map.matrix(self.merged).T
                equations.add(merged, residuals, samples, weights)
            equations.finish_task()
        if equations.tokens < ENOUGH_TOKENS * columns:
            self._kept.append(f"{linear_map.name} ({equations.tokens} tokens)")
            return False
        return self._apply([linear_map], equations.solve())

    def _reaching(self, given: dict[int, tuple[RoutedInputs, torch.Tensor]], index: int, task: int) -> Iterator[Inputs]:
        """The inputs at the tokens that go to a mixture's expert."""
        for number, batch in self.streams.batches_of(task):
            merged, own = given[number]
            reached = (merged.routes == index).any(-1)
            if reached.any():
                values, own_values, tokens = (
                    part[reached.to(part.device)] for part in (merged.values, own, merged.tokens)
                )
                device, tokens = self.decoder.device, tokens.cpu()
                weights = batch.join(self.weights)[tokens]
                yield Inputs(values.to(device), own_values.to(device), batch.samples[tokens], weights)

    def _hidden(self, first: LinearMap, reaching: Callable[[int], Iterator[Inputs]], task: int) -> Iterator[Inputs]:
        """What a mixture's expert feeds to its down projection, in the merged model and in the task's own expert."""
        module = self.decoder.layers[self.layer].get_submodule(first.module)
        for inputs in reaching(task):
            yield inputs._replace(
                merged=fused_hidden(module, first.apply(self.merged, inputs.merged)),
                own=fused_hidden(module, first.apply(self.experts[task], inputs.own)),
            )

    # The solution

    def _apply(self, maps: Sequence[LinearMap], change: Change) -> bool:
        """Put the maps' new tensors in place; returns whether there are any."""
        names = ", ".join(linear_map.name for linear_map in maps)
        LOG.info("Layer %d: %s solved with a ridge of %s", self.layer, names, change.ridge)
        if change.ridge is None:
            self._kept.append(f"{names} (no solution at any ridge)")
            return False
        if change.enlarged:
            LOG.warning("Layer %d: %s needed a ridge of %g", self.layer, names, change.ridge)
        start = 0
        for linear_map in maps:
            anchor = linear_map.matrix(self.merged)
            rows = slice(start, start + len(anchor))
            matrix = (anchor + change.matrix[rows]).to(anchor.dtype)
            if linear_map.expert is not None:
                linear_map.matrix(self.merged | self.stacks).copy_(matrix)
            else:
                self.merged[linear_map.weight] = linear_map.stored(matrix)
            if linear_map.bias is not None:
                own = torch.stack([linear_map.offset(expert) for expert in self.experts])  # type: ignore[misc]
                offset = change.offset(linear_map.offset(self.merged), own, rows)  # type: ignore[arg-type]
                if linear_map.expert is not None:
                    self.merged[linear_map.bias][linear_map.expert] = offset
                else:
                    self.merged[linear_map.bias] = offset
            start = rows.stop
        return True

    # The streams

    def _merged_inputs(self, group: MapGroup, number: int) -> tuple[Any, ...]:
        """What the merged model gives to a group."""
        return self._go_on(MERGED, number, self.merged, group.module)[group.module]

    def _targets_of(self, group: MapGroup, number: int) -> dict[str, Any]:
        """What the expert's modules of a group return for a batch [B, S, out]; for routed experts, what they get."""
        if (number, group.module) not in self._targets:
            self._run_expert(group.child, number)
        return {
            module: tree_map_only(torch.Tensor, self._to_device, self._targets[number, module])
            for module in group.modules
        }

    def _forget_targets(self, group: MapGroup) -> None:
        for number in range(len(self.streams.batches)):
            for module in group.modules:
                self._targets.pop((number, module), None)

    def _run_expert(self, child: str, number: int) -> None:
        """Run the expert's layer through one child, which is as far as the group's targets reach."""
        groups = self.maps.groups
        following = max(index for index, group in enumerate(groups) if group.child == child) + 1
        until = groups[following].module if following < len(groups) else None
        here = [group for group in groups if group.child == child]
        routed = {group.module: group for group in here if group.fused}
        weights = self.experts[self.streams.batches[number].task]
        found = self._go_on(EXPERT, number, weights, until, capture=routed)
        for module in (module for group in here for module in group.modules):
            if module in routed:
                found[module] = self._routed(routed[module], number, found[module])
            self._targets[number, module] = tree_map_only(torch.Tensor, self.streams.kept, found[module])

    def _go_on(
        self, stream: int, number: int, weights: Weights, until: str | None, capture: Collection[str] = ()
    ) -> dict[str, Any]:
        """Run a stream's layer on, up to a module or to the end.

        Returns:
            By module: what ``until`` and those in ``capture`` are given, and what the groups' other modules that ran
            returned.
        """
        done = self._outputs[stream, number]
        modules = {module for group in self.maps.groups for module in group.modules}
        closing = {group.child for group in self.maps.groups if group.empty is not None and group.module == until}
        passage = self.decoder.run(
            self.layer,
            weights,
            self.streams.hidden(stream, number),
            self.streams.call(stream, number),
            until=until,
            replay=tree_map_only(torch.Tensor, self._to_device, done),
            capture=capture,
            keep=modules,
            copy=self.maps.changed,
        )
        if passage.state:  # a child that is replayed later hands nothing on again
            self._handed[stream, number] |= tree_map_only(torch.Tensor, self.streams.kept, passage.state)
        finished = self._children & set(passage.outputs)
        inside = {name for name in modules & set(passage.outputs) if not is_inside(name, finished | closing)}
        for name in finished | inside:
            done[name] = tree_map_only(torch.Tensor, self.streams.kept, passage.outputs[name])
        for name in [name for name in done if name not in finished and is_inside(name, finished)]:
            del done[name]
        if passage.output is not None:
            self._final[stream, number] = self.streams.kept(passage.output)
            del self._outputs[stream, number]
        return passage.outputs | passage.inputs

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.decoder.device)


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
    """A copy of a mixture's matrices in a mapped temporary file."""
    copy = mapped(stack.shape, stack.dtype, folder)
    for expert in range(len(copy)):
        copy[expert] = stack[expert]
    return copy
