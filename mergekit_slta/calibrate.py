"""Calibration: stream the decoder layers, measure every submodule's feature deltas, keep their Gram matrices.

This is Algorithm 1 of arXiv 2504.10902 with its two loops over layers made one: given the base model's hidden states
before a layer, that layer needs nothing from any other, so one layer of each model is in memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from mergekit_slta.checkpoint import Checkpoint
from mergekit_slta.decoder import Decoder, LayerCall
from mergekit_slta.errors import SltaError
from mergekit_slta.features import LayerFeatures
from mergekit_slta.gram import sample_grams
from mergekit_slta.ranks import Ranks
from mergekit_slta.resume import Partial
from mergekit_slta.submodules import layer_submodules

LOG = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 2048
GPU_BATCH_TOKENS = 16384

Tasks = Sequence[Sequence[Sequence[int]]]


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
) -> dict[str, torch.Tensor]:
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
        SltaError: a checkpoint's tensors are missing or not finite, or one sample does not fit into memory.
    """
    ranks = ranks or Ranks()
    state = _begin(partial)
    positions = batch_tokens or (CPU_BATCH_TOKENS if decoder.device.type == "cpu" else GPU_BATCH_TOKENS)
    while state.layer < len(decoder):
        try:
            _measure_layers(state, decoder, models, tasks, levels, positions, partial, ranks, progress)
        except torch.OutOfMemoryError as error:
            if batch_tokens or ranks.count > 1 or positions <= max(len(ids) for task in tasks for ids in task):
                raise SltaError(
                    f"{positions} token positions at once do not fit into the memory of {decoder.device}: "
                    "lower 'batch_tokens', and 'max_tokens' if one sample is too long."
                ) from error
            positions //= 2
            LOG.warning("Out of memory on %s: going on with %d token positions at once", decoder.device, positions)
    return state.grams


@dataclass
class _State:
    """What is known after ``layer`` layers: their Gram matrices, and the base model's hidden states [S, D] by row."""

    layer: int = 0
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    grams: dict[str, torch.Tensor] = field(default_factory=dict)


def _begin(partial: Partial | None) -> _State:
    layer = partial.finished_layers() if partial else 0
    if partial is None or layer == 0:
        return _State()
    LOG.info("Going on after layer %d of the calibration in %s", layer - 1, partial.folder)
    return _State(layer, partial.hidden(layer - 1), partial.grams(layer))


def _measure_layers(
    state: _State,
    decoder: Decoder,
    models: Sequence[Checkpoint],
    tasks: Tasks,
    levels: Sequence[str],
    positions: int,
    partial: Partial | None,
    ranks: Ranks,
    progress: Callable[[int], object],
) -> None:
    """The loop over layers, from the first that ``state`` lacks."""
    batches = make_batches(tasks, positions)[ranks.index :: ranks.count]
    embedded, calls = _embed(decoder, models[0], batches)
    state.hidden = {row: state.hidden.get(row, hidden) for row, hidden in embedded.items()}
    progress(state.layer * len(state.hidden))
    rows, experts = sum(map(len, tasks)), len(models) - 1
    for layer in range(state.layer, len(decoder)):
        names = decoder.layer_tensors(layer)
        weights = [model.read(names, decoder.base_model_prefix, decoder.device) for model in models]
        submodules = [name for level in levels for name in layer_submodules(level, layer)]
        grams = {name: torch.zeros(rows, experts, experts, dtype=torch.float64) for name in submodules}
        following: dict[int, torch.Tensor] = {}
        for batch, call in zip(batches, calls, strict=True):
            hidden = batch.pad(state.hidden, decoder.device)
            features = LayerFeatures(decoder, layer, weights, hidden, call[layer], levels)
            for name, deltas in features.deltas():
                grams[name][list(batch.rows)] = sample_grams(deltas, batch.lengths)
            following |= batch.split(features.base.output)
            progress(len(batch.rows))
            del features
        del weights  # before the next layer's are read
        measured = {name: ranks.sum(gram) for name, gram in grams.items()}
        if partial is not None:
            _keep(partial, layer, measured, following, ranks)
        state.grams |= measured
        state.hidden, state.layer = following, layer + 1


def _embed(
    decoder: Decoder, base: Checkpoint, batches: Sequence[Batch]
) -> tuple[dict[int, torch.Tensor], list[list[LayerCall]]]:
    """The first layer's input by row, and how the model calls its layers on each batch."""
    names = {name: name for name in decoder.edge_tensors()}
    edges = base.read(names, decoder.base_model_prefix, decoder.device)
    embedded: dict[int, torch.Tensor] = {}
    calls = []
    for batch in batches:
        hidden, call = decoder.embed(batch.token_ids, edges)
        embedded |= batch.split(hidden)
        calls.append(call)
    return embedded, calls


def _keep(
    partial: Partial, layer: int, grams: dict[str, torch.Tensor], hidden: dict[int, torch.Tensor], ranks: Ranks
) -> None:
    partial.save_hidden(layer, ranks.index, hidden)
    ranks.wait()
    if ranks.first:
        partial.finish_layer(layer, grams)


@dataclass(frozen=True)
class Batch:
    """Samples of one task that run together, right-padded to the longest.

    Attributes:
        rows: the samples' rows in the statistics, ``B`` in all.
        token_ids: [B, S] int64.
        lengths: the samples' numbers of tokens.
    """

    rows: tuple[int, ...]
    token_ids: torch.Tensor
    lengths: tuple[int, ...]

    def pad(self, hidden: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
        """The samples' hidden states [B, S, D] on the device."""
        return pad_sequence([hidden[row] for row in self.rows], batch_first=True).to(device)

    def split(self, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Each sample's hidden states [S, D] on the host, without padding."""
        host = hidden.cpu()
        return {row: host[i, : self.lengths[i]].clone() for i, row in enumerate(self.rows)}


def make_batches(tasks: Tasks, batch_tokens: int) -> list[Batch]:
    """Group samples into batches of at most ``batch_tokens`` positions, padding included, longest first.

    A batch never mixes tasks, so that leaving an expert out leaves the other tasks' batches as they are.

    Args:
        tasks: the token ids of each task's samples.
        batch_tokens: the largest number of positions; a longer sample runs alone.
    """
    batches = []
    offset = 0
    for samples in tasks:
        order = sorted(range(len(samples)), key=lambda index: -len(samples[index]))
        while order:
            count = max(1, batch_tokens // len(samples[order[0]]))
            taken, order = order[:count], order[count:]
            token_ids = pad_sequence([torch.tensor(samples[index]) for index in taken], batch_first=True)
            lengths = tuple(len(samples[index]) for index in taken)
            batches.append(Batch(tuple(offset + index for index in taken), token_ids, lengths))
        offset += len(samples)
    return batches
