"""Measure how much each expert changes each submodule's features: Algorithm 1 of arXiv 2504.10902.

For a submodule with input features x, gathered by running the base model on a sample, and expert b:

    Delta_b(x) = f(x; theta_b) - f(x; theta_0)                           the feature delta [S, D], without padding
    G_x[b, c]  = sum over tokens and dimensions of Delta_b(x) Delta_c(x)     the sample's Gram matrix [T, T] (Eq. 14)

The paper runs the base model through all layers, stores each submodule's inputs, and then goes over the submodules; the
engine's loop (``engine/loop.py``) does both layer by layer, so that no inputs are stored. Everything after the Gram
matrices is arithmetic on them (``solver.py``), and ``weights.py`` gives every tensor the weights of its submodule.

Shapes: ``N`` samples of all tasks, ``T`` experts, ``S`` tokens, ``D`` dimensions. Task T may be the base model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.engine.loop import LayerMethod, Progress
from mergekit_slta.engine.memory import batch_bytes, batch_shapes, children, edge_bytes, layer_bytes, states_bytes
from mergekit_slta.engine.streams import Streams, Tasks, read_edges
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.checkpoint import Checkpoint, Tensors
from mergekit_slta.slta.grams import Grams, LayerFeatures, logit_grams, of_all_ranks

BASE = 0  # the base model's stream; at level ``model``, streams 1 to T are the experts'


def calibration_bytes(decoder: Decoder, models: int, tasks: Tasks, level: str) -> int:
    """The bytes that it takes to measure so many models, the base model included, at a level."""
    streams, linear = models if level == "model" else 1, level == "linear"
    # Of each model the outputs of the layer's children and of a run of each branch, and their change with its parts; of
    # the last one what is inside the MLP; at level ``linear`` also the changes of all maps.
    shapes, hidden = batch_shapes(decoder, tasks), (children(decoder) + 4) * models + 1
    batch = batch_bytes(decoder, shapes, hidden, inner=5 if linear else 3, scores=models + 1)
    layers = (1 + linear) * layer_bytes(decoder, models) + batch
    return states_bytes(decoder, tasks, streams) + max(edge_bytes(decoder) * streams, layers)


@dataclass
class Calibration(LayerMethod[Grams]):
    """The Gram matrix [N, T, T] of every submodule on every calibration sample, rows ordered by task.

    ``models`` are the base model, then the ``T`` experts; the layers so far are in ``grams``.
    """

    levels: Sequence[str]

    def __post_init__(self) -> None:
        samples, experts = sum(map(len, self.tasks)), len(self.models) - 1
        self.shape = samples, experts, experts
        self.followed = range(len(self.models) if "model" in self.levels else 1)  # a stream for each of these models
        self.grams: Grams = {}

    def sources(self) -> list[list[Checkpoint]]:
        """[stream][task]: the model that embeds the samples; level ``model`` also needs each expert's own stream."""
        return [[self.models[stream]] * len(self.tasks) for stream in self.followed]

    def take_layer(self, layer: int, tensors: Sequence[Tensors], streams: Streams, report: Progress) -> Tensors:
        """Measure the layer's submodules on every sample, with the base model's inputs."""
        features = LayerFeatures(self.decoder, layer, tensors, self.levels)
        measured = {name: torch.zeros(self.shape, dtype=torch.float64) for name in features.names}
        for number, batch in enumerate(streams.batches):
            hidden, call = streams.hidden(BASE, number), streams.call(BASE, number)
            base = features.run_base(hidden, call)
            for name, grams in features.grams(base, hidden, call, batch.lengths):
                measured[name][list(batch.rows)] = grams
            streams.set_output(BASE, number, base.output, base.state)
            for stream in self.followed[1:]:
                streams.run_layer(stream, number, tensors[stream])
            report(len(batch.rows))
        return self._add(measured)

    def repeat_layer(
        self, layer: int, tensors: Sequence[Tensors], stored: Tensors, streams: Streams, report: Progress
    ) -> None:
        """Take over the Gram matrices of a layer's file, and run the layer without measuring its submodules again."""
        self.grams |= stored
        for number, batch in enumerate(streams.batches):
            for stream in self.followed:
                streams.run_layer(stream, number, tensors[stream])
            report(len(batch.rows))

    def finish(self, streams: Streams, report: Progress) -> Grams:
        """All Gram matrices, those of the model as a whole included."""
        if "model" in self.levels:
            edges = [read_edges(self.decoder, model, self.decoder.logit_tensors) for model in self.models]
            zeros = torch.zeros(self.shape, dtype=torch.float64)
            self._add({"model": logit_grams(self.decoder, streams, zeros, lambda: edges)})
        return self.grams

    def _add(self, measured: Grams) -> Grams:
        """Add the Gram matrices of all ranks' samples."""
        grams = of_all_ranks(measured, self.ranks, self.models[0], self.models[1:])
        self.grams |= grams
        return grams
