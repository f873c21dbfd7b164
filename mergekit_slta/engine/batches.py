"""Batches of samples: formed for each task from all of its samples, whole ones for each process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import routed_tensors
from mergekit_slta.layers.probe import padding_matters

CPU_BATCH_TOKENS = 2048
# Wider layers run on fewer tokens: a processor computes faster than a system hands out memory for larger features.
CPU_BATCH_ELEMENTS = 2**22
LEAST_CPU_BATCH_TOKENS = 256
GPU_BATCH_TOKENS = 16384

# The token ids of each task's samples.
Tasks = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Batch:
    """Samples of one task that run together, right-padded to the longest.

    Attributes:
        task: the index of the task that the samples come from.
        rows: the samples' rows in the statistics, ``B`` in all.
        token_ids: [B, S] int64.
        lengths: the samples' numbers of tokens.
    """

    task: int
    rows: tuple[int, ...]
    token_ids: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def samples(self) -> torch.Tensor:
        """The row [n] of each token's sample, without those of the padding."""
        return torch.tensor(self.rows).repeat_interleave(torch.tensor(self.lengths))

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tokens' values [n] without padding, from those [S] of every row."""
        return torch.cat([values[row] for row in self.rows])

    def unpadded(self, features: torch.Tensor) -> torch.Tensor:
        """Remove the padding: the features [n, D] of the tokens, from [B, S, D] or [B * S, D].

        Several hidden states of a token, [B, S, m, D], are one of m * D features.
        """
        if features.ndim > 3 and features.shape[1] == self.token_ids.shape[1]:
            features = features.flatten(2)
        flat = features.reshape(-1, features.shape[-1])
        if min(self.lengths) == max(self.lengths):
            return flat
        lengths = torch.tensor(self.lengths)
        return flat[(torch.arange(int(max(lengths))) < lengths[:, None]).flatten().to(flat.device)]


def make_batches(tasks: Tasks, batch_tokens: int, unpadded: Collection[int] = ()) -> list[Batch]:
    """Group samples into batches of at most ``batch_tokens`` positions, padding included, longest first.

    A batch never mixes tasks, so that the batches of a task do not depend on the others. A longer sample runs alone.
    Those of the tasks ``unpadded`` hold samples of one length only.
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


def decoder_batches(decoder: Decoder, tasks: Tasks, batch_tokens: int, ranks: Ranks) -> list[Batch]:
    """One process's share of all batches, without padding in tasks where it would change a sample's features."""
    unpadded = {task for task, samples in enumerate(tasks) if padding_matters(decoder, [*map(len, samples)])}
    return make_batches(tasks, batch_tokens, unpadded)[ranks.index :: ranks.count]


def fitting_batch(decoder: Decoder) -> int:
    """The number of token positions in a batch, while memory lasts."""
    if decoder.device.type != "cpu":
        return GPU_BATCH_TOKENS
    layers = [decoder.layers[layer] for layer in decoder.one_of_each_kind()]
    if any(map(routed_tensors, layers)):  # whose experts are read again for every batch
        return CPU_BATCH_TOKENS
    widest = max(max(tensor.shape) for layer in layers for tensor in layer.state_dict().values() if tensor.ndim > 1)
    return min(CPU_BATCH_TOKENS, max(LEAST_CPU_BATCH_TOKENS, CPU_BATCH_ELEMENTS // widest))


def share(decoder: Decoder, tasks: Tasks, ranks: Ranks) -> int:
    """How many samples this process has, if batches need not be halved."""
    return sum(len(batch.rows) for batch in decoder_batches(decoder, tasks, fitting_batch(decoder), ranks))
