"""Solve one layer of a merge, one group of linear maps after another."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.actmat.covariance import covariance, merge_by_covariance
from mergekit_slta.engine.accumulator import Progress
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.featcal.groups import MapGroup
from mergekit_slta.featcal.passage import LayerPassage
from mergekit_slta.featcal.regression import Change, RidgeRegression
from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.maps import LinearMap, RoutedInputs, fused_hidden
from mergekit_slta.models.stacks import ExpertStack, stack_of
from mergekit_slta.numerics.symmetric import with_ridge
from mergekit_slta.recipe.settings import ActmatSettings

LOG = logging.getLogger(__name__)

# How far the point that a matrix stays near is from the base model, in units of the anchor's distance: the anchor is a
# mean of changes that are larger, each in the directions of its own task.
BEYOND = 1.5
# The share of the drift that each map which writes to the residual stream corrects.
DRIFT = 0.5
# A routed expert's map is solved if this many tokens per input dimension reach it.
ENOUGH_TOKENS = 1 / 16


class Tokens(NamedTuple):
    """Tokens of one task that reach some maps.

    Attributes:
        inputs: the merged model's [n, in].
        outputs: what the expert's own maps return, without their biases [n, out].
        samples, weights: each token's sample and weight [n].
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    samples: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Setting:
    """How a merge solves its maps.

    Attributes:
        ridge: how strongly the solution is drawn towards W_n of ``merge.py``; None to choose it by left-out samples.
        counts: how much each task counts: 1 for an expert's, kappa for the base model's.
        weights: the weights [S] of the tokens of every sample.
        ranks: the processes that share the batches.
        folder: where the matrices of a mixture's experts are while they are solved.
    """

    ridge: float | None
    counts: Sequence[float]
    weights: Sequence[torch.Tensor]
    ranks: Ranks
    folder: Path


class LayerMerge:
    """One layer of a merge in the making.

    Args:
        passage: takes the samples through the layer.
        base, anchor: the layer's tensors of the base model and of the anchor.
        later: the weights that the anchor still has to solve as ``actmat`` does, when their group is solved.
        setting: how maps are solved.

    Attributes:
        merged: the layer's tensors; the anchor's where nothing is solved yet, or ever.
        ridges: the ridges that the maps were solved with.
    """

    def __init__(
        self, passage: LayerPassage, base: Weights, anchor: Weights, later: Collection[str], setting: Setting
    ) -> None:
        self.passage, self.experts, self.setting = passage, passage.experts, setting
        self.base, self._later = base, later
        self.merged = {**anchor}
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

        self._solve(group.maps, [tokens_of(*own) for own in enumerate(self.experts)], streams.tokens)

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
            reaching = [list(self._reaching(given, index, task)) for task in range(len(self.experts))]
            self._solve_reached(first, reaching)
            hidden = []
            for tokens, expert in zip(reaching, self.experts, strict=True):
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
            for tokens, expert in zip(reaching, self.experts, strict=True)
        ]
        self._solve([linear_map], tasks, sum(len(tokens.inputs) for task in tasks for tokens in task))

    def _solve(self, maps: Sequence[LinearMap], tasks: Iterable[Iterable[Tokens]], expected: int) -> None:
        """Put new tensors of maps of one input in place, if there are any."""
        names, layer = ", ".join(linear_map.name for linear_map in maps), self.passage.layer
        prior = self._prior(maps)
        base, anchor = (torch.cat([own.matrix(model) for own in maps]) for model in (self.base, self.merged))
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
        for name, tensor in changed(maps, near, change, self.merged, self.experts).items():
            if expert is None:
                self.merged[name] = tensor
            else:
                (self.merged | self._stacks)[name][expert] = tensor

    def _prior(self, maps: Sequence[LinearMap]) -> torch.Tensor | None:
        """The system [in, in] of ``actmat`` for maps of one input, with a unit mean diagonal; None if none is changed.

        The anchor's maps that are solved with it take their place.
        """
        ridge, size = ActmatSettings().ridge, maps[0].matrix(self.base).shape[1]
        total = torch.zeros(size, size, dtype=torch.float64, device=self.passage.decoder.device)
        for linear_map in maps:
            base = linear_map.matrix(self.base)
            tasks = [linear_map.matrix(expert) - base for expert in self.experts]
            if linear_map.weight in self._later:
                found = merge_by_covariance(tasks, ridge, self.setting.counts)
                self.merged[linear_map.weight] = linear_map.stored(base + found.change.to(base.dtype))
                total += found.covariance
            else:
                for task in tasks:
                    total += covariance(task)
        if not total.any():
            return None
        system = with_ridge(total, ridge)
        return system.div_(system.diagonal().mean())

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


def solve_maps(
    near: torch.Tensor,
    tasks: Iterable[Iterable[Tokens]],
    setting: Setting,
    *,
    expected: int,
    prior: torch.Tensor | None = None,
    least: float = 0,
) -> Change | int:
    """The change of a matrix [out, in] that the solution stays near, or how many tokens there are if too few.

    Args:
        near: the matrix; maps of one input are stacked.
        tasks: for each task, this process's tokens.
        setting: how maps are solved.
        expected: how many tokens this process has.
        prior: as for ``RidgeRegression``.
        least: how many tokens all processes need.
    """
    outputs, inputs = near.shape
    regression = RidgeRegression(
        inputs, outputs, setting.ridge, near.device, prior=prior, tokens=expected, ranks=setting.ranks
    )
    for task, count in zip(tasks, setting.counts, strict=True):
        for tokens in task:
            residuals = torch.addmm(tokens.outputs, tokens.inputs, near.T, alpha=-1)
            regression.add(tokens.inputs, residuals, tokens.samples, tokens.weights)
        regression.finish_task(count)
    return regression.solve() if regression.tokens >= least else regression.tokens


def changed(
    maps: Sequence[LinearMap], near: torch.Tensor, change: Change, merged: Weights, experts: Sequence[Weights]
) -> dict[str, torch.Tensor]:
    """The maps' new tensors by their names in the layer; for an expert of a mixture, its part of them."""
    found, start = {}, 0
    for linear_map in maps:
        rows = slice(start, start + len(linear_map.matrix(merged)))
        found[linear_map.weight] = linear_map.stored((near[rows] + change.matrix[rows]).to(near.dtype))
        if (offset := linear_map.offset(merged)) is not None:
            own = torch.stack([linear_map.offset(expert) for expert in experts])  # type: ignore[misc]
            found[str(linear_map.bias)] = change.offset(offset, own, rows)
        start = rows.stop
    return found
