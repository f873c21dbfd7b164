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

# Logits are wide: so many tokens of one sample are compared at once.
LOGIT_TOKENS = 64

Tasks = Sequence[Sequence[Sequence[int]]]
# Hidden states [S, D] on the host, by stream (0 the base model's, t expert t's own) and row.
Hidden = dict[tuple[int, int], torch.Tensor]


@torch.no_grad()
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
    submodules = [
        [name for level in levels for name in layer_submodules(decoder, level, layer)] for layer in range(len(decoder))
    ]
    state = _begin(partial)
    positions = batch_tokens or (CPU_BATCH_TOKENS if decoder.device.type == "cpu" else GPU_BATCH_TOKENS)
    while True:
        try:
            _measure_layers(state, decoder, models, tasks, levels, submodules, positions, partial, ranks, progress)
            return state.grams
        except torch.OutOfMemoryError as error:
            if batch_tokens or ranks.count > 1 or positions <= max(len(ids) for task in tasks for ids in task):
                raise SltaError(
                    f"{positions} token positions at once do not fit into the memory of {decoder.device}: "
                    "lower 'batch_tokens', and 'max_tokens' if one sample is too long."
                ) from error
            positions //= 2
            LOG.warning("Out of memory on %s: going on with %d token positions at once", decoder.device, positions)


@dataclass
class _State:
    """What is known after ``layer`` layers: their Gram matrices, and the hidden states.

    The base model's hidden states are stream 0; at level ``model`` expert t's own are stream t.
    """

    layer: int = 0
    hidden: Hidden = field(default_factory=dict)
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
    submodules: Sequence[Sequence[str]],
    positions: int,
    partial: Partial | None,
    ranks: Ranks,
    progress: Callable[[int], object],
) -> None:
    """The loop over layers, from the first that ``state`` lacks."""
    batches = make_batches(tasks, positions)[ranks.index :: ranks.count]
    streams = [_embed(decoder, model, batches) for model in (models if "model" in levels else models[:1])]
    state.hidden = {
        (stream, row): state.hidden.get((stream, row), hidden)
        for stream, (embedded, _) in enumerate(streams)
        for row, hidden in embedded.items()
    }
    samples = sum(len(batch.rows) for batch in batches)
    progress(state.layer * samples)
    for layer in range(state.layer, len(decoder)):
        names = decoder.layer_tensors(layer)
        weights = [model.read(names, decoder.base_model_prefix, decoder.device) for model in models]
        grams = {name: _no_grams(tasks) for name in submodules[layer]}
        features = LayerFeatures(decoder, layer, weights, levels, sum(len(ids) for task in tasks for ids in task))
        following: Hidden = {}
        for number, batch in enumerate(batches):
            call = streams[0][1][number][layer]
            hidden = batch.pad(state.hidden, 0, decoder.device)
            base = features.run_base(hidden, call)
            for name, gram in features.grams(base, hidden, call, batch.lengths):
                grams[name][list(batch.rows)] = gram
            following |= batch.split(base.output, 0)
            for stream in range(1, len(streams)):  # each expert's own way through the model
                own = batch.pad(state.hidden, stream, decoder.device)
                run = decoder.run(layer, weights[stream], own, streams[stream][1][number][layer])
                following |= batch.split(run.output, stream)
            progress(len(batch.rows))
        del weights, features  # before the next layer's are read
        measured = {name: ranks.sum(gram) for name, gram in grams.items()}
        if partial is not None:
            _keep(partial, layer, measured, following, ranks)
        state.grams |= measured
        state.hidden, state.layer = following, layer + 1
    if "model" in levels:
        state.grams["model"] = ranks.sum(_model_grams(state.hidden, decoder, models, tasks, batches))


def _no_grams(tasks: Tasks) -> torch.Tensor:
    return torch.zeros(sum(map(len, tasks)), len(tasks), len(tasks), dtype=torch.float64)


def _model_grams(
    hidden: Hidden, decoder: Decoder, models: Sequence[Checkpoint], tasks: Tasks, batches: Sequence[Batch]
) -> torch.Tensor:
    """The Gram matrices of the logits' change [N, T, T], from each model's hidden states after its last layer."""
    names = {name: name for name in decoder.edge_tensors()}
    edges = [model.read(names, decoder.base_model_prefix, decoder.device) for model in models]
    grams = _no_grams(tasks)
    for row in (row for batch in batches for row in batch.rows):
        parts = zip(*(hidden[stream, row].split(LOGIT_TOKENS) for stream in range(len(models))), strict=True)
        for part in parts:
            base, *experts = (decoder.logits(h[None].to(decoder.device), e) for h, e in zip(part, edges, strict=True))
            grams[row] += sample_grams([expert - base for expert in experts], [base.shape[1]])[0]
    return grams


def _embed(
    decoder: Decoder, model: Checkpoint, batches: Sequence[Batch]
) -> tuple[dict[int, torch.Tensor], list[list[LayerCall]]]:
    """The first layer's input by row, and how the model calls its layers on each batch."""
    names = {name: name for name in decoder.edge_tensors()}
    edges = model.read(names, decoder.base_model_prefix, decoder.device)
    embedded: dict[int, torch.Tensor] = {}
    calls = []
    for batch in batches:
        hidden, call = decoder.embed(batch.token_ids, edges)
        embedded |= {row: states for (_, row), states in batch.split(hidden, 0).items()}
        calls.append(call)
    return embedded, calls


def _keep(partial: Partial, layer: int, grams: dict[str, torch.Tensor], hidden: Hidden, ranks: Ranks) -> None:
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

    def pad(self, hidden: Hidden, stream: int, device: torch.device) -> torch.Tensor:
        """The samples' hidden states [B, S, D] of one stream on the device."""
        return pad_sequence([hidden[stream, row] for row in self.rows], batch_first=True).to(device)

    def split(self, hidden: torch.Tensor, stream: int) -> Hidden:
        """Each sample's hidden states [S, D] on the host, without padding."""
        host = hidden.cpu()
        return {(stream, row): host[i, : self.lengths[i]].clone() for i, row in enumerate(self.rows)}


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
