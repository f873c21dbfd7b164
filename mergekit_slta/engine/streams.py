"""Hidden-state streams: the samples' hidden states before the next layer, in batches.

A stream holds every sample's hidden states as one model computes them: the base model, an expert or a merge. Streams do
not know what is measured on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import transformers

from mergekit_slta.engine.batches import Batch
from mergekit_slta.layers.calls import LayerCall, State, Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import embed
from mergekit_slta.layers.forms import embedding_tensors


class Source(Protocol):
    """Weights that a stream begins with."""

    def read(
        self, names: Mapping[str, str], model: transformers.PreTrainedModel, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does."""


def read_edges(decoder: Decoder, model: Source, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors outside the layers to the device, by the model's names."""
    return model.read({name: name for name in names}, decoder.model, decoder.device)


def takes_little(device: torch.device, elements: int, share: float) -> bool:
    """Whether float32 elements take at most a share of a GPU's memory; false on every other device."""
    if device.type != "cuda":
        return False
    return elements * torch.float32.itemsize <= share * torch.cuda.get_device_properties(device).total_memory


class Streams:
    """A cache of the hidden states before the next layer, by stream and batch.

    A method fetches a batch's ``hidden`` states and the model's ``call`` of the next layer, and updates the batch by
    ``set_output``. ``advance`` deletes the layer's inputs, once all streams have its outputs.

    ``sources`` are for each stream the models that embed the samples of each task, ``batches`` this process's, and
    ``layer`` is the index of the next layer.
    """

    def __init__(self, decoder: Decoder, sources: Sequence[Sequence[Source]], batches: Sequence[Batch]) -> None:
        self.decoder = decoder
        self.layer = 0
        self.batches = batches
        width = decoder.model.config.get_text_config().hidden_size
        elements = 2 * len(sources) * width * sum(batch.token_ids.numel() for batch in self.batches)
        stays = takes_little(decoder.device, elements, share=1 / 8)  # before and after a layer
        self._place = decoder.device if stays else torch.device("cpu")
        self._cache: dict[tuple[int, int], _Cached] = {}
        self._following: dict[tuple[int, int], _Cached] = {}
        self._calls: dict[tuple[int, int], list[LayerCall]] = {}
        for stream, models in enumerate(sources):
            for model in dict.fromkeys(models):
                edges = read_edges(decoder, model, embedding_tensors(decoder))
                for number, batch in enumerate(self.batches):
                    if models[batch.task] is model:
                        hidden, self._calls[stream, number] = embed(decoder, batch.token_ids, edges)
                        self._cache[stream, number] = _Cached(self.kept(hidden), {})

    @property
    def tokens(self) -> int:
        """How many tokens this process has, without those of the padding."""
        return sum(sum(batch.lengths) for batch in self.batches)

    def batches_of(self, task: int) -> Iterator[tuple[int, Batch]]:
        """This process's batches of one task, with their numbers."""
        return ((number, batch) for number, batch in enumerate(self.batches) if batch.task == task)

    def hidden(self, stream: int, number: int) -> torch.Tensor:
        """A copy of a batch's hidden states [B, S, D] before the next layer, on the device that computes."""
        return self._cache[stream, number].hidden.to(self.decoder.device, copy=True)

    def call(self, stream: int, number: int) -> LayerCall:
        """The model's call of the next layer on a batch, with the tensors that the earlier layers have passed on."""
        call, state = self._calls[stream, number][self.layer], self._cache[stream, number].state
        return call.own({path: tensor.to(self.decoder.device, copy=True) for path, tensor in state.items()})

    def set_output(self, stream: int, number: int, output: torch.Tensor, state: State) -> None:
        """Set the next layer's output on a batch, and the tensors that it passes to later layers."""
        passed = self._cache[stream, number].state | {path: self.kept(tensor) for path, tensor in state.items()}
        self._following[stream, number] = _Cached(self.kept(output), passed)

    def run_layer(self, stream: int, number: int, weights: Weights) -> torch.Tensor:
        """Run the next layer on a batch of a stream, and set and return its output [B, S, D]."""
        run = self.decoder.run(self.layer, weights, self.hidden(stream, number), self.call(stream, number))
        self.set_output(stream, number, run.output, run.state)
        return run.output

    def advance(self) -> None:
        """Move on to the following layer, and delete this one's inputs."""
        self._cache, self._following = self._following, {}
        self.layer += 1

    def final(self) -> Iterator[tuple[int, dict[int, torch.Tensor]]]:
        """Each sample's row, and its hidden states [S, D] of every stream after the last layer."""
        streams = {stream for stream, _ in self._cache}
        for number, batch in enumerate(self.batches):
            for index, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
                yield row, {stream: self._cache[stream, number].hidden[index, :length] for stream in streams}

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where it waits for its next use: on a GPU that has memory for all of them, else on the host."""
        return tensor.to(self._place)


class _Cached(NamedTuple):
    """A batch's hidden states [B, S, D] before a layer, and what earlier layers have passed on."""

    hidden: torch.Tensor
    state: dict[tuple[Any, ...], torch.Tensor]
