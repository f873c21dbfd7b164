"""The loop over a model's layers that calibration, feature merges and linearity share.

A layer needs only the hidden states before it, so one layer of each model is in memory at a time. Each method has an
``Accumulator`` that uses the layers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from mergekit.common import ModelReference
from tqdm import tqdm

from mergekit_slta.engine.memory import room
from mergekit_slta.engine.partial import Hidden, Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Source, Streams, Tasks, decoder_batches, fitting_batch
from mergekit_slta.errors import SltaError, logger
from mergekit_slta.layers.decoder import Decoder, Weights
from mergekit_slta.layers.maps import routed_tensors
from mergekit_slta.layers.products import exact_products
from mergekit_slta.models.checkpoint import Checkpoint

LOG = logger(__name__)

MOST_READERS = 8

Result = TypeVar("Result")
Tensors = Mapping[str, torch.Tensor]
# Called with the number of this process's samples that have passed another step.
Progress = Callable[[int], object]


class ProgressBar(tqdm):
    """A progress bar that shows whole numbers where its steps are fractions of what it counts."""

    @property
    def format_dict(self) -> dict[str, Any]:
        shown = super().format_dict
        scale = shown["unit_scale"] or 1
        whole = {name: round(shown[name] * scale) for name in ("n", "total")}
        return shown | whole | {"unit_scale": False, "rate": shown["rate"] and shown["rate"] * scale}


@dataclass
class Accumulator(ABC, Generic[Result]):
    """What a method computes with each layer, and what it collects.

    Attributes:
        decoder: the models' common decoder.
        models: the models whose layers are read.
        tasks: the token ids of each task's samples.
        ranks: the processes that share the batches.
    """

    decoder: Decoder
    models: Sequence[Checkpoint]
    tasks: Tasks
    ranks: Ranks

    @abstractmethod
    def sources(self) -> Sequence[Sequence[Source]]:
        """For each hidden-state stream, the model that embeds the samples of each task."""

    def steps(self, layer: int) -> int:
        """How many steps a layer reports for each sample."""
        return 1

    def restore(self, partial: Partial, layers: int) -> None:
        """Load the results of the first ``layers`` layers, which an earlier process has written to ``partial``."""

    @abstractmethod
    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """Run a layer on every batch, and set its output on every stream. Called again after memory ran out.

        Args:
            layer: the layer's index.
            weights: the layer's tensors of each model.
            streams: the hidden states before the layer.
            report: called with the number of samples that have passed a step.

        Returns:
            The tensors to write, the same on all ranks.
        """

    @abstractmethod
    def finish(self, streams: Streams, report: Progress) -> Result:
        """Return the result, with the hidden states after the last layer at hand."""


@torch.no_grad()
@exact_products()
def pass_layers(
    accumulator: Accumulator[Result],
    *,
    batch_tokens: int = 0,
    partial: Partial | None = None,
    folder: Path | None = None,
    progress: Progress = lambda samples: None,
) -> Result:
    """Run all samples through the layers, one layer after the other.

    Args:
        accumulator: what to do with each layer.
        batch_tokens: the most token positions in one forward pass; 0 chooses by the device and the layers, and halves
            the number when memory runs out although everything that waits is on the host.
        partial: the folder for finished layers; the loop resumes after the layers in it.
        folder: a folder that keeps hidden states instead of the host's memory.
        progress: called with the number of this process's samples that have passed another step; negative when steps
            must be repeated with smaller batches.

    Raises:
        SltaError: a checkpoint's tensors are missing or not finite, or the chosen batches, or one sample, do not fit
            into memory.
    """
    device = accumulator.decoder.device
    positions = batch_tokens or fitting_batch(accumulator.decoder)
    with contextlib.closing(_Loop(accumulator, partial, folder, progress)) as loop:
        while True:
            try:
                return loop.run(positions)
            except torch.OutOfMemoryError as error:
                longest = max(len(token_ids) for samples in accumulator.tasks for token_ids in samples)
                if loop.on_device:
                    loop.on_device = False
                    LOG.warning("Out of memory on %s: continuing with what waits there on the host", device)
                elif batch_tokens or accumulator.ranks.count > 1 or positions <= longest:
                    raise SltaError(
                        f"{positions} token positions at once do not fit into the memory of {device}: "
                        "lower 'batch_tokens', and 'max_tokens' if one sample is too long; if that does not help, the "
                        "layers themselves are too large for it."
                    ) from error
                else:
                    positions //= 2
                    LOG.warning("Out of memory on %s: continuing with %d token positions at once", device, positions)
            except KeyboardInterrupt:
                if partial is not None and accumulator.ranks.first:
                    LOG.warning("Interrupted. To resume from %s, run the same command again.", partial.folder)
                raise
            loop.forget()  # not above, where the error still holds what the run had in memory


class _Ahead(NamedTuple):
    """What is read of the next layer while a layer is used.

    Attributes:
        stacks: the shapes of the tensors that are left out, because each routed expert is read when it is used.
        tensors: the others, by model.
    """

    stacks: dict[str, torch.Size]
    tensors: dict[ModelReference, Future[dict[str, torch.Tensor]]]


@dataclass
class _Loop(Generic[Result]):
    """The progress of ``pass_layers``, which lets it continue with less of a GPU's memory."""

    accumulator: Accumulator[Result]
    partial: Partial | None
    folder: Path | None
    progress: Progress

    def __post_init__(self) -> None:
        self.layers = 0  # that are finished
        self.hidden: Hidden | None = None  # the hidden states after them
        if self.partial is not None:
            self.layers, self.hidden = self.partial.take_up(self.accumulator.ranks)
            self.accumulator.restore(self.partial, self.layers)
        self.reported = 0
        self.reported_by_finished_layers: int | None = None
        device = self.accumulator.decoder.device
        # Whether what waits for its next use may stay on a GPU; several processes may share one, and cannot go back.
        self.on_device = device.type == "cuda" and self.accumulator.ranks.count == 1
        # On a GPU, threads read the next layer and write the last one, on streams of their own.
        pickled = device.type != "cpu" and any(model.pickled for model in self.accumulator.models)
        self.readers, self.writer = ThreadPoolExecutor(1 if pickled else MOST_READERS), ThreadPoolExecutor(1)
        self.reads, self.writes = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self.ahead: _Ahead | None = None
        self.written: Future[None] | None = None  # the last layer

    def run(self, positions: int) -> Result:
        """Run the unfinished layers, with at most ``positions`` token positions at once."""
        own = self.accumulator
        batches = decoder_batches(own.decoder, own.tasks, positions)
        streams = Streams(own.decoder, own.sources(), batches, own.ranks, self.folder, self.on_device)
        if self.hidden is not None:
            streams.resume(self.hidden, self.layers)
            self.hidden = streams.state
        if self.reported_by_finished_layers is None:
            self.reported_by_finished_layers = sum(map(own.steps, range(self.layers))) * streams.samples
        self._report(self.reported_by_finished_layers - self.reported)
        for layer in range(self.layers, len(own.decoder)):
            self._take_layer(layer, streams)
        self._finish_writing()
        return own.finish(streams, self._report)

    def forget(self) -> None:
        """Free what a run that ran out of memory has left there."""
        if self.ahead is not None:
            concurrent.futures.wait(self.ahead.tensors.values())
            self.ahead = None
        self._finish_writing()
        gc.collect()
        if self.accumulator.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # in pieces of the sizes that did not fit, and libraries need some besides torch

    def close(self) -> None:
        """End the threads, when the last layer is written."""
        self.readers.shutdown(cancel_futures=True)
        self.writer.shutdown()

    def _take_layer(self, layer: int, streams: Streams) -> None:
        own = self.accumulator
        tensors = own.take_layer(layer, self._read(layer), streams, self._report)
        streams.advance()
        self._save(layer, tensors, streams.state)
        self.layers, self.hidden = layer + 1, streams.state
        self.reported_by_finished_layers = self.reported

    def _save(self, layer: int, tensors: Tensors, hidden: Hidden) -> None:
        """Write a layer's results; where only this process computes, and on a GPU, the next layer goes on meanwhile."""
        partial, ranks = self.partial, self.accumulator.ranks
        if partial is None:
            return

        def write() -> None:
            with _on(self.writes):
                partial.save_hidden(layer, ranks.index, hidden)
                ranks.wait()
                if ranks.first:
                    partial.finish_layer(layer, tensors)

        if self.writes is not None:
            self.writes.wait_stream(torch.cuda.current_stream(self.writes.device))
        if self.writes is None or ranks.count > 1:
            write()
            return
        self._finish_writing()
        self.written = self.writer.submit(write)

    def _finish_writing(self) -> None:
        written, self.written = self.written, None
        if written is not None:
            written.result()

    def _read(self, layer: int) -> list[dict[str, torch.Tensor]]:
        """Read a layer of each model; what comes next is read while the layer is used.

        On a CPU the operating system reads it into its file cache; for another device, threads read it, to a GPU
        itself if that has room. The experts of a mixture are read one by one when they are used, unless a GPU has room
        for all of them.
        """
        decoder, models = self.accumulator.decoder, self.accumulator.models
        names, prefix = decoder.layer_tensors(layer), decoder.base_model_prefix
        stacks, futures = self.ahead or _Ahead(self._stacks(layer), {})
        found = {model: future.result() for model, future in futures.items()}
        self.ahead, futures = None, {}
        weights = [model.read(names, prefix, decoder.device, found.get(model.reference), stacks) for model in models]
        if decoder.device.type == "cpu":
            for model in models:
                model.prefetch(layer + 1)
        elif layer + 1 < len(decoder):
            whole = routed_tensors(decoder.layers[layer]).keys() - stacks
            later = self._stacks(layer + 1, sum(own[name].nbytes for own in weights for name in whole))
            following = {key: name for key, name in decoder.layer_tensors(layer + 1).items() if key not in later}
            target = decoder.device if self._room() else torch.device("cpu")
            once = {model.reference: model for model in models}  # an expert that is named twice is read once
            started = {key: self.readers.submit(self._fetch, model, following, target) for key, model in once.items()}
            self.ahead = _Ahead(later, started)
        return weights

    def _fetch(self, model: Checkpoint, names: Mapping[str, str], device: torch.device) -> dict[str, torch.Tensor]:
        with _on(self.reads):
            fetched = model.fetch(names, self.accumulator.decoder.base_model_prefix, device)
        if self.reads is not None:
            self.reads.synchronize()
        return fetched

    def _stacks(self, layer: int, freed: int = 0) -> dict[str, torch.Size]:
        """The shapes of a layer's tensors of routed experts, by their keys, if each expert is read when it is used.

        Args:
            layer: the layer's index.
            freed: the bytes of the experts on the GPU that are freed before.
        """
        decoder = self.accumulator.decoder
        stacks = {name: tensor.shape for name, tensor in routed_tensors(decoder.layers[layer]).items()}
        size = sum(map(math.prod, stacks.values())) * torch.float32.itemsize
        return {} if size * (len(self.accumulator.models) + 1) < self._room() + freed else stacks

    def _room(self) -> int:
        return room(self.accumulator.decoder.device) if self.on_device else 0

    def _report(self, samples: int) -> None:
        self.reported += samples
        self.progress(samples)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Work on a stream of a GPU; without one, leave a GPU that the machine may have alone, as torch's own does not."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
