"""featcal: every linear map by least squares, layer by layer in the order of the forward pass.

After RegMean++ and FeatCal (arXiv 2605.13030). The anchor is what ``actmat``, which needs no data, makes of
each matrix that the model has (for adapters with another ridge); the solution stays near a point beyond it.
``solve_model`` begins, with the samples' token ids, and ``SolvedModel`` gives mergekit the tensors in the folder of
solved layers.

Each sample of task t is in two hidden-state streams: the merged model's, and expert t's own. The engine's loop brings
both to a layer; then

1. the merged layer starts as the experts' mean, and maps that are in no group become the anchor's;
2. for each group of maps that read the same input, in the order in which they feed each other: its maps become the
   anchor's, the merged model's layer runs as far as the group, and the expert's past it, and the group is solved;
3. the merged layer runs to its end, and its tensors are written.

The output head comes last. A map of a group, with inputs x of the merged stream and x_t of expert t's, base model's
W_0, anchor W_a, and expert t's own W_t and b_t, becomes

    W = argmin  sum_t s_t sum_x w_x |W x - y_t|^2 + ridge * trace(D H D^T),   y_t = W_t x_t + d_t / 2
    D = W - W_n,  W_n = W_0 + 3/2 (W_a - W_0)       (for the head the mean)
    b = b_a + (m - b_a) / (1 + ridge^2),  b_a the experts' mean bias,
        m the mean of b_t + y_t - W x over all tokens, weighted by s_t w_x

For a map that adds to the residual stream (a ``Writer`` of ``decoder.py``), d_t is what expert t's stream has before
the map and the merged model's lacks, so that the map corrects half of what the maps before it have missed; for other
maps it is zero. Where a norm of expert t multiplies the map's output by s, d_t is multiplied by s / (s^2 + q / 100),
where q is the median of the token's s^2, and w_x by q: an error counts as what the norm makes of it. A mixture's routed
experts are solved one by one, each on the tokens that the merged model sends to it.

The base model may have a task too, whose prompts are to be answered as it does: it is one more expert, whose task
vector is zero and whose influence is multiplied by kappa, in s_t as in every mean over the experts.

``regression.py`` defines s_t, H and the bias (``Change.offset``), ``token_weights`` the w_x. H is built from the
matrix of the system that ``actmat`` solves, so that a few prompts change a map mostly in directions that their tokens
cover. Unless a recipe gives the ridge, held-out samples choose it for every group.

This differs from FeatCal in five points: a map is solved on inputs that are computed with the maps already solved in
its layer; it corrects what earlier maps have missed; tasks and answers have weights; held-out samples choose the ridge;
the output head is solved, too. Routers are the anchor's; norms, embeddings and convolutions the mean of the experts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._pytree import tree_map_only

from mergekit_slta.actmat.covariance import matrix_bytes, merge_by_covariance
from mergekit_slta.data.sources import CalibrationData
from mergekit_slta.engine import memory
from mergekit_slta.engine.loop import LayerMethod, Progress, pass_layers
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.streams import Batch, Streams, Tasks, read_edges, waiting_bytes
from mergekit_slta.featcal.groups import SHARED, MapGroup, find_groups, in_words
from mergekit_slta.featcal.regression import PREDICTED, RidgeRegression, Tokens, regression_bytes
from mergekit_slta.files import digest
from mergekit_slta.layers.calls import head_input
from mergekit_slta.layers.decoder import INPUT, Decoder, LayerRun, Writer, hidden_of
from mergekit_slta.layers.maps import LinearMap, RoutedInputs, fused_hidden, is_numbered, routed_inputs
from mergekit_slta.layers.trace import of_each_layer, on_device, tail_problem
from mergekit_slta.models.checkpoint import Blend, ExpertStack, Source, Tensors, empty_file, stack_of, task_vector
from mergekit_slta.models.layout import Layout
from mergekit_slta.numerics.symmetric import add_ridge
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import ACTMAT_RIDGE, FeatcalSettings, are_adapters
from mergekit_slta.words import listed

LOG = logging.getLogger(__name__)
MERGED, OWNER = range(2)  # the streams: of the merged model, and of each task's own model

# Of the anchor and the prior, 0.03 for full fine-tunes. With a few prompts, adapters of toy models need ten times that,
# those of a real model do not (docs/findings.md, "Tried and not kept"); without prompts, ``actmat`` takes 3.
ANCHOR_RIDGE_OF_ADAPTERS = 0.1
# How far W_n is from the base model, in units of the anchor's distance: the anchor is a mean of changes that are
# larger, each in the directions of its own task.
BEYOND = 1.5
DRIFT = 0.5  # the share of the drift that each map which writes to the residual stream corrects
NORM_HOLD = 0.01  # where a norm multiplies by s, d / s is d s / s^2 with this many medians of s^2 added: s may be 0
ENOUGH_TOKENS = 1 / 16  # a routed expert's map is solved if this many tokens per input dimension reach it
HEAD_ELEMENTS = 2**26  # of the sums of the head's rows at once, at most; a larger head is solved in parts
# Of a token that belongs to an answer; all others have 1. A merged model is used for what it answers, while the tokens
# of prompts are often many and alike: a system prompt is the same in every sample.
ANSWER_WEIGHT = 8.0
LAYER_ERRORS = "error.features"  # in a layer's file beside its tensors: its relative errors by task [T]


def feature_merge_bytes(decoder: Decoder, models: int, tasks: Tasks) -> int:
    """The bytes that it takes to merge so many models, the base model included."""
    maps, layers = memory.map_shapes(decoder) or {(0, 0)}, memory.layer_bytes(decoder, models)
    batches, tokens = memory.batch_shapes(decoder, tasks), sum(len(row) for task in tasks for row in task)
    positions, longest = max(map(math.prod, batches)), max(length for _, length in batches)
    number, width = memory.NUMBER, memory.hidden_size(decoder)
    anchor = max(
        number * (len(tasks) * rows * columns + columns**2) + matrix_bytes(rows, columns) for rows, columns in maps
    )
    adding, solving = map(max, zip(*(regression_bytes(*shape, tokens) for shape in maps), strict=True))
    # Of a batch on its way: what waits of it, again; outputs of both sides' children; the running side's input twice;
    # a copy of an output; the stream inside the layer; the drift, its parts and the targets. Of the widest map: the
    # merged side's inputs; an MLP's factors and their product, or queries, keys, and keys and values for all heads.
    hidden, again = 2 * memory.children(decoder) + 7, waiting(decoder, positions, longest)
    batch = memory.batch_bytes(decoder, batches, hidden, inner=4, scores=3, beside=again)
    inside = layers * (models + 1) // models + max(anchor, adding + max(batch, solving))
    # The embeddings of all models and their mean; or the heads of the merge and of the tasks' own models, a part's sums
    # twice, those of its inputs, and of a batch the targets, residuals, combinations and hidden states.
    edge = memory.edge_bytes(decoder)
    part = number * min(edge // number, HEAD_ELEMENTS) if decoder.head else 0
    of_batch = part // width * (2 * positions + PREDICTED) + 6 * number * width * positions
    head = (len(tasks) + 1) * edge + 2 * part + bool(part) * 5 * number * width**2 + of_batch
    states = waiting_bytes(tokens, width, 2) + max((models + 1) * edge, head)
    return memory.TOKEN * tokens + max(waiting(decoder, tokens, longest) + inside, states)


def waiting(decoder: Decoder, tokens: int, longest: int) -> int:
    """How many bytes of so many tokens, in prompts of at most ``longest``, wait at most; see ``waiting_bytes``."""
    width, outputs = memory.hidden_size(decoder), 0
    for groups in (maps.groups for maps in of_each_layer(decoder, find_groups)):
        held = [0] * (len(groups) + 1)  # of a stream that has run as far as a group, or to the layer's end
        for at, group in enumerate(groups):
            complete = {other.child for other in groups[:at]} - {group.child}
            inside = sum(other.outputs for other in groups[:at] if other.child == group.child)
            held[at] = width * len(complete) + inside
        outputs = max(outputs, *map(sum, pairwise(held)), 0)  # one stream is a group ahead
    # What the attention returns beside its output, where it has the scores of all pairs in memory.
    outputs += memory.heads_with_scores(decoder) * longest
    # Whose inputs wait in both streams, too.
    routed = any(group.fused for maps in of_each_layer(decoder, find_groups) for group in maps.groups)
    return waiting_bytes(tokens, width, 4 if routed else 2, outputs)


@dataclass
class FeatureMerge(LayerMethod[Tensors]):
    """Solves every linear map, layer by layer, then the output head; the last task may be the base model's."""

    counts: Sequence[float]  # of each task: 1 for an expert's, and last kappa for the base model's if it has one
    token_weights: Sequence[torch.Tensor]  # those [S] of every sample, task after task
    ridge: float | None  # how strongly the solution is drawn towards W_n; None to choose it by left-out samples
    head: LinearMap | None  # the output head, by the model's names; None if it stays the experts' mean
    partial: Partial  # in whose folder a mixture's solved matrices lie meanwhile

    def __post_init__(self) -> None:
        share = torch.full((len(self.models) - 1,), 1 / sum(self.counts), dtype=torch.float64)
        self.mean = Blend(self.models, share)  # of the experts, in which the base model counts kappa times
        adapters = are_adapters(*(model.reference for model in self.models))
        self.anchor_ridge = ANCHOR_RIDGE_OF_ADAPTERS if adapters else ACTMAT_RIDGE
        # Each task's own model, by its place among the models: the expert, or the base model if it has a task.
        self.owners = [*range(1, len(self.models)), 0][: len(self.tasks)]
        # For each token the number of its sample, by content, so that the order of a draw chooses no ridge.
        self.places: list[torch.Tensor] = []
        for samples in self.tasks:  # equal ones share a place, and with it a half
            places = {row: place for place, row in enumerate(sorted({*map(tuple, samples)}))}
            self.places += [torch.full((len(row),), places[tuple(row)]) for row in samples]
        self.maps = of_each_layer(self.decoder, find_groups)
        for words, unsolved in {in_words(maps.unsolved): maps.unsolved for maps in self.maps if maps.unsolved}.items():
            numbered = any(map(is_numbered, unsolved))  # most of a mixture's weights
            loud = numbered or SHARED in unsolved.values()
            LOG.log(logging.WARNING if loud else logging.INFO, "Merged as by actmat, not solved: %s", words)

    @property
    def steps(self) -> int:
        """One for each group of maps, and one for the output head."""
        return sum(len(maps.groups) for maps in self.maps) + (self.head is not None)

    def sources(self) -> list[Sequence[Source]]:
        """The streams of the merged model and of each task's own model."""
        return [[self.mean] * len(self.tasks), [self.models[owner] for owner in self.owners]]

    def take_layer(self, layer: int, tensors: Sequence[Tensors], streams: Streams, report: Progress) -> Tensors:
        """The merged layer's tensors by the model's names, and how far its output is from the experts'."""
        merging = _Layer(self, layer, tensors, streams)
        for group in self.maps[layer].groups:
            self.stage = f", {group}"
            (merging.solve_routed if group.fused else merging.solve_group)(group, report)
        names = self.decoder.layer_tensors[layer]
        errors = merging.run_to_end()
        if merging.unsolved:
            LOG.warning("Layer %d: %s are merged as by actmat, not solved", layer, listed(merging.unsolved))
        solved = {**merging.merged, **merging.parted}
        return {names[key]: tensor for key, tensor in solved.items()} | {LAYER_ERRORS: errors}

    def places_and_weights(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token of a batch: its sample's place among the task's, and its weight [n]."""
        places, token_weights = ([of_rows[row] for row in batch.rows] for of_rows in (self.places, self.token_weights))
        return torch.cat(places), torch.cat(token_weights)

    def repeat_layer(
        self, layer: int, tensors: Sequence[Tensors], stored: Tensors, streams: Streams, report: Progress
    ) -> None:
        """Run a layer on every stream, with the merged tensors of its file."""
        base, merged = tensors[0], dict[str, torch.Tensor]()
        for key, name in self.decoder.layer_tensors[layer].items():
            routed, device = isinstance(base[key], ExpertStack), base[key].device  # routed: read expert by expert
            merged[key] = stack_of(stored[name], device) if routed else stored[name].to(device)
        for number, batch in enumerate(streams.batches):
            streams.run_layer(MERGED, number, merged)
            streams.run_layer(OWNER, number, tensors[self.owners[batch.task]])
            report(len(batch.rows) * len(self.maps[layer].groups))

    def finish(self, streams: Streams, report: Progress) -> Tensors:
        """The output head's tensors by the model's names, solved without a prior; none if it stays the mean."""
        head, decoder = self.head, self.decoder
        if head is None:
            return {}
        self.stage = ", output head"
        names, tail = [name for name in (head.weight, head.bias) if name], decoder.tail_tensors
        # Read once, not for each part. The mean's tensors, part by part replaced by the solution.
        solved = {name: tensor.clone() for name, tensor in read_edges(decoder, self.mean, names).items()}
        _, owners = self.sources()
        owned = [read_edges(decoder, owner, names) for owner in owners]
        tails = [read_edges(decoder, source, tail) for source in (self.mean, *owners)]
        matrix, ridge = head.matrix(solved), self.ridge
        rows, columns = matrix.shape
        step, samples = max(1, HEAD_ELEMENTS // columns), sum(len(batch.rows) for batch in streams.batches)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            regression = RidgeRegression(matrix[part], ridge, tokens=streams.tokens, ranks=self.ranks)
            matrices = [head.matrix(tensors)[part] for tensors in owned]
            regression.add_tasks(self.counts, functools.partial(self._head_tokens, streams, matrices, tails))
            change = regression.solve()
            if change.ridge is None:
                LOG.warning("The output head stays the experts' mean, because its inputs are not finite")
                return {}
            ridge = change.ridge  # the choice of the first part holds for the whole head
            solved[head.weight][part] += change.matrix
            if head.bias is not None:
                biases = torch.stack([tensors[head.bias][part] for tensors in owned])
                solved[head.bias][part] = change.offset(solved[head.bias][part], biases)
            report(samples * part.stop // rows - samples * start // rows)
            del regression, change  # which must not wait beside the next part
        return solved

    def _head_tokens(
        self, streams: Streams, matrices: Sequence[torch.Tensor], tails: Sequence[Tensors], task: int
    ) -> Iterator[Tokens]:
        """A task's tokens at the output head.

        ``matrices`` are the heads of the tasks' own models, ``tails`` the ``tail_tensors`` of the merge and theirs.
        """
        both = (MERGED, tails[0]), (OWNER, tails[1 + task])
        for number, batch in streams.batches_of(task):
            hidden = (head_input(self.decoder, streams.hidden(stream, number), tail) for stream, tail in both)
            inputs, owner_inputs = map(batch.unpadded, hidden)
            yield inputs, owner_inputs @ matrices[task].T, *self.places_and_weights(batch)


class _Layer:
    """One layer of a merge in the making, between two streams: the merged model's, and that of each task's own model.

    Both sides run from group to group, with what waits in ``Streams``: the merged layer as far as the group that is to
    be solved, for its inputs, and the owner's layer as far as the group after that, for what its own maps return. Only
    what lies between maps (norms, the attention's core, activations) is computed twice, unless memory is short.

    ``tensors`` are the layer's, of the base model and of the experts.
    """

    def __init__(self, merge: FeatureMerge, layer: int, tensors: Sequence[Tensors], streams: Streams) -> None:
        self.merge, self.layer, self.streams, self.maps = merge, layer, streams, merge.maps[layer]
        self.base, self.owners = tensors[0], [tensors[owner] for owner in merge.owners]
        # The layer's tensors: the experts' mean, in which one map after the other is replaced.
        self.merged = merge.mean.of(tensors)
        groups = self.maps.groups
        maps = [*self.maps.anchored, *(linear_map for group in groups for linear_map in group.maps)]
        self.parted = dict[str, torch.Tensor]()  # those of a mixture's experts, which are written part by part
        for key in {key for m in maps if m.mixture_expert is not None for key in (m.weight, m.bias) if key}:
            tensor = self.merged[key]
            if isinstance(tensor, ExpertStack):  # read when it is used, which no part is before it is written
                self.parted[key] = empty_file(tensor, merge.partial.folder)
                self.merged[key] = stack_of(self.parted[key], tensor.device)
            else:  # a tensor that no expert has changed is the base model's own
                self.merged[key] = self.parted[key] = tensor.clone() if tensor is self.base[key] else tensor
        for linear_map in self.maps.anchored:
            self._anchor(linear_map)
        self.unsolved: list[str] = []  # maps that stay the anchor's, and why
        # By the module at which a group begins, that of the group after it.
        self._next: dict[str | None, str] = {group.module: after.module for group, after in pairwise(groups)}
        self._mixtures = {group.module for group in groups if group.fused}
        self._outputs_of = {name for group in groups for name in (group.child, *group.modules)}

    def run_to_end(self) -> torch.Tensor:
        """Set the layer's outputs on both streams; returns the mean relative error by task [T]."""
        sums = torch.zeros(2, len(self.owners), dtype=torch.float64)
        for number, batch in enumerate(self.streams.batches):
            if not self.maps.groups:  # whose last has run the owner's layer to its end
                self._run(OWNER, number)
            both = self._run(MERGED, number).output, self.streams.hidden(OWNER, number)
            features, owners = map(batch.unpadded, both)
            norms = owners.norm(dim=1)  # zero where an embedding is: such a token has no relative error
            sums[0, batch.task] += float(((features - owners).norm(dim=1) / norms)[norms > 0].sum())
            sums[1, batch.task] += int((norms > 0).sum())
        self.merge.ranks.sum(sums)
        return sums[0] / sums[1]

    def tokens(self, group: MapGroup, report: Progress, number: int, batch: Batch) -> Tokens:
        """The tokens of a batch at maps of one input, for which both models' layers run.

        The targets are what the task's own maps return for their own inputs, without biases, and with half of the drift
        where a map can correct it.
        """
        writes = not self.maps.writers.keys().isdisjoint(group.modules)
        # Before the runs: the owner's run of the layer's last group puts the output in the input's place.
        hidden = [self.streams.hidden(stream, number) for stream in (MERGED, OWNER) if writes]
        merged, owner = self._run(MERGED, number, group.module), self._run(OWNER, number, group.module)
        outputs, (places, token_weights) = [], self.merge.places_and_weights(batch)
        for linear_map in group.maps:
            output = batch.unpadded(owner.outputs[linear_map.module])
            if (writer := self.maps.writers.get(linear_map.module)) is not None:
                before = ({INPUT: h, **run.outputs} for h, run in zip(hidden, (merged, owner), strict=True))
                drift, factors = self._drift(writer, *before), torch.ones((), device=output.device)
                if writer.norm is not None:
                    factors, counts = _before_norm(output, batch.unpadded(owner.outputs[writer.norm]))
                    token_weights = token_weights.to(counts.device) * counts
                if drift is not None:
                    output = output + DRIFT * factors * batch.unpadded(drift)
            offset = linear_map.offset(self.owners[batch.task])
            outputs.append(output if offset is None else output - offset)
        report(len(batch.rows))
        return batch.unpadded(merged.inputs[group.module][0]), torch.cat(outputs, 1), places, token_weights

    def _drift(self, writer: Writer, merged: Mapping[str, Any], owner: Mapping[str, Any]) -> torch.Tensor | None:
        """By how much the owner's residual stream differs from the merged model's where a module writes to it.

        From the layer's input and the outputs of children before the module, by name, in both layers. It is in units of
        the module's output, or of its norm's [B, S, out], and None where there is nothing to correct. In the first
        layer the embeddings' difference does not count.
        """
        stream = {name: factor / writer.factor for name, factor in writer.stream.items() if name != INPUT or self.layer}
        parts = [factor * (hidden_of(owner[name]) - hidden_of(merged[name])) for name, factor in stream.items()]
        return functools.reduce(torch.add, parts) if parts else None

    def solve_group(self, group: MapGroup, report: Progress) -> None:
        """Solve maps of one input, on all tokens."""
        tokens, streams = functools.partial(self.tokens, group, report), self.streams
        self.solve(group.maps, lambda task: starmap(tokens, streams.batches_of(task)), streams.tokens)

    def solve(self, maps: Sequence[LinearMap], tokens_of: Callable[[int], Iterable[Tokens]], expected: int) -> None:
        """Put W_a of maps of one input in place, then their solution, if there is one.

        The prior is the sum of the maps' S (``covariance.py``), with the ridge, and a unit mean diagonal.
        ``tokens_of`` gives a task's tokens, of which this process has so many ``expected`` ones in all.
        """
        names, mixture_expert = ", ".join(linear_map.name for linear_map in maps), maps[0].mixture_expert
        inputs = self.base[maps[0].weight].shape[-2 if maps[0].transposed else -1]
        total, prior = torch.zeros(inputs, inputs, device=self.merge.decoder.device), None
        parts = [self._anchor(linear_map, total) for linear_map in maps]
        sizes, near = [len(part) for part in parts], torch.cat(parts)
        del parts  # which must not wait beside the tokens
        if total.any():  # or else no expert has changed any of the maps
            add_ridge(total, self.merge.anchor_ridge)
            prior = total.div_(total.diagonal().mean())
        regression = RidgeRegression(near, self.merge.ridge, prior=prior, tokens=expected, ranks=self.merge.ranks)
        regression.add_tasks(self.merge.counts, tokens_of)
        if mixture_expert is not None and regression.tokens < ENOUGH_TOKENS * near.shape[1]:
            self.unsolved.append(f"{names} ({regression.tokens} tokens)")
            return
        change = regression.solve()
        if change.ridge is None:
            self.unsolved.append(f"{names} (their inputs are not finite)")
            return
        LOG.info("Layer %d: %s solved with a ridge of %s", self.layer, names, change.ridge)
        for linear_map, end, size in zip(maps, accumulate(sizes), sizes, strict=True):
            rows = slice(end - size, end)
            solved = {linear_map.weight: linear_map.stored(near[rows] + change.matrix[rows])}
            biases = [linear_map.offset(tensors) for tensors in (self.merged, *self.owners)]
            if linear_map.bias is not None and (bias := biases[0]) is not None:
                solved[linear_map.bias] = change.offset(bias, torch.stack(biases[1:]), rows)  # type: ignore[arg-type]
            for key, tensor in solved.items():
                self._put(linear_map, key, tensor)

    def _anchor(self, linear_map: LinearMap, into: torch.Tensor | None = None) -> torch.Tensor:
        """Put ``actmat``'s W_a of a map in place, and return W_n [out, in]; the map's S is added to ``into``."""
        merge, base = self.merge, linear_map.matrix(self.base)
        task_vectors = [
            torch.zeros_like(base) if owner is self.base else task_vector(linear_map.matrix(owner), base)
            for owner in self.owners
        ]
        anchor = base + merge_by_covariance(task_vectors, merge.anchor_ridge, merge.counts, into)
        self._put(linear_map, linear_map.weight, linear_map.stored(anchor))
        return torch.lerp(base, anchor, BEYOND)

    def _put(self, linear_map: LinearMap, key: str, tensor: torch.Tensor) -> None:
        """Set a tensor of the merged layer, or of one that holds a mixture's experts the expert's part."""
        if linear_map.mixture_expert is None:
            self.merged[key] = tensor
        else:
            self.parted[key][linear_map.mixture_expert] = tensor

    def solve_routed(self, group: MapGroup, report: Progress) -> None:
        """Solve a mixture's experts one by one, each on the tokens that the merged model sends to it."""
        numbers = sorted({m.mixture_expert for m in group.maps if m.mixture_expert is not None})
        routed = []  # by batch: the merged model's inputs, and the task's own model's in their places
        for number, batch in enumerate(self.streams.batches):
            positions = batch.unpadded(torch.arange(batch.token_ids.numel())[:, None]).flatten()
            merged, of_owner = (
                routed_inputs(run.inputs[group.module], len(numbers), positions)
                for run in [self._run(stream, number, group.module) for stream in (MERGED, OWNER)]
            )
            both = merged, _at_places_of(merged, of_owner)
            routed.append(tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.streams.place), both))
            report(len(batch.rows))
        module = self.merge.decoder.layers[self.layer].get_submodule(group.module)
        for number in numbers:
            first, down = (m for m in group.maps if m.mixture_expert == number)
            # By task: the merged model's inputs, the task's own model's, and each token's sample and weight.
            reaching = [list(self._reaching(routed, number, task)) for task in range(len(self.owners))]
            self._solve_reached(first, reaching)
            hidden = []
            for tokens, owner in zip(reaching, self.owners, strict=True):
                ours, theirs = (first.function(tensors) for tensors in (self.merged, owner))
                pairs = [(ours(x), theirs(y), *rest) for x, y, *rest in tokens]
                hidden.append([(fused_hidden(module, x), fused_hidden(module, y), *rest) for x, y, *rest in pairs])
            self._solve_reached(down, hidden)

    def _reaching(
        self, routed: Sequence[tuple[RoutedInputs, torch.Tensor]], mixture_expert: int, task: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """What of a task goes to a mixture's expert: the inputs of both models [n, in], samples and weights [n]."""
        for number, batch in self.streams.batches_of(task):
            merged, owner_values = routed[number]
            reached = (merged.routes == mixture_expert).any(-1)
            parts = merged.values, owner_values, merged.tokens.cpu()
            inputs, owner_inputs, tokens = (part[reached.to(part.device)] for part in parts)
            device, (places, token_weights) = self.merge.decoder.device, self.merge.places_and_weights(batch)
            yield inputs.to(device), owner_inputs.to(device), places[tokens], token_weights[tokens]

    def _solve_reached(self, linear_map: LinearMap, reaching: Sequence[Sequence[tuple[torch.Tensor, ...]]]) -> None:
        """Solve one map of a mixture's expert on the tokens of every task that reach it."""

        def tokens_of(task: int) -> Iterator[Tokens]:
            matrix = linear_map.matrix(self.owners[task])  # read once for all batches
            for x, y, samples, token_weights in reaching[task]:
                yield x, y @ matrix.T, samples, token_weights

        self.solve([linear_map], tokens_of, sum(len(tokens[0]) for task in reaching for tokens in task))

    def _run(self, stream: int, number: int, module: str | None = None) -> LayerRun:
        """Run one side on a batch: the merged one as far as a group's module, the owner's as far as the next group's.

        Without a module, or a group after it, a side runs to its end, which sets its output.
        """
        until = module if stream == MERGED else self._next.get(module)
        tensors = self.merged if stream == MERGED else self.owners[self.streams.batches[number].task]
        return self.streams.run_layer(
            stream, number, tensors, until=until, inputs_of=self._mixtures, outputs_of=self._outputs_of
        )


def _before_norm(inputs: torch.Tensor, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What turns a change of a norm's output into one of its input, both [n, D], and how much each counts [n]."""
    factors = torch.where(inputs == 0, 0.0, outputs / inputs)
    squares = factors.square()
    usual = squares.median(1, keepdim=True).values
    return factors / (squares + NORM_HOLD * usual).clamp_min(torch.finfo(squares.dtype).tiny), usual[:, 0]


def _at_places_of(merged: RoutedInputs, owner: RoutedInputs) -> torch.Tensor:
    """The owner's inputs [m, D] where the merged model has its inputs to the routed experts.

    Where each routed expert has inputs of its own, the owner may have none in some of these places, because
    its own router sends the token elsewhere. The merged model's stand there.
    """
    index = torch.full((int(max(merged.places.max(), owner.places.max())) + 1,), -1, device=owner.places.device)
    index[owner.places] = torch.arange(len(owner.places), device=owner.places.device)
    at = index[merged.places]
    return torch.where((at >= 0)[:, None], owner.values[at], merged.values)


# A recipe's feature merge, and its tensors


def solve_model(experiment: Experiment, partial: Partial) -> SolvedModel:
    """Solve a recipe's feature merge into a folder that this process holds; go on after the layers that lie there."""
    decoder, ranks = on_device(experiment.decoder, experiment.device), experiment.ranks
    settings = experiment.recipe.settings_of(FeatcalSettings)
    data = experiment.load_data(experiment.recipe.tasks)
    weights, head = token_weights(data), head_to_solve(experiment)
    hashed, keep = digest([row.tolist() for row in weights]), experiment.recipe.keep_weight
    identity = experiment.identity(data, weights=hashed, keep_weight=keep, ridge=settings.ridge, head=head is not None)
    partial.begin(identity, ranks, experiment.quiet)
    complete = len(partial.finished(len(decoder) + 1)) > len(decoder)  # with the output head's file
    ranks.require_equal(complete, partial.folder)
    if not complete:
        with ranks.one_refusal():
            experiment.check_edges(experts=True)
        models, token_ids = experiment.checkpoints, [samples.token_ids for samples in data]
        counts = [task.weight for task in experiment.recipe.tasks]
        ridge = None if settings.ridge == "auto" else settings.ridge
        merge = FeatureMerge(decoder, models, token_ids, ranks, counts, weights, ridge, head=head, partial=partial)
        of_head = pass_layers(merge, "Solving", partial=partial, quiet=experiment.quiet)
        if ranks.first:
            partial.write(len(decoder), of_head)
        ranks.wait()
    return SolvedModel(decoder, partial, experiment.layout)


def token_weights(data: Sequence[CalibrationData]) -> list[torch.Tensor]:
    """The weights [S] of the tokens of every sample of every task, in their order.

    A token belongs to an answer if the next token of the answer is predicted from it, or if it is the answer's last.
    """
    weights = []
    for task in data:
        for row, answer in zip(task.token_ids, task.answers, strict=True):
            weights.append(torch.ones(len(row)))
            if answer:
                weights[-1][answer[0] - 1 : answer[1]] = ANSWER_WEIGHT
    return weights


def head_to_solve(experiment: Experiment) -> LinearMap | None:
    """The output head, by the model's names; None if it is tied, or if it cannot be solved, which is said."""
    recipe, head, made = experiment.recipe, experiment.decoder.head, experiment.recipe.config.tokenizer
    aligned = experiment.aligned
    if head is None:
        return None
    why = "the logits need more than the last layer's output" if tail_problem(experiment.decoder) else ""
    if aligned is not None and (
        (made and (made.tokens or made.pad_to_multiple_of))
        or len(aligned.tokenizer) != experiment.model(recipe.base).vocabulary
        or any(index != row for rows in aligned.permutations.values() for index, row in rows.items())
    ):
        why = "mergekit reorders its rows for the recipe's 'tokenizer'"
    if why:
        LOG.warning("The output head stays the experts' mean, because %s.", why)
    return None if why else head


class SolvedModel:
    """The tensors of a finished feature merge, from its folder, as ``layout`` says that the base model stores them."""

    def __init__(self, decoder: Decoder, partial: Partial, layout: Layout) -> None:
        self.decoder, self.layout, self._partial = decoder, layout, partial
        self._layers = {name: layer for layer, names in enumerate(decoder.layer_tensors) for name in names.values()}
        # The names in mergekit's plan of the language model's tensors, if the model runs them.
        language = decoder.language_tensors
        self.language = {stored for stored, piece in layout.pieces.items() if language.issuperset(piece.targets)}

    def tensor(self, stored: str) -> torch.Tensor | None:
        """A float32 tensor by its name in mergekit's plan; None for one that is not in the folder."""
        piece = self.layout.pieces.get(stored)
        if piece is None:
            return None
        with contextlib.ExitStack() as opened:
            first = self.decoder.first_names
            names = [first.get(target, target) for target in piece.targets]
            places = {target: self._partial.file(self._layers.get(target, len(self.decoder))) for target in names}
            files = {target: opened.enter_context(safe_open(place, "pt")) for target, place in places.items()}
            if any(target not in files[target].keys() for target in names):  # noqa: SIM118
                return None

            def solved(target: str, mixture_expert: int | None) -> torch.Tensor:
                target = first.get(target, target)
                if mixture_expert is None:
                    return files[target].get_tensor(target)
                return files[target].get_slice(target)[mixture_expert]

            return self.layout.restore(stored, solved)  # as solved, if the checkpoint stores it as the model has it

    def errors(self) -> torch.Tensor:
        """The errors [layers, tasks] of the merged model's layer outputs.

        An error is the mean over the task's tokens of |h - h_t| / |h_t|, where h_t is the task's own model's.
        """
        errors = []
        for layer in range(len(self.decoder)):
            with safe_open(self._partial.file(layer), "pt") as tensors:
                errors.append(tensors.get_tensor(LAYER_ERRORS))
        return torch.stack(errors)
