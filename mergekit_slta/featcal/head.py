"""Solve the output head by least squares, as ``merge.py`` says, from the hidden states after the last layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mergekit_slta.engine.accumulator import Progress
from mergekit_slta.engine.streams import Streams, read_edges
from mergekit_slta.featcal.anchor import ActmatAnchor
from mergekit_slta.featcal.passage import EXPERT, MERGED
from mergekit_slta.featcal.regression import Change
from mergekit_slta.featcal.solving import Setting, Tokens, solve_maps
from mergekit_slta.layers.ends import head_input, tail_tensors
from mergekit_slta.layers.maps import LinearMap
from mergekit_slta.models.checkpoint import Checkpoint

LOG = logging.getLogger(__name__)

# The sums of the head's rows have at most this number of elements at once; a larger head is solved in parts.
HEAD_ELEMENTS = 2**28


@dataclass(frozen=True)
class HeadSolver:
    """The output head of a merge, once the layers are solved.

    Attributes:
        head: the head's map, by the model's names.
        anchor: the model that the solution stays near.
        experts: the model of each task, an expert or the base model.
        streams: the merged model's stream and the tasks' own models', after the last layer.
        setting: how maps are solved; the head has no prior.
        report: called with the number of samples that have passed.
    """

    head: LinearMap
    anchor: ActmatAnchor
    experts: Sequence[Checkpoint]
    streams: Streams
    setting: Setting
    report: Progress

    def solve(self) -> dict[str, torch.Tensor]:
        """The head's tensors by the model's names, one part of its rows after the other; none without a solution."""
        head = self.head
        anchor = read_edges(self.streams.decoder, self.anchor, [name for name in (head.weight, head.bias) if name])
        solved = {name: tensor.clone() for name, tensor in anchor.items()}
        rows, columns = head.matrix(anchor).shape
        ridge = self.setting.ridge
        step = max(1, HEAD_ELEMENTS // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            tasks = (self._tokens(expert, task, part) for task, expert in enumerate(self.experts))
            setting = replace(self.setting, ridge=ridge)
            change = solve_maps(head.matrix(anchor)[part], tasks, setting, expected=self.streams.tokens)
            assert isinstance(change, Change)  # there are tokens
            if change.ridge is None:
                LOG.warning("The output head keeps the anchor's weights (its inputs are not finite)")
                return {}
            ridge = change.ridge  # the choice of the first part holds for the whole head
            solved[head.weight][part] += change.matrix
            if head.bias is not None:
                own = [self._read(expert, [head.bias])[head.bias][part] for expert in self.experts]
                solved[head.bias][part] = change.offset(anchor[head.bias][part], torch.stack(own))
        return solved

    def _tokens(self, expert: Checkpoint, task: int, rows: slice) -> Iterator[Tokens]:
        """The head's inputs in the merged model, and what some rows of the expert's own head make of the expert's."""
        decoder, streams = self.streams.decoder, self.streams
        merged_tail, own_tail = (self._read(model, tail_tensors(decoder)) for model in (self.anchor, expert))
        own = self.head.matrix(self._read(expert, [self.head.weight]))[rows]
        for number, batch in streams.batches_of(task):
            given = batch.unpadded(head_input(decoder, streams.hidden(MERGED, number), merged_tail))
            own_given = batch.unpadded(head_input(decoder, streams.hidden(EXPERT, number), own_tail))
            yield Tokens(given, own_given @ own.T, batch.samples, batch.join(self.setting.weights))
            if rows.start == 0:
                self.report(len(batch.rows))

    def _read(self, model: ActmatAnchor | Checkpoint, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return read_edges(self.streams.decoder, model, names)
