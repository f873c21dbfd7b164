"""Algorithm 1 of arXiv 2504.10902: measure every submodule's feature deltas, and keep their Gram matrices.

The algorithm runs the base model over its layers, keeping each submodule's inputs, and then goes over the submodules.
Here the two loops over layers are one, that of ``engine.passes``, so that no inputs have to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.passes import Accumulator, Progress, pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, Tasks, read_edges
from mergekit_slta.errors import SltaError, logger
from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import logit_tensors, logits
from mergekit_slta.layers.submodules import fallbacks, layer_submodules
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.slta.features import LayerFeatures
from mergekit_slta.slta.gram import sample_grams

LOG = logger(__name__)

# Logits are wide: this many tokens of one sample are compared at once.
LOGIT_TOKENS = 64

# Submodule name to [N, T, T] float64, for N samples and T experts.
Grams = dict[str, torch.Tensor]


def calibrate(
    decoder: Decoder,
    models: Sequence[Checkpoint],
    tasks: Tasks,
    levels: Sequence[str],
    *,
    batch_tokens: int = 0,
    partial: Partial | None = None,
    ranks: Ranks | None = None,
    progress: Progress = lambda samples: None,
) -> Grams:
    """Measure the Gram matrix of every submodule on every calibration sample (Algorithm 1 and Eq. 14).

    Args:
        decoder: the models' common decoder.
        models: the base model, then the ``T`` experts.
        tasks: the token ids of each expert's calibration samples.
        levels: the levels to measure.
        batch_tokens, partial: as for ``pass_layers``.
        ranks: the processes that share the batches.
        progress: called with the number of this process's samples that have passed another layer.

    Returns:
        Submodule name to [N, T, T] float64, rows ordered by task, then by sample.

    Raises:
        SltaError: a level does not apply to the models, a checkpoint's tensors are missing or not finite, or one
            sample does not fit into memory.
    """
    calibration = _Calibration(decoder, models, tasks, ranks or Ranks(), levels)
    return pass_layers(calibration, batch_tokens=batch_tokens, partial=partial, progress=progress)


@dataclass
class _Calibration(Accumulator[Grams]):
    """The Gram matrices of the layers that were taken; see ``calibrate``."""

    levels: Sequence[str]

    def __post_init__(self) -> None:
        self.lengths = [len(token_ids) for samples in self.tasks for token_ids in samples]
        self.submodules = [
            [name for level in self.levels for name in layer_submodules(self.decoder, level, layer)]
            for layer in range(len(self.decoder))
        ]
        for note in (note for level in self.levels for note in fallbacks(self.decoder, level)):
            LOG.warning("%s", note)
        self.grams: Grams = {}

    def sources(self) -> list[list[Checkpoint]]:
        """The base model's stream; level ``model`` also needs each expert's own stream."""
        return [[model] * len(self.tasks) for model in (self.models if "model" in self.levels else self.models[:1])]

    def restore(self, partial: Partial, layers: int) -> None:
        """Take the Gram matrices that an earlier process has measured."""
        self.grams = partial.tensors(layers)

    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Grams:
        """Measure the layer's submodules on every sample, with the base model's inputs."""
        features = LayerFeatures(self.decoder, layer, weights, self.levels, sum(self.lengths))
        measured = {name: self._no_grams() for name in self.submodules[layer]}
        for number, batch in enumerate(streams.batches):
            hidden, call = streams.hidden(0, number), streams.call(0, number)
            base = features.run_base(hidden, call)
            for name, grams in features.grams(base, hidden, call, batch.lengths):
                measured[name][list(batch.rows)] = grams
            streams.set_output(0, number, base.output, base.state)
            if "model" in self.levels:
                for stream, own in enumerate(weights[1:], 1):
                    streams.run_layer(stream, number, own)
            report(len(batch.rows))
        return self._keep(measured)

    def finish(self, streams: Streams, report: Progress) -> Grams:
        """All Gram matrices, those of the model as a whole included."""
        if "model" in self.levels:
            self._keep({"model": self._logit_grams(streams)})
        return self.grams

    def _no_grams(self) -> torch.Tensor:
        experts = len(self.models) - 1
        return torch.zeros(len(self.lengths), experts, experts, dtype=torch.float64)

    def _keep(self, measured: Grams) -> Grams:
        """Sum the Gram matrices over the ranks, each of which holds its own samples, and keep them."""
        grams = {name: self.ranks.sum(own) for name, own in measured.items()}
        for name, gram in grams.items():
            finite = gram.diagonal(dim1=1, dim2=2).isfinite().all(0).tolist()
            broken = [str(model) for model, fine in zip(self.models[1:], finite, strict=True) if not fine]
            if broken:
                raise SltaError(
                    f"The features of {', '.join(broken)} at {name} are not finite: the weights are so large that they "
                    "overflow float32, leave the model out or get a sound copy."
                )
        self.grams |= grams
        return grams

    def _logit_grams(self, streams: Streams) -> torch.Tensor:
        """The Gram matrices of the logits' change [N, T, T], from each model's hidden states after its last layer."""
        edges = [read_edges(self.decoder, model, logit_tensors(self.decoder)) for model in self.models]
        grams = self._no_grams()
        for row, states in streams.final():
            for part in zip(*(states[stream].split(LOGIT_TOKENS) for stream in range(len(edges))), strict=True):
                base, *experts = (
                    logits(self.decoder, hidden[None].to(self.decoder.device), own)
                    for hidden, own in zip(part, edges, strict=True)
                )
                grams[row] += sample_grams([expert - base for expert in experts], [base.shape[1]])[0]
        return grams
