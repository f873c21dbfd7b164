"""A method on hidden-state streams: the models that it follows, and its computation in each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from mergekit_slta.engine.batches import Tasks
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Source, Streams
from mergekit_slta.layers.decoder import Decoder, Weights
from mergekit_slta.models.checkpoint import Checkpoint

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
            weights: the layer's tensors of each model.
            streams: the hidden states before the layer.

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
