"""featcal: every linear map by least squares, layer by layer in the order of the forward pass.

After RegMean++ and FeatCal (arXiv 2605.13030). Each sample of task t is in two hidden-state streams: the merged
model's as far as it is solved, and expert t's own. In each layer the linear maps are solved in the order in which they
feed each other. For a map with inputs x of the merged stream and x_t of expert t's, anchor W_a, and expert t's own W_t
and b_t:

    W = argmin  sum_t s_t sum_x |W x - y_t|^2 + ridge * K(W - W_a),    y_t = W_t (teacher * x_t + (1 - teacher) * x)
    b = the mean of b_t + y_t - W x over all tokens, task t weighted by s_t (see ``regression.Change.offset``)

with s_t and K as ``regression.py`` says. This differs from FeatCal in that the maps of one layer see each other's
solutions, in the share of the expert's input, in the weights of the tasks, and in that the output head is solved too.
Norms, embeddings, convolutions and routers are the anchor's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Source, Streams, Tasks, decoder_batches, halving_batches
from mergekit_slta.featcal.anchor import Anchor
from mergekit_slta.featcal.groups import groups_by_layer
from mergekit_slta.featcal.layer import EXPERT, MERGED, LayerSolver, Regression
from mergekit_slta.featcal.regression import Change, NormalEquations
from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import head_input, tail_tensors
from mergekit_slta.layers.maps import LinearMap, output_head
from mergekit_slta.layers.products import fast_products
from mergekit_slta.models.checkpoint import Checkpoint

LOG = logging.getLogger(__name__)

ANCHOR = 2  # the stream of the anchor's own, for the report only
ERRORS = {MERGED: "error.merged", ANCHOR: "error.anchor"}
# So many elements the sums of the output head may have; a larger head is solved in parts.
HEAD_ELEMENTS = 2**28

Progress = Callable[[str, int], object]


@torch.no_grad()
@fast_products()
def feature_merge(
    decoder: Decoder,
    anchor: Anchor,
    experts: Sequence[Checkpoint],
    tasks: Tasks,
    partial: Partial,
    *,
    regression: Regression = Regression(),  # noqa: B008
    head: bool = True,
    compare: bool = False,
    batch_tokens: int = 0,
    ranks: Ranks | None = None,
    progress: Progress = lambda stage, samples: None,
) -> None:
    """Solve every linear map, layer by layer, and write each layer's tensors when it is finished.

    Args:
        decoder: the models' common decoder.
        anchor: the model that the solution stays near.
        experts: the ``T`` experts.
        tasks: the token ids of each expert's calibration samples.
        partial: where the layers are written; what is finished there is not computed again.
        regression: ridge and teacher.
        head: solve the output head too.
        compare: follow the anchor's own features as well, for the report.
        batch_tokens: as for ``calibrate``.
        ranks: the processes that share the batches.
        progress: told the stage, and how many of this process's samples have passed it.

    Raises:
        SltaError: a checkpoint's tensors are missing or not finite, or one sample does not fit into memory.
    """
    ranks = ranks or Ranks()
    merge = _FeatureMerge(decoder, anchor, experts, tasks, partial, regression, head, compare, ranks, progress)
    halving_batches(merge.run, decoder, tasks, batch_tokens, ranks)


def stages(decoder: Decoder, head: bool) -> int:
    """How many stages a feature merge has: the groups of maps, and the output head."""
    return sum(len(maps.groups) for maps in groups_by_layer(decoder)) + (head and output_head(decoder) is not None)


@dataclass
class _FeatureMerge:
    """A feature merge that can be taken up again after a crash, or with smaller batches; see ``feature_merge``."""

    decoder: Decoder
    anchor: Anchor
    experts: Sequence[Checkpoint]
    tasks: Tasks
    partial: Partial
    regression: Regression
    head: bool
    compare: bool
    ranks: Ranks
    progress: Progress

    def __post_init__(self) -> None:
        self.maps = groups_by_layer(self.decoder)
        self.layers, self.hidden = self.partial.take_up(self.ranks)
        self.reported = 0
        for kept in dict.fromkeys(maps.kept for maps in self.maps if maps.kept):
            numbered = any(part.isdigit() for name in kept for part in name.split("."))  # most of a mixture's weights
            LOG.log(logging.WARNING if numbered else logging.INFO, "Never solved, so the anchor's: %s", ", ".join(kept))

    def run(self, positions: int) -> None:
        """Solve the layers that are not solved yet, then the head, with at most ``positions`` tokens at once."""
        streams = self._streams(positions)
        done = sum(len(maps.groups) for maps in self.maps[: self.layers])
        self._report("embeddings", done * streams.samples - self.reported)
        for layer in range(self.layers, len(self.decoder)):
            tensors = self._solve_layer(layer, streams)
            streams.finish_layer(self.partial, tensors)
            self.layers, self.hidden = layer + 1, streams.state
        tensors = self._solve_head(streams) if self.head else {}
        if self.ranks.first:
            self.partial.finish(tensors)
        self.ranks.wait()

    def _report(self, stage: str, samples: int) -> None:
        """Report progress; what is computed again with smaller batches is taken back first."""
        self.reported += samples
        self.progress(stage, samples)

    def _streams(self, positions: int) -> Streams:
        anchors = [self.anchor] * len(self.tasks)
        sources: list[Sequence[Source]] = [anchors, self.experts, anchors] if self.compare else [anchors, self.experts]
        batches = decoder_batches(self.decoder, self.tasks, positions)
        streams = Streams(self.decoder, sources, batches, self.ranks)
        if self.hidden is not None:
            streams.resume(self.hidden, self.layers)
        return streams

    def _solve_layer(self, layer: int, streams: Streams) -> dict[str, torch.Tensor]:
        """The merged layer's tensors by the model's names, and how far its output is from the experts'."""
        names = self.decoder.layer_tensors(layer)
        models = [self.anchor.models[0], *self.experts]
        read = [model.read(names, self.decoder.base_model_prefix, self.decoder.device) for model in models]
        for model in models:
            model.prefetch(layer + 1)
        anchor, experts, maps = self.anchor.blend(names, read), read[1:], self.maps[layer]
        solver = LayerSolver(self.decoder, layer, maps, anchor, experts, streams, self.regression, self.ranks)
        for group in maps.groups:
            solver.solve(group, functools.partial(self._report, f"layer {layer} of {len(self.decoder)}, {group}"))
        errors = self._advance_streams(solver, anchor, streams)
        return {names[key]: tensor for key, tensor in solver.merged.items()} | errors

    def _advance_streams(self, solver: LayerSolver, anchor: Weights, streams: Streams) -> dict[str, torch.Tensor]:
        """Set what the layer makes of every stream; returns each stream's mean relative error by task [T]."""
        compared = [MERGED, ANCHOR] if self.compare else [MERGED]
        sums = torch.zeros(len(compared) + 1, len(self.tasks), dtype=torch.float64)
        for number, batch in enumerate(streams.batches):
            done = {stream: solver.output(stream, number) for stream in (MERGED, EXPERT)}
            if self.compare:
                hidden, call = streams.hidden(ANCHOR, number), streams.call(ANCHOR, number)
                run = self.decoder.run(solver.layer, anchor, hidden, call)
                done[ANCHOR] = run.output.cpu(), run.state
            outputs = {stream: output for stream, (output, _) in done.items()}
            own = batch.unpadded(outputs[EXPERT])
            norms = own.norm(dim=1)  # zero where an embedding is: such a token has no relative error
            for row, stream in enumerate(compared):
                errors = (batch.unpadded(outputs[stream]) - own).norm(dim=1) / norms
                sums[row, batch.task] += errors[norms > 0].sum(dtype=torch.float64)
            sums[-1, batch.task] += (norms > 0).sum()
            for stream, (output, state) in done.items():
                streams.set_output(stream, number, output, state)
        self.ranks.sum(sums)
        return {ERRORS[stream]: sums[row] / sums[-1] for row, stream in enumerate(compared)}

    def _solve_head(self, streams: Streams) -> dict[str, torch.Tensor]:
        """The output head's tensors by the model's names, solved a part of its rows at a time."""
        head = output_head(self.decoder)
        if head is None:
            return {}
        names = [name for name in (head.weight, head.bias) if name]
        anchor = self._read(self.anchor, names)
        rows, columns = head.matrix(anchor).shape
        step = max(1, HEAD_ELEMENTS // columns)
        solved = {name: tensor.clone() for name, tensor in anchor.items()}
        bias = head.bias
        offsets = torch.stack([self._read(expert, [bias])[bias] for expert in self.experts]) if bias else None
        for start in range(0, rows, step):
            part = slice(start, start + step)
            change = self._change_head(head, anchor, part, streams)
            if change.ridge is None:
                LOG.warning("The output head keeps the anchor's weights (no solution at any ridge)")
                return {}
            if change.enlarged:
                LOG.warning("The output head needed a ridge of %g", change.ridge)
            solved[head.weight][part] += change.matrix
            if bias is not None and offsets is not None:
                solved[bias][part] = change.offset(anchor[bias][part], offsets[:, part])
        return solved

    def _change_head(self, head: LinearMap, anchor: Weights, rows: slice, streams: Streams) -> Change:
        matrix = head.matrix(anchor)[rows]
        tail = tail_tensors(self.decoder)
        merged_tail = self._read(self.anchor, tail)

        def gather(equations: NormalEquations) -> None:
            for task, expert in enumerate(self.experts):
                own_tail, own = self._read(expert, tail), head.matrix(self._read(expert, [head.weight]))[rows]
                for number, batch in streams.batches_of(task):
                    given = batch.unpadded(head_input(self.decoder, streams.hidden(MERGED, number), merged_tail))
                    own_given = batch.unpadded(head_input(self.decoder, streams.hidden(EXPERT, number), own_tail))
                    targets = self.regression.targets(own, given, own_given @ own.T)
                    equations.add(given, targets - given @ matrix.T)
                    if rows.start == 0 and not equations.exact:
                        self._report("output head", len(batch.rows))
                equations.finish_task()

        outputs, inputs = matrix.shape
        equations = NormalEquations(inputs, outputs, self.regression.ridge, self.decoder.device, ranks=self.ranks)
        gather(equations)
        return equations.solve(gather)

    def _read(self, model: Source, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return model.read({name: name for name in names}, self.decoder.base_model_prefix, self.decoder.device)
