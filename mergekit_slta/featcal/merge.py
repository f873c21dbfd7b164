"""featcal: every linear map by least squares, layer by layer in the order of the forward pass.

After RegMean++ and FeatCal (arXiv 2605.13030). The anchor is the merge by ``actmat``, a method that needs no data
(``anchor.py``); the solution stays near a point beyond it. The samples' token ids come from ``data/``;
``scratch.py`` keeps the solved layers in a folder, from which ``host/featcal.py`` gives mergekit each tensor.

Each sample of task t is in two hidden-state streams: the merged model's, and expert t's own. The engine's loop brings
both to a layer; then

1. the merged layer starts as the anchor's;
2. for each group of maps that read the same input, in the order in which they feed each other: the merged stream runs
   as far as the group, the group is solved, and the layer takes the solution;
3. the layer's outputs are set on both streams, and its tensors are written.

The output head comes last. A map of a group, with inputs x of the merged stream and x_t of expert t's, base model's
W_0, anchor W_a, and expert t's own W_t and b_t, becomes

    W = argmin  sum_t s_t sum_x w_x |W x - y_t|^2 + ridge * trace(D H D^T),   y_t = W_t x_t + d_t / 2
    D = W - W_n,  W_n = W_0 + 3/2 (W_a - W_0)       (for the head W_n = W_a)
    b = b_a + (m - b_a) / (1 + ridge^2),  m the mean of b_t + y_t - W x over all tokens, weighted by s_t w_x

For a map that adds to the residual stream (``writers.py``), d_t is what expert t's stream has before the map and the
merged model's lacks, so that the map corrects half of what the maps before it have missed; for other maps it is zero.

The base model may have a task too, whose prompts are to be answered as it does: it is one more expert, whose task
vector is zero and whose influence is multiplied by kappa, in s_t as in every mean over the experts.

``regression.py`` defines s_t, H and the bias (``Change.offset``), ``answers.py`` the weights w_x. H is
built from the matrix of the system that ``actmat`` solves, so that a few prompts change a map mostly in directions that
their tokens cover. Unless a recipe gives the ridge, held-out samples choose it for every
group.

This differs from FeatCal in five points: a map is solved on inputs that are computed with the maps already solved in
its layer; it corrects what earlier maps have missed; tasks and answers have weights; held-out samples choose the ridge;
the output head is solved, too. Norms, embeddings, convolutions and routers are the anchor's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from mergekit_slta.engine.accumulator import Accumulator, Progress, Tensors
from mergekit_slta.engine.batches import Tasks
from mergekit_slta.engine.loop import pass_layers
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Source, Streams, read_edges
from mergekit_slta.featcal.anchor import ActmatAnchor
from mergekit_slta.featcal.groups import SHARED, groups_by_layer, kept_in_words
from mergekit_slta.featcal.layer import LayerMerge, Setting, Tokens, in_a_file, solve_maps
from mergekit_slta.featcal.passage import EXPERT, MERGED, LayerPassage
from mergekit_slta.featcal.regression import Change
from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import head_input, tail_tensors
from mergekit_slta.layers.maps import LinearMap
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.stacks import ExpertStack, stack_of

LOG = logging.getLogger(__name__)

# The sums of the head's rows have at most this number of elements at once; a larger head is solved in parts.
HEAD_ELEMENTS = 2**28
Owner = TypeVar("Owner")
# In a layer's file beside its tensors: its relative error by task [T], and the ridges [n] of what was solved in it.
ERRORS, RIDGES = "error.merged", "error.ridges"


def feature_merge(
    decoder: Decoder,
    anchor: ActmatAnchor,
    experts: Sequence[Checkpoint],
    tasks: Tasks,
    partial: Partial,
    *,
    keep_weight: float = 0.0,
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
        experts: the ``T`` experts.
        tasks: the token ids of each expert's calibration samples, and last of the base model's if it has a task.
        partial: where the layers are written; what is finished there is not computed again.
        keep_weight: how much the base model's task counts, kappa; 0 if it has none.
        weights: the weights [S] of the tokens of every sample, task after task; by default all are 1.
        ridge: how strongly the solution is drawn towards W_n; None to choose it by left-out samples.
        head: the output head, by the model's names; None if it stays the anchor's.
        ranks: the processes that share the batches.
        progress: told the stage, and how many of this process's samples have passed it.

    Raises:
        SltaError: a checkpoint's tensors are missing or not finite, or one sample does not fit into memory.
    """
    ranks = ranks or Ranks()
    models = [anchor.models[0], *experts]
    weights = weights or [torch.ones(len(row)) for task in tasks for row in task]
    counts = [1.0] * len(experts) + [keep_weight] * bool(keep_weight)
    setting = Setting(ridge, counts, weights, ranks, partial.folder)
    merge = _FeatureMerge(decoder, models, tasks, ranks, anchor, setting, head)
    tensors = pass_layers(merge, partial=partial, progress=lambda samples: progress(merge.stage, samples))
    if ranks.first:
        partial.finish(tensors)
    ranks.wait()


def stages(decoder: Decoder, head: LinearMap | None) -> int:
    """How many stages a feature merge has: the groups of maps, and the output head."""
    return sum(len(maps.groups) for maps in groups_by_layer(decoder)) + (head is not None)


@dataclass
class _FeatureMerge(Accumulator[Tensors]):
    """Merges one layer after the other, then the output head; see ``feature_merge``."""

    anchor: ActmatAnchor
    setting: Setting
    head: LinearMap | None

    def __post_init__(self) -> None:
        base, *experts = self.models
        self.owners = self._owners(base, experts)
        self.stage = "embeddings"
        self.maps = groups_by_layer(self.decoder)
        for words, kept in {kept_in_words(maps.kept): maps.kept for maps in self.maps if maps.kept}.items():
            numbered = any(part.isdigit() for name in kept for part in name.split("."))  # most of a mixture's weights
            loud = numbered or SHARED in kept.values()
            LOG.log(logging.WARNING if loud else logging.INFO, "Not solved, so they stay the anchor's: %s", words)

    def _owners(self, base: Owner, experts: Sequence[Owner]) -> list[Owner]:
        """The model of each task: the experts, and the base model if it has a task."""
        return [*experts, base][: len(self.tasks)]

    def sources(self) -> list[Sequence[Source]]:
        """The streams of the merged model and of each task's own model."""
        return [[self.anchor] * len(self.tasks), self.owners]

    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """The merged layer's tensors by the model's names, and how far its output is from the experts'."""
        names, maps = self.decoder.layer_tensors(layer), self.maps[layer]
        together = {m.weight for group in maps.groups if not group.fused for m in group.maps}
        later = self.anchor.whole_maps(names) & together
        anchor = self.anchor.of(names, weights, later)
        base, *experts = weights
        owners = self._owners(base, experts)
        for key, stack in anchor.items():
            # A lazy stack would be computed at every use.
            if isinstance(stack, ExpertStack) and stack is not base[key]:
                anchor[key] = stack_of(in_a_file(stack, self.setting.folder), stack.device)
        passage = LayerPassage(self.decoder, layer, maps, owners, streams)
        solver = LayerMerge(passage, base, anchor, later, self.setting)
        for group in maps.groups:
            self.stage = f"layer {layer + 1} of {len(self.decoder)}, {group}"
            solver.solve(group, report)
        merged = {names[key]: tensor for key, tensor in solver.tensors().items()}
        return {**merged, **self._advance_streams(solver, streams)}

    def _advance_streams(self, solver: LayerMerge, streams: Streams) -> Tensors:
        """Set what the layer makes of both streams; returns the mean relative error by task [T], and the ridges."""
        sums = torch.zeros(2, len(self.tasks), dtype=torch.float64)
        for number, batch in enumerate(streams.batches):
            outputs = solver.passage.finish(number, solver.merged)
            own = batch.unpadded(outputs[EXPERT])
            norms = own.norm(dim=1)  # zero where an embedding is: such a token has no relative error
            errors = (batch.unpadded(outputs[MERGED]) - own).norm(dim=1) / norms
            sums[0, batch.task] += float(errors[norms > 0].sum(dtype=torch.float64))
            sums[1, batch.task] += int((norms > 0).sum())
        self.ranks.sum(sums)
        return {ERRORS: sums[0] / sums[1], RIDGES: torch.tensor(solver.ridges, dtype=torch.float64)}

    def shapes(self, layer: int) -> dict[str, torch.Size]:
        """The shapes of the tensors that the layer's file holds, by the model's names."""
        return layer_shapes(self.decoder, layer)

    def repeat_layer(
        self, layer: int, weights: Sequence[Weights], found: Tensors, streams: Streams, report: Progress
    ) -> None:
        """Run a layer on every stream, with the merged tensors of its file."""
        names, (base, *experts) = self.decoder.layer_tensors(layer), weights
        merged = {key: _placed(found[name], base[key]) for key, name in names.items()}
        for number, batch in enumerate(streams.batches):
            streams.run_layer(MERGED, number, merged)
            streams.run_layer(EXPERT, number, self._owners(base, experts)[batch.task])
            report(len(batch.rows) * len(self.maps[layer].groups))

    def finish(self, streams: Streams, report: Progress) -> Tensors:
        """The output head's tensors by the model's names, solved without a prior; none if it stays the anchor's."""
        head, decoder = self.head, self.decoder
        if head is None:
            return {}
        self.stage = "output head"
        anchor = read_edges(decoder, self.anchor, [name for name in (head.weight, head.bias) if name])
        solved = {name: tensor.clone() for name, tensor in anchor.items()}
        rows, columns = head.matrix(anchor).shape
        setting, step = self.setting, max(1, HEAD_ELEMENTS // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            tasks = (self._head_tokens(head, task, part, streams, report) for task in range(len(self.owners)))
            change = solve_maps(head.matrix(anchor)[part], tasks, setting, expected=streams.tokens)
            assert isinstance(change, Change)  # there are tokens
            if change.ridge is None:
                LOG.warning("The output head keeps the anchor's weights (its inputs are not finite)")
                return {}
            setting = replace(setting, ridge=change.ridge)  # the choice of the first part holds for the whole head
            solved[head.weight][part] += change.matrix
            if head.bias is not None:
                own = [read_edges(decoder, model, [head.bias])[head.bias][part] for model in self.owners]
                solved[head.bias][part] = change.offset(anchor[head.bias][part], torch.stack(own))
        return solved

    def _head_tokens(
        self, head: LinearMap, task: int, rows: slice, streams: Streams, report: Progress
    ) -> Iterator[Tokens]:
        """The head's inputs in the merged model, and what some rows of the task's model's head make of that model's."""
        decoder, owner, tail = self.decoder, self.owners[task], tail_tensors(self.decoder)
        merged_tail, own_tail = (read_edges(decoder, model, tail) for model in (self.anchor, owner))
        own = head.matrix(read_edges(decoder, owner, [head.weight]))[rows]
        for number, batch in streams.batches_of(task):
            given = batch.unpadded(head_input(decoder, streams.hidden(MERGED, number), merged_tail))
            own_given = batch.unpadded(head_input(decoder, streams.hidden(EXPERT, number), own_tail))
            yield Tokens(given, own_given @ own.T, batch.samples, batch.join(self.setting.weights))
            if rows.start == 0:
                report(len(batch.rows))


def layer_shapes(decoder: Decoder, layer: int) -> dict[str, torch.Size]:
    """The shapes of the tensors that a layer's file holds, by the model's names."""
    state = decoder.layers[layer].state_dict()
    return {name: state[key].shape for key, name in decoder.layer_tensors(layer).items()}


def _placed(merged: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A merged tensor where the base model's is: on its device, or a mixture's stack that is read expert by expert."""
    return stack_of(merged, base.device) if isinstance(base, ExpertStack) else merged.to(base.device)
