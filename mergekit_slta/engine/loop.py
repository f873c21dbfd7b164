"""The loop over a model's layers that calibration, feature merges, linearity and scores share.

1. Embed all samples: ``Streams`` is the cache of their hidden states before the next layer.
2. For each layer, wait until the reader thread has this layer of every model, and let it read the next one.
   - A layer that an earlier run has finished: load its file, and set the layer's output on every stream.
   - Any other layer: measure or solve it on every batch, set its output on every stream, and write its file.
   Then the layer's outputs take the place of its inputs in the cache.
3. Finish with the hidden states after the last layer, for the output head.

One layer of each model is in memory at a time, beside what is read ahead of the next one. When the memory of a single
process runs out, the loop begins again with half the token positions in a batch. A method is an ``Accumulator``; the
loop knows none of them.
"""

from __future__ import annotations

import gc
import logging

import torch

from mergekit_slta.engine.accumulator import Accumulator, Progress, Result
from mergekit_slta.engine.batches import decoder_batches, fitting_batch
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.reader import Reader
from mergekit_slta.engine.streams import Streams
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.products import exact_products

LOG = logging.getLogger(__name__)


@torch.no_grad()
@exact_products()
def pass_layers(
    accumulator: Accumulator[Result],
    *,
    partial: Partial | None = None,
    progress: Progress = lambda samples: None,
) -> Result:
    """Run all samples through the layers, one layer after the other.

    Args:
        accumulator: the method.
        partial: the folder of finished layers, which are not computed again.
        progress: called with the number of this process's samples that have passed another step; negative when all
            steps are repeated with smaller batches.

    Raises:
        SltaError: a checkpoint's tensors are missing or not finite, a layer's file cannot be written, or one sample, or
            with several processes one batch, does not fit into memory.
    """
    device, positions = accumulator.decoder.device, fitting_batch(accumulator.decoder)
    longest = max(len(token_ids) for samples in accumulator.tasks for token_ids in samples)
    while True:
        steps: list[int] = []

        def report(samples: int) -> None:
            steps.append(samples)  # noqa: B023
            progress(samples)

        try:
            return _run(accumulator, positions, partial, report)
        except torch.OutOfMemoryError as error:
            fix = "run one process alone, which takes fewer" if accumulator.ranks.count > 1 else "lower 'max_tokens'"
            if accumulator.ranks.count > 1 or positions <= longest:
                raise SltaError(
                    f"{positions} token positions at once do not fit into the memory of {device}: {fix}; if that does "
                    "not help, the layers themselves are too large for it."
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
    batches = decoder_batches(decoder, accumulator.tasks, positions, ranks)
    streams = Streams(decoder, accumulator.sources(), batches)
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
