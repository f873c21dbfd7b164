"""featcal: every linear map by least squares, layer by layer in the order of the forward pass.

After RegMean++ and FeatCal (arXiv 2605.13030). The anchor is the merge by ``actmat``, a method that needs no data
(``anchor.py``); the solution stays near a point beyond it. ``model.py`` has the start, which loads the
samples' token ids, and the end, which gives mergekit each tensor from the folder of solved layers.

Each sample of task t is in two hidden-state streams: the merged model's, and expert t's own. The engine's loop brings
both to a layer; then

1. the merged layer starts as the anchor's (maps that will be solved become the anchor's with their group);
2. for each group of maps that read the same input, in the order in which they feed each other: the merged stream runs
   as far as the group, the group is solved, and the layer takes the solution;
3. the layer's outputs are set on both streams, and its tensors are written.

The output head comes last. A map of a group, with inputs x of the merged stream and x_t of expert t's, base model's
W_0, anchor W_a, and expert t's own W_t and b_t, becomes

    W = argmin  sum_t s_t sum_x w_x |W x - y_t|^2 + ridge * trace(D H D^T),   y_t = W_t x_t + d_t / 2
    D = W - W_n,  W_n = W_0 + 3/2 (W_a - W_0)       (for the head W_n = W_a)
    b = b_a + (m - b_a) / (1 + ridge^2),  m the mean of b_t + y_t - W x over all tokens, weighted by s_t w_x

For a map that adds to the residual stream (a ``Writer`` of ``groups.py``), d_t is what expert t's stream has before
the map and the merged model's lacks, so that the map corrects half of what the maps before it have missed; for other
maps it is zero. A mixture's routed experts are solved one by one, each on the tokens that the merged model sends to it.

The base model may have a task too, whose prompts are to be answered as it does: it is one more expert, whose task
vector is zero and whose influence is multiplied by kappa, in s_t as in every mean over the experts.

``regression.py`` defines s_t, H and the bias (``Change.offset``), ``model.py`` the weights w_x. H is built from the
matrix of the system that ``actmat`` solves, so that a few prompts change a map mostly in directions that their tokens
cover. Unless a recipe gives the ridge, held-out samples choose it for every group.

This differs from FeatCal in five points: a map is solved on inputs that are computed with the maps already solved in
its layer; it corrects what earlier maps have missed; tasks and answers have weights; held-out samples choose the ridge;
the output head is solved, too. Norms, embeddings, convolutions and routers are the anchor's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.engine.loop import LayerMethod, Progress, Tensors, pass_layers
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Source, Streams, Tasks, read_edges
from mergekit_slta.featcal.anchor import ActmatAnchor, in_a_file
from mergekit_slta.featcal.groups import SHARED, LayerMaps, MapGroup, groups_by_layer, kept_in_words
from mergekit_slta.featcal.regression import RidgeRegression
from mergekit_slta.layers.calls import head_input, tail_tensors
from mergekit_slta.layers.decoder import INPUT, Decoder, hidden_of
from mergekit_slta.layers.maps import LinearMap, RoutedInputs, fused_hidden, is_numbered, routed_inputs
from mergekit_slta.models.checkpoint import ExpertStack, Weights, stack_of

LOG = logging.getLogger(__name__)
MERGED, EXPERT = range(2)  # the streams

# How far W_n is from the base model, in units of the anchor's distance: the anchor is a mean of changes that are
# larger, each in the directions of its own task.
BEYOND = 1.5
# The share of the drift that each map which writes to the residual stream corrects.
DRIFT = 0.5
# A routed expert's map is solved if this many tokens per input dimension reach it.
ENOUGH_TOKENS = 1 / 16
# The sums of the head's rows have at most this number of elements at once; a larger head is solved in parts.
HEAD_ELEMENTS = 2**26
# In a layer's file beside its tensors: its relative error by task [T], and the ridges [n] of what was solved in it.
LAYER_ERRORS, LAYER_RIDGES = "error.merged", "error.ridges"

Owner = TypeVar("Owner")
# Of n tokens that reach some maps: the merged model's inputs [n, in], what the task's own maps return for their own
# inputs, without biases [n, out], and each token's sample and weight [n].
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def feature_merge(
    decoder: Decoder,
    anchor: ActmatAnchor,
    tasks: Tasks,
    partial: Partial,
    *,
    weights: Sequence[torch.Tensor] | None = None,
    ridge: float | None = None,
    head: LinearMap | None,
    ranks: Ranks | None = None,
    progress: Callable[[str, int], object] = lambda stage, samples: None,
) -> None:
    """Solve every linear map, layer by layer, and write each layer's tensors when it is finished.

    Args:
        decoder: the models' common decoder.
        anchor: the merge of ``actmat``, whose maps stay where none is solved, and whose system says in which directions
            of the input a map stays nearer to W_n.
        tasks: the token ids of each expert's calibration samples, and last of the base model's if it has a task.
        partial: where the layers are written; what is finished there is not computed again.
        weights: the weights [S] of the tokens of every sample, task after task; by default all are 1.
        ridge: how strongly the solution is drawn towards W_n; None to choose it by left-out samples.
        head: the output head, by the model's names; None if it stays the anchor's.
        ranks: the processes that share the batches.
        progress: told the stage, and how many of this process's samples have passed it.

    Raises:
        SltaError: a checkpoint's tensors are missing or not finite, or one sample does not fit into memory.
    """
    ranks = ranks or Ranks()
    weights = weights or [torch.ones(len(row)) for task in tasks for row in task]
    merge = _FeatureMerge(decoder, anchor.models, tasks, ranks, anchor, weights, ridge, head, partial.folder)
    tensors = pass_layers(merge, partial=partial, progress=lambda samples: progress(merge.stage, samples))
    if ranks.first:
        partial.finish(tensors)
    ranks.wait()


def stages(decoder: Decoder, head: LinearMap | None) -> int:
    """How many stages a feature merge has: the groups of maps, and the output head."""
    return sum(len(maps.groups) for maps in groups_by_layer(decoder)) + (head is not None)


def layer_shapes(decoder: Decoder, layer: int) -> dict[str, torch.Size]:
    """The shapes of the tensors that a layer's file holds, by the model's names."""
    state = decoder.layers[layer].state_dict()
    return {name: state[key].shape for key, name in decoder.layer_tensors(layer).items()}


@dataclass
class _FeatureMerge(LayerMethod[Tensors]):
    """Merges one layer after the other, then the output head; see ``feature_merge``.

    Attributes:
        folder: where the matrices of a mixture's experts are while they are solved.
    """

    anchor: ActmatAnchor
    token_weights: Sequence[torch.Tensor]
    ridge: float | None
    head: LinearMap | None
    folder: Path

    def __post_init__(self) -> None:
        self.owners = self.owners_of(self.models)
        self.stage = "embeddings"
        self.maps = groups_by_layer(self.decoder)
        for words, kept in {kept_in_words(maps.kept): maps.kept for maps in self.maps if maps.kept}.items():
            numbered = any(map(is_numbered, kept))  # most of a mixture's weights
            loud = numbered or SHARED in kept.values()
            LOG.log(logging.WARNING if loud else logging.INFO, "Merged as by actmat, not solved: %s", words)

    def owners_of(self, models: Sequence[Owner]) -> list[Owner]:
        """Each task's own model, of the base model and the experts: the expert, or the base model if it has a task."""
        base, *experts = models
        return [*experts, base][: len(self.tasks)]

    def sources(self) -> list[Sequence[Source]]:
        """The streams of the merged model and of each task's own model."""
        return [[self.anchor] * len(self.tasks), self.owners]

    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """The merged layer's tensors by the model's names, and how far its output is from the experts'."""
        solver = _LayerMerge(self, layer, weights, streams)
        for group in self.maps[layer].groups:
            self.stage = f"{layer + 1} of {len(self.decoder)} layers, {group}"
            solver.solve(group, report)
        names = self.decoder.layer_tensors(layer)
        merged = {names[key]: tensor for key, tensor in solver.tensors().items()}
        return {
            **merged,
            LAYER_ERRORS: self._finish_layer(solver),
            LAYER_RIDGES: torch.tensor(solver.ridges, dtype=torch.float64),
        }

    def _finish_layer(self, solver: _LayerMerge) -> torch.Tensor:
        """Set what the layer makes of both streams; returns the mean relative error by task [T]."""
        sums = torch.zeros(2, len(self.tasks), dtype=torch.float64)
        for number, batch in enumerate(solver.streams.batches):
            merged, expert = map(batch.unpadded, solver.begin_or_continue(number).finish(solver.merged))
            del solver.passages[number]
            norms = expert.norm(dim=1)  # zero where an embedding is: such a token has no relative error
            errors = (merged - expert).norm(dim=1) / norms
            sums[0, batch.task] += float(errors[norms > 0].sum())
            sums[1, batch.task] += int((norms > 0).sum())
        self.ranks.sum(sums)
        return sums[0] / sums[1]

    def regression(
        self,
        near: torch.Tensor,
        tasks: Iterable[Iterable[Tokens]],
        ridge: float | None,
        expected: int,
        prior: torch.Tensor | None = None,
    ) -> RidgeRegression:
        """The regression for the change of a matrix W_n, ``near`` [out, in], on this process's tokens of every task.

        ``expected`` is how many they are; ``prior`` is that of ``RidgeRegression``.
        """
        regression = RidgeRegression(near, ridge, prior=prior, tokens=expected, ranks=self.ranks)
        for task, count in zip(tasks, self.anchor.counts, strict=True):
            for tokens in task:
                regression.add(*tokens)
            regression.finish_task(count)
        return regression

    def shapes(self, layer: int) -> dict[str, torch.Size]:
        """The shapes of the tensors that the layer's file holds, by the model's names."""
        return layer_shapes(self.decoder, layer)

    def repeat_layer(
        self, layer: int, weights: Sequence[Weights], found: Tensors, streams: Streams, report: Progress
    ) -> None:
        """Run a layer on every stream, with the merged tensors of its file."""
        names, owners = self.decoder.layer_tensors(layer), self.owners_of(weights)
        merged = {key: _placed(found[name], weights[0][key]) for key, name in names.items()}
        for number, batch in enumerate(streams.batches):
            streams.run_layer(MERGED, number, merged)
            streams.run_layer(EXPERT, number, owners[batch.task])
            report(len(batch.rows) * len(self.maps[layer].groups))

    def finish(self, streams: Streams, report: Progress) -> Tensors:
        """The output head's tensors by the model's names, solved without a prior; none if it stays the anchor's."""
        head, decoder = self.head, self.decoder
        if head is None:
            return {}
        self.stage = "output head"
        names, tail = [name for name in (head.weight, head.bias) if name], tail_tensors(decoder)
        # Read once, not for each part. The anchor's tensors, part by part replaced by the solution.
        solved = {name: tensor.clone() for name, tensor in read_edges(decoder, self.anchor, names).items()}
        merged_tail = read_edges(decoder, self.anchor, tail)
        owned = [(read_edges(decoder, owner, names), read_edges(decoder, owner, tail)) for owner in self.owners]
        matrix, ridge = head.matrix(solved), self.ridge
        rows, columns = matrix.shape
        step = max(1, HEAD_ELEMENTS // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            tasks = (
                self._head_tokens(task, head.matrix(tensors)[part], (merged_tail, owner_tail), streams, report)
                for task, (tensors, owner_tail) in enumerate(owned)
            )
            change = self.regression(matrix[part], tasks, ridge, streams.tokens).solve()
            if change.ridge is None:
                LOG.warning("The output head stays the experts' mean, because its inputs are not finite")
                return {}
            ridge = change.ridge  # the choice of the first part holds for the whole head
            solved[head.weight][part] += change.matrix
            if head.bias is not None:
                biases = torch.stack([tensors[head.bias][part] for tensors, _ in owned])
                solved[head.bias][part] = change.offset(solved[head.bias][part], biases)
            report = _untold  # the samples count once
        return solved

    def _head_tokens(
        self, task: int, matrix: torch.Tensor, tails: tuple[Weights, Weights], streams: Streams, report: Progress
    ) -> Iterator[Tokens]:
        """The head's inputs in the merged model, and what the task's model's head, ``matrix``, makes of its own.

        ``tails`` are the ``tail_tensors`` of the merged model, and of the task's own.
        """
        for number, batch in streams.batches_of(task):
            given, owner_given = (
                batch.unpadded(head_input(self.decoder, streams.hidden(stream, number), tail))
                for stream, tail in zip((MERGED, EXPERT), tails, strict=True)
            )
            yield given, owner_given @ matrix.T, batch.samples, batch.join(self.token_weights)
            report(len(batch.rows))


def _untold(samples: int) -> None:
    """Progress that nobody is told."""


class _LayerMerge:
    """One layer of a merge in the making.

    Args:
        merge: the merge.
        layer: the layer's index.
        weights: the layer's tensors of the base model and of the experts.
        streams: the merged model's stream and the experts' own, before this layer.

    Attributes:
        merged: the layer's tensors; the anchor's where nothing is solved yet, or ever.
        passages: the batches that have begun the layer, by their numbers.
        ridges: the ridges that the maps were solved with.
    """

    def __init__(self, merge: _FeatureMerge, layer: int, weights: Sequence[Weights], streams: Streams) -> None:
        self.merge, self.layer, self.streams, self.maps = merge, layer, streams, merge.maps[layer]
        self.base, self.owners = weights[0], merge.owners_of(weights)
        names = merge.decoder.layer_tensors(layer)
        together = {m.weight for group in self.maps.groups if not group.fused for m in group.maps}
        self._later = merge.anchor.whole_maps(names) & together  # the anchor's, solved with the prior of their group
        anchor = merge.anchor.of(names, weights, self._later)
        # The matrices of a mixture's experts that are read when they are used: written one by one.
        stacks = {key: stack for key, stack in anchor.items() if isinstance(stack, ExpertStack)}
        self._stacks = {key: in_a_file(stack, merge.folder) for key, stack in stacks.items()}
        self.merged = anchor | {key: stack_of(copy, stacks[key].device) for key, copy in self._stacks.items()}
        self.passages: dict[int, _Passage] = {}
        self.ridges: list[float] = []
        self._kept: list[str] = []  # why maps of the group that is being solved keep the anchor's weights

    def begin_or_continue(self, number: int) -> _Passage:
        """A batch on its way through the layer; when it begins, the task's own model runs the whole layer."""
        if number not in self.passages:
            self.passages[number] = _Passage(self.streams, number, self.maps)
            self.passages[number].run_expert(self.owners[self.streams.batches[number].task])
        return self.passages[number]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer's tensors, as they can be written to a file."""
        return {**self.merged, **self._stacks}

    def solve(self, group: MapGroup, report: Progress) -> None:
        """Solve the first unsolved group; the layer runs inside ``regression``. ``report`` is told the samples used."""
        if group.fused:
            self._solve_routed(group, report)
        else:
            tasks = [self._tokens(group, task, report) for task in range(len(self.owners))]
            self._solve(group.maps, tasks, self.streams.tokens)
        if self._kept:
            LOG.warning("Layer %d: %s are merged as by actmat, not solved", self.layer, ", ".join(self._kept))
            self._kept = []

    def _tokens(self, group: MapGroup, task: int, report: Progress) -> Iterator[Tokens]:
        """The tokens of a task at maps of one input, with half of the drift where a map can correct it."""
        for number, batch in self.streams.batches_of(task):
            passage = self.begin_or_continue(number)
            targets = passage.targets(group)
            inputs = batch.unpadded(passage.inputs(group, self.merged)[0])
            outputs = []
            for linear_map in group.maps:
                output, offset = batch.unpadded(targets[linear_map.module]), linear_map.offset(self.owners[task])
                if (drift := passage.drift(linear_map.module)) is not None:
                    output = output + DRIFT * batch.unpadded(drift)
                outputs.append(output if offset is None else output - offset)
            yield inputs, torch.cat(outputs, 1), batch.samples, batch.join(self.merge.token_weights)
            report(len(batch.rows))

    def _solve(self, maps: Sequence[LinearMap], tasks: Iterable[Iterable[Tokens]], expected: int) -> None:
        """Put new tensors of maps of one input in place, if there are any."""
        names, expert = ", ".join(linear_map.name for linear_map in maps), maps[0].expert
        solved, prior = self.merge.anchor.of_group(maps, self.base, self.owners, self._later)
        self.merged |= solved  # first: the tokens run through these maps
        base, anchor = (torch.cat([m.matrix(tensors) for m in maps]) for tensors in (self.base, self.merged))
        near = torch.lerp(base, anchor, BEYOND)
        regression = self.merge.regression(near, tasks, self.merge.ridge, expected, prior)
        if expert is not None and regression.tokens < ENOUGH_TOKENS * near.shape[1]:
            self._kept.append(f"{names} ({regression.tokens} tokens)")
            return
        change = regression.solve()
        LOG.info("Layer %d: %s solved with a ridge of %s", self.layer, names, change.ridge)
        if change.ridge is None:
            self._kept.append(f"{names} (their inputs are not finite)")
            return
        self.ridges.append(change.ridge)
        end = 0
        for linear_map in maps:
            rows = slice(end, end + len(linear_map.matrix(self.base)))
            end = rows.stop
            matrix = linear_map.stored((near[rows] + change.matrix[rows]).to(near.dtype))
            self._put(linear_map.weight, expert, matrix)
            biases = [linear_map.offset(tensors) for tensors in (self.merged, *self.owners)]
            if (bias := biases[0]) is not None:
                offset = change.offset(bias, torch.stack(biases[1:]), rows)  # type: ignore[arg-type]
                self._put(str(linear_map.bias), expert, offset)

    def _put(self, name: str, expert: int | None, tensor: torch.Tensor) -> None:
        """Put a tensor of the layer in place, or the part of a mixture's expert."""
        if expert is None:
            self.merged[name] = tensor
        else:
            self._stacks.get(name, self.merged[name])[expert] = tensor

    def _solve_routed(self, group: MapGroup, report: Progress) -> None:
        """Solve a mixture's experts one by one, each on the tokens that the merged model sends to it."""
        routed = []  # by batch: the merged model's inputs, and the task's own model's in their places
        for number, batch in enumerate(self.streams.batches):
            routed.append(self.begin_or_continue(number).routed(group, self.merged))
            report(len(batch.rows))
        for name in {name for m in group.maps for name in (m.weight, m.bias) if name}:
            if name not in self._stacks:
                self.merged[name] = self.merged[name].clone()
        module = self.merge.decoder.layers[self.layer].get_submodule(group.module)
        for index in sorted({m.expert for m in group.maps if m.expert is not None}):
            first, down = (m for m in group.maps if m.expert == index)
            # By task: the merged model's inputs, the task's own model's, and each token's sample and weight.
            reaching = [list(self._reaching(routed, index, task)) for task in range(len(self.owners))]
            self._solve_reached(first, reaching)
            hidden = []
            for tokens, owner in zip(reaching, self.owners, strict=True):
                pairs = [(first.apply(self.merged, x), first.apply(owner, y), *rest) for x, y, *rest in tokens]
                hidden.append([(fused_hidden(module, x), fused_hidden(module, y), *rest) for x, y, *rest in pairs])
            self._solve_reached(down, hidden)

    def _reaching(
        self, routed: Sequence[tuple[RoutedInputs, torch.Tensor]], index: int, task: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """What of a task goes to a mixture's expert: the inputs of both models [n, in], samples and weights [n]."""
        for number, batch in self.streams.batches_of(task):
            merged, expert = routed[number]
            reached = (merged.routes == index).any(-1)
            inputs, expert_inputs, tokens = (
                part[reached.to(part.device)] for part in (merged.values, expert, merged.tokens.cpu())
            )
            device = self.merge.decoder.device
            weights = batch.join(self.merge.token_weights)[tokens]
            yield inputs.to(device), expert_inputs.to(device), batch.samples[tokens], weights

    def _solve_reached(self, linear_map: LinearMap, reaching: Sequence[Sequence[tuple[torch.Tensor, ...]]]) -> None:
        """Solve one map of a mixture's expert on the tokens of every task that reach it."""
        tasks = [
            [(x, y @ linear_map.matrix(owner).T, samples, weights) for x, y, samples, weights in tokens]
            for tokens, owner in zip(reaching, self.owners, strict=True)
        ]
        self._solve([linear_map], tasks, sum(len(tokens[0]) for task in tasks for tokens in task))


class _Passage:
    """A batch on its way through a layer: ``run_expert``, then the merged layer, from one group of maps to the next.

    The layer runs once on each stream, although the merged maps become known one after another: every run goes on where
    the run before it stopped. Modules that have run are not run again, their outputs are kept. Only what lies between
    maps (norms, the attention's core, activations) may be computed twice.

    Args:
        streams: the merged model's stream and the experts' own, before this layer.
        number: the batch's number.
        maps: the layer's groups of maps.
    """

    def __init__(self, streams: Streams, number: int, maps: LayerMaps) -> None:
        self.streams, self.number, self.maps = streams, number, maps
        self.batch = streams.batches[number]
        self._children = {group.child for group in maps.groups}
        self._modules = {module for group in maps.groups for module in group.modules}
        # What modules of the merged layer have returned, by their paths, and what it passes to later layers.
        self._outputs: dict[str, Any] = {}
        self._state: dict[Any, torch.Tensor] = {}

    def run_expert(self, weights: Weights) -> None:
        """Run the whole layer of the task's own model; set its output on the stream, keep what its modules return."""
        streams, number, maps = self.streams, self.number, self.maps
        mixtures = {group.module: group for group in maps.groups if group.fused}
        run = streams.decoder.run(
            streams.layer,
            weights,
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


def _placed(merged: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A merged tensor where the base model's is: on its device, or a mixture's stack that is read expert by expert."""
    return stack_of(merged, base.device) if isinstance(base, ExpertStack) else merged.to(base.device)
