"""Measure feature deltas of models between the base model and the experts, as calibration measures experts.

A setting c [T] stands for the weights theta_0 + sum_t c_t tau_t. Each setting runs on the base model's input to a
layer, or as a whole model; the result are the Gram matrices of its feature deltas.

Shapes: ``T`` experts, ``K`` settings, ``N`` samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.engine.loop import LayerMethod, Progress
from mergekit_slta.engine.streams import Streams, read_edges
from mergekit_slta.models.checkpoint import Blend, Source, Tensors, blend
from mergekit_slta.slta.grams import BASE, ExpertRun, Grams, LayerFeatures, logit_grams, of_all_ranks, sample_grams
from mergekit_slta.slta.weights import layer_parts

BETWEEN = "a model between the base model and the experts"


@dataclass
class Interpolation(LayerMethod[Grams]):
    """Measures the Gram matrices of the settings' feature deltas on every submodule and sample.

    Memory holds one layer of the base model, of each expert and of one setting, and the features of all settings on
    one batch. At level ``model`` each setting has its own stream of hidden states.
    """

    levels: Sequence[str]  # to measure
    settings: torch.Tensor  # [K, T] float64

    def __post_init__(self) -> None:
        self.grams: Grams = {}  # [N, K, K] float64, rows ordered by task, then by sample

    def sources(self) -> list[list[Source]]:
        """The base model's stream; level ``model`` also needs each setting's own."""
        followed: list[Source] = [self.models[0]]
        if "model" in self.levels:
            followed += [Blend(self.models, setting) for setting in self.settings]
        return [[model] * len(self.tasks) for model in followed]

    def take_layer(self, layer: int, tensors: Sequence[Tensors], streams: Streams, report: Progress) -> Tensors:
        """Measure the layer's submodules with every setting, on the base model's inputs."""
        # A linear map's output is linear in its weights: its Gram matrices follow from the experts', without a run.
        no_runs = {"linear"} if layer_parts(self.decoder, "linear", layer) != [""] else set[str]()
        features = LayerFeatures(self.decoder, layer, tensors, [level for level in self.levels if level not in no_runs])
        maps = LayerFeatures(self.decoder, layer, tensors, [level for level in self.levels if level in no_runs])
        measured = {name: self._no_grams() for name in (*features.names, *maps.names)}
        for number, batch in enumerate(streams.batches):
            rows, hidden, call = list(batch.rows), streams.hidden(BASE, number), streams.call(BASE, number)
            base = streams.run_layer(BASE, number, tensors[0], inputs_of=features.modules | maps.modules)
            runs = list[ExpertRun]()
            for stream, setting in enumerate(self.settings, 1):
                blended = blend(tensors[0], tensors[1:], setting)
                runs.append(features.run(blended, base, hidden, call))
                if "model" in self.levels:
                    streams.run_layer(stream, number, blended)
            for name, deltas in features.deltas(base, runs):
                measured[name][rows] = sample_grams(deltas, batch.lengths)
            for name, grams in maps.grams(base, hidden, call, batch.lengths):
                measured[name][rows] = self.settings @ grams @ self.settings.T
            report(len(rows))
        self.grams |= of_all_ranks(measured, self.ranks, self.models[0], [BETWEEN] * len(self.settings))
        return {}

    def finish(self, streams: Streams, report: Progress) -> Grams:
        """All Gram matrices, those of the logits' change included."""
        if "model" in self.levels:
            base, *experts = [read_edges(self.decoder, model, self.decoder.logit_tensors) for model in self.models]
            points = [torch.zeros(len(self.models) - 1), *self.settings]
            zeros = self._no_grams()
            gram = logit_grams(self.decoder, streams, zeros, lambda: (blend(base, experts, own) for own in points))
            self.grams |= of_all_ranks({"model": gram}, self.ranks, self.models[0], [BETWEEN] * len(self.settings))
        return self.grams

    def _no_grams(self) -> torch.Tensor:
        samples, settings = sum(map(len, self.tasks)), len(self.settings)
        return torch.zeros(samples, settings, settings, dtype=torch.float64)
