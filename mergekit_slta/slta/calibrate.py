"""Calibration: stream the decoder layers, measure every submodule's feature deltas, keep their Gram matrices.

This is Algorithm 1 of arXiv 2504.10902 with its two loops over layers made one: given the base model's hidden states
before a layer, that layer needs nothing from any other, so one layer of each model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, Tasks, decoder_batches, halving_batches
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import logits
from mergekit_slta.layers.products import fast_products
from mergekit_slta.layers.submodules import layer_submodules
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.slta.features import LayerFeatures
from mergekit_slta.slta.gram import sample_grams

# Logits are wide: so many tokens of one sample are compared at once.
LOGIT_TOKENS = 64

Grams = dict[str, torch.Tensor]


@torch.no_grad()
@fast_products()
def calibrate(
    decoder: Decoder,
    models: Sequence[Checkpoint],
    tasks: Tasks,
    levels: Sequence[str],
    *,
    batch_tokens: int = 0,
    partial: Partial | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[int], object] = lambda samples: None,
) -> Grams:
    """Measure the Gram matrix of every submodule on every calibration sample (Algorithm 1 and Eq. 14).

    Args:
        decoder: the models' common decoder.
        models: the base model, then the ``T`` experts.
        tasks: the token ids of each expert's calibration samples.
        levels: the levels to measure.
        batch_tokens: the most positions in one forward pass; 0 fits it to the device, and halves it when memory
            runs out.
        partial: where to keep what is finished; calibration goes on from what it holds.
        ranks: the processes that share the batches.
        progress: told how many of this process's samples have passed another layer.

    Returns:
        Submodule name to [N, T, T] float64, rows ordered by task, then by sample.

    Raises:
        SltaError: a level does not apply to the models, a checkpoint's tensors are missing or not finite, or one
            sample does not fit into memory.
    """
    calibration = _Calibration(decoder, models, tasks, levels, partial, ranks or Ranks(), progress)
    return halving_batches(calibration.run, decoder, tasks, batch_tokens, calibration.ranks)


@dataclass
class _Calibration:
    """A calibration that can be taken up again after a crash, or with smaller batches; see ``calibrate``."""

    decoder: Decoder
    models: Sequence[Checkpoint]
    tasks: Tasks
    levels: Sequence[str]
    partial: Partial | None
    ranks: Ranks
    progress: Callable[[int], object]

    def __post_init__(self) -> None:
        self.submodules = [
            [name for level in self.levels for name in layer_submodules(self.decoder, level, layer)]
            for layer in range(len(self.decoder))
        ]
        self.layers, self.hidden = self.partial.take_up(self.ranks) if self.partial else (0, None)
        self.grams: Grams = self.partial.tensors(self.layers) if self.partial else {}
        self.reported = 0

    def run(self, positions: int) -> Grams:
        """Measure the layers that are not measured yet, with at most ``positions`` token positions at once."""
        # Stream 0 is the base model's; the model as a whole is compared on each expert's own stream too.
        sources = self.models if "model" in self.levels else self.models[:1]
        batches = decoder_batches(self.decoder, self.tasks, positions)
        streams = Streams(self.decoder, [[model] * len(self.tasks) for model in sources], batches, self.ranks)
        if self.hidden is not None:
            streams.resume(self.hidden, self.layers)
        self._report(self.layers * streams.samples - self.reported)
        for layer in range(self.layers, len(self.decoder)):
            self.grams |= self._measure_layer(layer, streams, len(sources))
            self.layers, self.hidden = layer + 1, streams.state
        if "model" in self.levels:
            self.grams["model"] = self.ranks.sum(self._logit_grams(streams))
            self._refuse_infinite({"model": self.grams["model"]})
        return self.grams

    def _measure_layer(self, layer: int, streams: Streams, count: int) -> Grams:
        names = self.decoder.layer_tensors(layer)
        weights = [model.read(names, self.decoder.base_model_prefix, self.decoder.device) for model in self.models]
        for model in self.models:
            model.prefetch(layer + 1)
        tokens = sum(len(token_ids) for task in self.tasks for token_ids in task)
        features = LayerFeatures(self.decoder, layer, weights, self.levels, tokens)
        grams = {name: self._no_grams() for name in self.submodules[layer]}
        for number, batch in enumerate(streams.batches):
            hidden, call = streams.hidden(0, number), streams.call(0, number)
            base = features.run_base(hidden, call)
            for name, gram in features.grams(base, hidden, call, batch.lengths):
                grams[name][list(batch.rows)] = gram
            streams.set_output(0, number, base.output, base.state)
            for stream in range(1, count):
                run = self.decoder.run(
                    layer, weights[stream], streams.hidden(stream, number), streams.call(stream, number)
                )
                streams.set_output(stream, number, run.output, run.state)
            self._report(len(batch.rows))
        grams = {name: self.ranks.sum(gram) for name, gram in grams.items()}
        self._refuse_infinite(grams)
        streams.finish_layer(self.partial, grams)
        return grams

    def _report(self, samples: int) -> None:
        """Report progress; what is computed again with smaller batches is taken back first."""
        self.reported += samples
        self.progress(samples)

    def _refuse_infinite(self, grams: Grams) -> None:
        for name, gram in grams.items():
            finite = gram.diagonal(dim1=1, dim2=2).isfinite().all(0).tolist()
            broken = [str(model) for model, fine in zip(self.models[1:], finite, strict=True) if not fine]
            if broken:
                raise SltaError(
                    f"The features of {', '.join(broken)} at {name} are not finite: the weights are so large that they "
                    "overflow float32, leave the model out or get a sound copy."
                )

    def _no_grams(self) -> torch.Tensor:
        experts = len(self.models) - 1
        return torch.zeros(sum(map(len, self.tasks)), experts, experts, dtype=torch.float64)

    def _logit_grams(self, streams: Streams) -> torch.Tensor:
        """The Gram matrices of the logits' change [N, T, T], from each model's hidden states after its last layer."""
        names = {name: name for name in self.decoder.edge_tensors()}
        edges = [model.read(names, self.decoder.base_model_prefix, self.decoder.device) for model in self.models]
        grams = self._no_grams()
        for row, states in streams.final():
            parts = zip(*(states[stream].split(LOGIT_TOKENS) for stream in range(len(edges))), strict=True)
            for part in parts:
                base, *experts = (self._logits(hidden, edge) for hidden, edge in zip(part, edges, strict=True))
                grams[row] += sample_grams([expert - base for expert in experts], [base.shape[1]])[0]
        return grams

    def _logits(self, hidden: torch.Tensor, edges: dict[str, torch.Tensor]) -> torch.Tensor:
        return logits(self.decoder, hidden[None].to(self.decoder.device), edges)
