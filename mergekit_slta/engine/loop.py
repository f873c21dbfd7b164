"""The loop over a model's layers that calibration, feature merges, linearity and scores share.

1. Embed all samples: ``Streams`` is the cache of their hidden states before the next layer.
2. For each layer, wait until a thread has read it of each model, and let the thread read the next one.
   - A layer that an earlier run has finished: load its file, and run the streams through the layer with it.
   - Any other layer: measure or solve it on every batch, set its output on every stream, and write its file.
   Then the layer's outputs take the place of its inputs in the cache.
3. Finish with the hidden states after the last layer, for the output head.

One layer of each model is in memory at a time, beside what is read ahead of the next one. When memory runs out, the
loop begins again with half the token positions in a batch. A method is an ``Accumulator``; the loop knows none of them.
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.reader import Reader
from mergekit_slta.engine.streams import Source, Streams, Tasks, decoder_batches, fitting_batch
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder, Weights
from mergekit_slta.layers.products import exact_products
from mergekit_slta.models.checkpoint import Checkpoint

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")
Tensors = Mapping[str, torch.Tensor]
# Called with the number of this process's samples that have passed another step.
Progress = Callable[[int], object]


@dataclass
class Accumulator(ABC, Generic[Result]):
    """A method: the streams that it follows, and its computation in each layer.

    Attributes:
        decoder: the models' common decoder.
        models: the models whose layers are read.
        tasks: the token ids of each task's samples; there may be more tasks than experts.
        ranks: the processes that share the batches.
    """

    decoder: Decoder
    models: Sequence[Checkpoint]
    tasks: Tasks
    ranks: Ranks

    @abstractmethod
    def sources(self) -> Sequence[Sequence[Source]]:
        """For each hidden-state stream, the model that embeds the samples of each task."""

    @abstractmethod
    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """Run a layer on every batch, and set its output on every stream; called again after memory ran out.

        Args:
            layer: the layer's index.
            weights: the layer's tensors of each model.
            streams: the hidden states before the layer.
            report: called with the number of samples that have passed a step.

        Returns:
            The tensors of the layer's file, the same on all ranks.
        """

    def shapes(self, layer: int) -> Mapping[str, Sequence[int]]:
        """The names and shapes of tensors without which a layer's file is computed again."""
        return {}

    def repeat_layer(
        self, layer: int, weights: Sequence[Weights], found: Tensors, streams: Streams, report: Progress
    ) -> None:
        """Set the output of a finished layer on every stream, given the tensors ``found`` in the layer's file."""
        raise NotImplementedError("a method whose layers are written repeats them")

    @abstractmethod
    def finish(self, streams: Streams, report: Progress) -> Result:
        """The result, with the hidden states after the last layer at hand."""


@torch.no_grad()
@exact_products()
def pass_layers(
    accumulator: Accumulator[Result],
    *,
    batch_tokens: int = 0,
    partial: Partial | None = None,
    progress: Progress = lambda samples: None,
) -> Result:
    """Run all samples through the layers, one layer after the other.

    Args:
        accumulator: the method.
        batch_tokens: the most token positions in one forward pass; 0 chooses by the device and the layers, and halves
            the number when memory runs out.
        partial: the folder of finished layers, which are not computed again.
        progress: called with the number of this process's samples that have passed another step; negative when all
            steps are repeated with smaller batches.

    Raises:
        SltaError: a checkpoint's tensors are missing or not finite, a layer's file cannot be written, or the batches
            that the recipe asks for, or one sample, do not fit into memory.
    """
    device, positions = accumulator.decoder.device, batch_tokens or fitting_batch(accumulator.decoder)
    longest = max(len(token_ids) for samples in accumulator.tasks for token_ids in samples)
    while True:
        steps: list[int] = []

        def report(samples: int) -> None:
            steps.append(samples)  # noqa: B023
            progress(samples)

        try:
            return _run(accumulator, positions, partial, report)
        except torch.OutOfMemoryError as error:
            if batch_tokens or accumulator.ranks.count > 1 or positions <= longest:
                raise SltaError(
                    f"{positions} token positions at once do not fit into the memory of {device}: "
                    "lower 'batch_tokens', and 'max_tokens' if one sample is too long; if that does not help, the "
                    "layers themselves are too large for it."
                ) from error
        positions //= 2
        LOG.warning("Out of memory on %s: beginning again with %d token positions at once", device, positions)
        progress(-sum(steps))
        gc.collect()  # not above, where the error still holds what the run had in memory
        if device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps freed blocks in sizes that no longer fit


def _run(accumulator: Accumulator[Result], positions: int, partial: Partial | None, report: Progress) -> Result:
    """The loop, with at most ``positions`` token positions at once."""
    decoder, ranks = accumulator.decoder, accumulator.ranks
    layers = range(len(decoder))
    finished: set[int] = set()
    if partial is not None:
        finished = partial.finished([accumulator.shapes(layer) for layer in layers])
        ranks.require_equal(len(finished), partial.folder)
    batches = decoder_batches(decoder, accumulator.tasks, positions)
    streams = Streams(decoder, accumulator.sources(), batches, ranks)
    with Reader(decoder, accumulator.models) as reader:
        for layer in layers:
            # The weights get no name here, so that they are freed before the next layer's are made.
            if partial is not None and layer in finished:
                accumulator.repeat_layer(layer, reader.take(layer), partial.load(layer), streams, report)
            else:
                tensors = accumulator.take_layer(layer, reader.take(layer), streams, report)
                if partial is not None and ranks.first:
                    partial.finish_layer(layer, tensors)
            streams.advance()
    return accumulator.finish(streams, report)
