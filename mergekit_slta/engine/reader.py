"""Read the layers of several models, each while the layer before is used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from mergekit_slta.engine.streams import takes_little
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import routed_tensors
from mergekit_slta.models.checkpoint import Checkpoint


class Reader:
    """Reads one layer of each model after the other; one thread reads the next layer meanwhile.

    On a GPU the thread copies the layer there, in its checkpoint's dtype. On another device it has the system read the
    layer into its file cache, which takes no memory of the process.
    """

    def __init__(self, decoder: Decoder, models: Sequence[Checkpoint]) -> None:
        self._decoder = decoder
        self._models = models
        for model in models:
            model.open()  # not in the other thread: mergekit keeps its options apart for each thread
        self._thread = ThreadPoolExecutor(1)
        on_gpu = decoder.device.type == "cuda"
        self._target = decoder.device if on_gpu else torch.device("cpu")
        self._stream = torch.cuda.Stream(decoder.device) if on_gpu else None
        self._ahead: Future[list[dict[str, torch.Tensor]]] | None = self._thread.submit(self._fetch, 0)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def take(self, layer: int) -> list[dict[str, torch.Tensor]]:
        """The tensors of a layer of each model, float32 on the decoder's device; layers are taken in their order.

        Raises:
            SltaError: a tensor is missing, or holds NaN or Inf, or the model's files have changed.
        """
        assert self._ahead is not None, "no layer follows the last one"
        names, stacks = self._decoder.layer_tensors(layer), self._stacks(layer)
        built, device = self._decoder.model, self._decoder.device
        weights = [
            model.read(names, built, device, fetched, stacks)
            for model, fetched in zip(self._models, self._ahead.result(), strict=True)
        ]
        more = layer + 1 < len(self._decoder)
        # The last layer's tensors must not wait in memory beside the output head.
        self._ahead = self._thread.submit(self._fetch, layer + 1) if more else None
        return weights

    def _fetch(self, layer: int) -> list[dict[str, torch.Tensor]]:
        """A layer's tensors of each model as they are stored, without those that are read when they are used."""
        stacks = self._stacks(layer)
        names = {key: name for key, name in self._decoder.layer_tensors(layer).items() if key not in stacks}
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            fetched = [model.fetch(names, self._decoder.model, self._target) for model in self._models]
        if self._stream is not None:
            self._stream.synchronize()
        return fetched

    def _stacks(self, layer: int) -> dict[str, torch.Size]:
        """The shapes of a layer's tensors of routed experts, each of which is read whenever it is used.

        None are, where a GPU has memory for all experts of one layer.
        """
        stacks = {name: tensor.shape for name, tensor in routed_tensors(self._decoder.layers[layer]).items()}
        elements = (len(self._models) + 1) * sum(map(math.prod, stacks.values()))
        return {} if takes_little(self._decoder.device, elements, share=1 / 4) else stacks
