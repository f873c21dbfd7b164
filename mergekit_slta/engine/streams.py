"""Hidden-state streams: samples on their way through the decoder, one layer at a time, in batches.

A stream carries every sample's hidden states as one model after another would compute them: the base model's, an
expert's own, or those of a merge in the making. Neither streams nor layers know what is measured on them.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from mergekit_slta.engine.partial import Hidden, Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.calls import LayerCall, State
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import embed, embedding_tensors
from mergekit_slta.layers.probe import padding_matters

LOG = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 2048
GPU_BATCH_TOKENS = 16384

Result = TypeVar("Result")
# The token ids of each task's samples.
Tasks = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Batch:
    """Samples of one task that run together, right-padded to the longest.

    Attributes:
        task: the index of the expert whose data the samples come from.
        rows: the samples' rows in the statistics, ``B`` in all.
        token_ids: [B, S] int64.
        lengths: the samples' numbers of tokens.
    """

    task: int
    rows: tuple[int, ...]
    token_ids: torch.Tensor
    lengths: tuple[int, ...]

    def unpadded(self, features: torch.Tensor) -> torch.Tensor:
        """The features [n, D] of the tokens, from [B, S, D] or [B * S, D] with those of the padding."""
        flat = features.reshape(-1, features.shape[-1])
        if min(self.lengths) == max(self.lengths):
            return flat
        lengths = torch.tensor(self.lengths)
        return flat[(torch.arange(int(max(lengths))) < lengths[:, None]).flatten().to(flat.device)]


def make_batches(tasks: Tasks, batch_tokens: int, unpadded: Collection[int] = ()) -> list[Batch]:
    """Group samples into batches of at most ``batch_tokens`` positions, padding included, longest first.

    A batch never mixes tasks, so that leaving an expert out leaves the other tasks' batches as they are.

    Args:
        tasks: the token ids of each task's samples.
        batch_tokens: the largest number of positions; a longer sample runs alone.
        unpadded: the tasks of which only samples of one length run together.
    """
    batches = []
    offset = 0
    for task, samples in enumerate(tasks):
        order = sorted(range(len(samples)), key=lambda index: -len(samples[index]))
        while order:
            count = max(1, batch_tokens // len(samples[order[0]]))
            taken = [i for i in order[:count] if task not in unpadded or len(samples[i]) == len(samples[order[0]])]
            order = order[len(taken) :]
            token_ids = pad_sequence([torch.tensor(samples[index]) for index in taken], batch_first=True)
            lengths = tuple(len(samples[index]) for index in taken)
            batches.append(Batch(task, tuple(offset + index for index in taken), token_ids, lengths))
        offset += len(samples)
    return batches


def decoder_batches(decoder: Decoder, tasks: Tasks, batch_tokens: int) -> list[Batch]:
    """``make_batches`` without padding where it would change a sample's features."""
    unpadded = {task for task, samples in enumerate(tasks) if padding_matters(decoder, [*map(len, samples)])}
    return make_batches(tasks, batch_tokens, unpadded)


def fitting_batch(device: torch.device) -> int:
    """How many token positions a batch has unless a recipe says so."""
    return CPU_BATCH_TOKENS if device.type == "cpu" else GPU_BATCH_TOKENS


def share(decoder: Decoder, tasks: Tasks, batch_tokens: int, ranks: Ranks) -> int:
    """How many samples this process has unless batches must be halved; the arguments are as for ``halving_batches``."""
    batches = decoder_batches(decoder, tasks, batch_tokens or fitting_batch(decoder.device))
    return sum(len(batch.rows) for batch in of_rank(batches, ranks))


def of_rank(batches: Sequence[Batch], ranks: Ranks) -> list[Batch]:
    """The batches of this process."""
    return list(batches[ranks.index :: ranks.count])


def halving_batches(
    run: Callable[[int], Result], decoder: Decoder, tasks: Tasks, batch_tokens: int, ranks: Ranks
) -> Result:
    """Call ``run`` with a number of token positions at once, and again with half of them when memory runs out.

    Args:
        run: takes up its work where it was left.
        decoder: whose device decides the number to begin with.
        tasks: the token ids of each task's samples.
        batch_tokens: a number that the user has chosen; 0 fits it to the device.
        ranks: the processes that share the work, all of which have to use the same batches.

    Raises:
        SltaError: the chosen number, or one sample, does not fit into memory.
    """
    positions = batch_tokens or fitting_batch(decoder.device)
    while True:
        try:
            return run(positions)
        except torch.OutOfMemoryError as error:
            longest = max(len(token_ids) for task in tasks for token_ids in task)
            if batch_tokens or ranks.count > 1 or positions <= longest:
                raise SltaError(
                    f"{positions} token positions at once do not fit into the memory of {decoder.device}: "
                    "lower 'batch_tokens', and 'max_tokens' if one sample is too long; if that does not help, the "
                    "layers themselves are too large for it."
                ) from error
            positions //= 2
            LOG.warning("Out of memory on %s: going on with %d token positions at once", decoder.device, positions)


class Source(Protocol):
    """Weights that a stream begins with."""

    def read(
        self, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does."""


class Streams:
    """The hidden states of all streams before the next layer, for this process's share of the batches.

    Args:
        decoder: the models' common decoder.
        sources: for each stream, the model that embeds the samples of each task.
        batches: all batches, of which this process takes its share.
        ranks: the processes that share the batches.
        folder: where hidden states are kept instead of in memory, in files without names.

    Attributes:
        layer: the index of the next layer.
        batches: this process's batches.
    """

    def __init__(
        self,
        decoder: Decoder,
        sources: Sequence[Sequence[Source]],
        batches: Sequence[Batch],
        ranks: Ranks,
        folder: Path | None = None,
    ) -> None:
        self.decoder = decoder
        self.layer = 0
        self.batches = of_rank(batches, ranks)
        self._ranks = ranks
        self._folder = folder
        self._hidden: Hidden = {}
        self._following: Hidden = {}
        self._calls: dict[tuple[int, int], list[LayerCall]] = {}
        self._handed: dict[int, set[tuple[Any, ...]]] = {}  # by stream, what its samples' state consists of
        for stream, models in enumerate(sources):
            self._embed(stream, models)

    def _embed(self, stream: int, models: Sequence[Source]) -> None:
        for model in dict.fromkeys(models):
            edges = model.read(
                {name: name for name in embedding_tensors(self.decoder)},
                self.decoder.base_model_prefix,
                self.decoder.device,
            )
            for number, batch in enumerate(self.batches):
                if models[batch.task] is model:
                    hidden, self._calls[stream, number] = embed(self.decoder, batch.token_ids, edges)
                    self._store(self._hidden, stream, batch, hidden)

    @property
    def samples(self) -> int:
        """How many samples this process has."""
        return sum(len(batch.rows) for batch in self.batches)

    def batches_of(self, task: int) -> Iterator[tuple[int, Batch]]:
        """This process's batches of one task, with their numbers."""
        return ((number, batch) for number, batch in enumerate(self.batches) if batch.task == task)

    def hidden(self, stream: int, number: int) -> torch.Tensor:
        """A batch's hidden states [B, S, D] of one stream before the next layer, on the device."""
        rows = self.batches[number].rows
        return pad_sequence([self._hidden[stream, row] for row in rows], batch_first=True).to(self.decoder.device)

    def call(self, stream: int, number: int) -> LayerCall:
        """How the model calls the next layer on a batch, with what the stream's earlier layers have handed on."""
        call, rows = self._calls[stream, number][self.layer], self.batches[number].rows
        if stream not in self._handed:
            return call
        state = {}
        for path in self._handed[stream]:
            keys = [(stream, row, *path) for row in rows]
            state[path] = torch.stack([self._hidden[key] for key in keys]).to(self.decoder.device)
        return call.own(state)

    def set_output(self, stream: int, number: int, output: torch.Tensor, state: State) -> None:
        """Note what the next layer makes of a batch's hidden states, and what it hands to later layers."""
        batch = self.batches[number]
        unchanged = self._handed.get(stream, set()) - set(state)
        for key in [(stream, row, *path) for row in batch.rows for path in unchanged]:
            self._following[key] = self._hidden[key]
        self._store(self._following, stream, batch, output)
        for path, tensor in state.items():
            self._store(self._following, stream, batch, tensor, path)

    def final(self) -> Iterator[tuple[int, dict[int, torch.Tensor]]]:
        """Each sample's row, and its hidden states [S, D] of every stream after the last layer."""
        for row in (row for batch in self.batches for row in batch.rows):
            yield row, {key[0]: states for key, states in self._hidden.items() if key[1:] == (row,)}

    def finish_layer(self, partial: Partial | None, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what the next layer has come to and made of the samples, and go on to the layer after it."""
        if partial is not None:
            partial.save_hidden(self.layer, self._ranks.index, self._following)
            self._ranks.wait()
            if self._ranks.first:
                partial.finish_layer(self.layer, tensors)
        self.advance()

    def advance(self) -> None:
        """Go on to the layer after the next."""
        self._take(self._following, self.layer + 1)
        self._following = {}

    def resume(self, hidden: Hidden, layer: int) -> None:
        """Take the place before ``layer``, with hidden states that were kept."""
        own = {key: hidden[key] for key in self._hidden}
        self._take(own | {key: tensor for key, tensor in hidden.items() if key[:2] in own}, layer)

    def _take(self, hidden: Hidden, layer: int) -> None:
        self._hidden, self.layer, self._handed = hidden, layer, {}
        for stream, _, *path in hidden:
            if path:
                self._handed.setdefault(int(stream), set()).add(tuple(path))

    @property
    def state(self) -> Hidden:
        """The hidden states before the next layer, and what the layers before it have handed on."""
        return self._hidden

    def _store(
        self, target: Hidden, stream: int, batch: Batch, tensor: torch.Tensor, path: tuple[Any, ...] = ()
    ) -> None:
        """Keep each sample's part of a tensor [B, ...]: hidden states without padding, what is handed on as it is."""
        host = tensor.cpu()
        for index, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            key = stream, row, *path
            target[key] = self._keep_apart(host[index] if path else host[index, :length])

    def _keep_apart(self, states: torch.Tensor) -> torch.Tensor:
        """A copy in memory, or in a mapped file whose space is free again once nothing refers to the copy."""
        if self._folder is None:
            return states.clone(memory_format=torch.contiguous_format)
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            file.truncate(states.nbytes)
            mapped = torch.from_file(file.name, shared=True, size=states.numel(), dtype=states.dtype)
        return mapped.view_as(states).copy_(states)
