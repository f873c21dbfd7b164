"""Measure feature deltas of models between the base model and the experts, as calibration measures experts.

A setting c [T] stands for the weights theta_0 + sum_t c_t tau_t. Each setting runs on the base model's input to a
layer, or as a whole model; the Gram matrices of its feature deltas are kept.

Shapes: ``T`` experts, ``B`` samples in a batch, ``n`` samples of a study, ``m`` settings that are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mergekit_slta.engine.passes import Accumulator, Progress, Tensors, pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Batch, Streams, Tasks, read_edges
from mergekit_slta.errors import SltaError
from mergekit_slta.layers import ends
from mergekit_slta.layers.blend import Blend, blend
from mergekit_slta.layers.calls import LayerCall, Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.submodules import layer_submodules
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.slta.features import ExpertRun, LayerFeatures
from mergekit_slta.slta.gram import sample_grams

BRANCH_LEVELS = frozenset({"attn_mlp", "head_mlp"})
# At level model, hidden states that take more than this go to the folder for temporary files.
MOST_HIDDEN_BYTES = 2**31
# The number of logits of each setting that are compared at once.
LOGITS = 2**23

# Submodule name to [n, K, m, m] float64.
Grams = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Study:
    """Settings that are compared with each other, on the data of some experts.

    Attributes:
        experts: the experts in the settings, whose data is used.
        kept: [k, T], settings that are compared with all others.
        others: ``K`` tensors [j, T]; the settings of each are compared with the kept ones, so that m = j + k.
    """

    experts: tuple[int, ...]
    kept: torch.Tensor
    others: tuple[torch.Tensor, ...]

    @property
    def settings(self) -> torch.Tensor:
        """All settings, the kept ones first."""
        return torch.cat([self.kept, *self.others])

    def tasks(self, tasks: Tasks) -> Tasks:
        """The tasks without the samples that are not used."""
        return [samples if task in self.experts else [] for task, samples in enumerate(tasks)]

    def no_grams(self, samples: int) -> torch.Tensor:
        """Zeros [n, K, m, m]."""
        compared = len(self.others[0]) + len(self.kept)
        return torch.zeros(samples, len(self.others), compared, compared, dtype=torch.float64)


def count_passes(studies: Sequence[Study], tasks: Tasks, levels: Sequence[str]) -> int:
    """How many forward passes of one sample studies take; all layers, or all branches, count as one pass."""
    used = [sum(map(len, study.tasks(tasks))) for study in studies]
    runs = sum(len(study.settings) * samples for study, samples in zip(studies, used, strict=True))
    passes = runs + sum(used) if "model" in levels else 0
    passes += runs * _runs_of_layers(levels)
    return passes + sum(map(len, tasks)) * bool(set(levels) - {"model"})


def _runs_of_layers(levels: Sequence[str]) -> int:
    return ("layer" in levels) + bool(BRANCH_LEVELS & set(levels))


def measure(
    decoder: Decoder,
    models: Sequence[Checkpoint],
    tasks: Tasks,
    levels: Sequence[str],
    studies: Sequence[Study],
    *,
    batch_tokens: int = 0,
    ranks: Ranks | None = None,
    progress: Progress = lambda samples: None,
) -> list[Grams]:
    """Measure the Gram matrices of every study on every submodule.

    At levels below the model, memory holds one layer of the base model, of each expert and of one setting, and the
    features of one study's kept settings on one batch. At level ``model`` every setting of a study has its own stream
    of hidden states, on the disk if they are large.

    Args:
        decoder: the models' common decoder.
        models: the base model, then the ``T`` experts.
        tasks: the token ids of each expert's samples.
        levels: the levels to measure.
        studies: what to measure.
        batch_tokens: as for ``pass_layers``.
        ranks: the processes that share the batches.
        progress: called with the number of this process's samples that have passed another layer; the numbers add up
            to ``count_passes`` times the layers.

    Returns:
        For each study, submodule name to [n, K, m, m] of the study's ``n`` samples, in their order.

    Raises:
        SltaError: a level does not apply to the models, features are not finite, or a sample does not fit into memory.
    """
    ranks = ranks or Ranks()
    measured: list[Grams] = [{} for _ in studies]
    below = [level for level in levels if level != "model"]
    if below:
        submodules = _Submodules(decoder, models, tasks, ranks, below, studies)
        measured = pass_layers(submodules, batch_tokens=batch_tokens, progress=progress)
    for study, grams in zip(studies if "model" in levels else (), measured, strict=False):
        whole = _WholeModel(decoder, models, study.tasks(tasks), ranks, study)
        tokens = sum(len(token_ids) for samples in whole.tasks for token_ids in samples)
        width = decoder.model.config.get_text_config().hidden_size
        hidden_bytes = 2 * len(whole.settings) * tokens * width * torch.float32.itemsize  # before and after a layer
        folder = Path(tempfile.gettempdir()) if hidden_bytes > MOST_HIDDEN_BYTES else None
        grams["model"] = pass_layers(whole, batch_tokens=batch_tokens, folder=folder, progress=progress)
    return measured


def _put_together(name: str, grams: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum the Gram matrices over the ranks, each of which holds its own samples."""
    if not ranks.sum(grams).isfinite().all():
        raise SltaError(f"The features at {name} are not finite: the weights of an expert overflow float32 there.")
    return grams


@dataclass
class _Submodules(Accumulator[list[Grams]]):
    """All studies at all levels except ``model``."""

    levels: Sequence[str]
    studies: Sequence[Study]

    def __post_init__(self) -> None:
        self.tokens = sum(len(token_ids) for samples in self.tasks for token_ids in samples)
        task_of = [task for task, samples in enumerate(self.tasks) for _ in samples]
        used = [[row for row, task in enumerate(task_of) if task in study.experts] for study in self.studies]
        self.places = [{row: place for place, row in enumerate(rows)} for rows in used]  # of a row in each study
        self.grams: list[Grams] = [{} for _ in self.studies]

    def sources(self) -> list[list[Checkpoint]]:
        """The base model's stream."""
        return [[self.models[0]] * len(self.tasks)]

    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """Measure the layer's submodules in all studies."""
        names = [name for level in self.levels for name in layer_submodules(self.decoder, level, layer)]
        for study, places, grams in zip(self.studies, self.places, self.grams, strict=True):
            grams |= {name: study.no_grams(len(places)) for name in names}
        run_levels = [level for level in self.levels if level != "linear"]
        features = LayerFeatures(self.decoder, layer, weights, run_levels, self.tokens)
        maps = LayerFeatures(self.decoder, layer, weights, ["linear"], self.tokens) if "linear" in self.levels else None
        for number, batch in enumerate(streams.batches):
            hidden, call = streams.hidden(0, number), streams.call(0, number)
            base = features.run_base(hidden, call)
            concerned = [index for index, study in enumerate(self.studies) if batch.task in study.experts]
            for index in concerned if run_levels else ():
                self._run_settings(index, features, base, hidden, call, batch, report)
            if maps is not None:
                self._combine_maps(concerned, maps, hidden, call, batch)
            streams.set_output(0, number, base.output, base.state)
            report(len(batch.rows))
        for grams in self.grams:
            for name in names:
                _put_together(name, grams[name], self.ranks)
        return {}

    def finish(self, streams: Streams, report: Progress) -> list[Grams]:
        """The Gram matrices of each study."""
        return self.grams

    def _run_settings(
        self,
        index: int,
        features: LayerFeatures,
        base: LayerRun,
        hidden: torch.Tensor,
        call: LayerCall,
        batch: Batch,
        report: Progress,
    ) -> None:
        """Run a layer with all settings of a study on a batch."""

        def run(setting: torch.Tensor) -> ExpertRun:
            weights = _blend(features.weights[0], features.weights[1:], setting)
            done = features.run(weights, base, hidden, call)
            report(len(batch.rows) * _runs_of_layers(self.levels))
            # Keep only those of the setting's weights that are needed again: the map that all heads share.
            output = [features.heads.output.weight] if features.heads is not None else []
            return replace(done, weights={name: weights[name] for name in output})

        study = self.studies[index]
        kept = [run(setting) for setting in study.kept]
        for other, settings in enumerate(study.others):
            for name, deltas in features.deltas(base, [*(run(setting) for setting in settings), *kept]):
                self._put(index, name, batch, other, sample_grams(deltas, batch.lengths))

    def _combine_maps(
        self, concerned: Sequence[int], maps: LayerFeatures, hidden: torch.Tensor, call: LayerCall, batch: Batch
    ) -> None:
        """Compute the linear maps' Gram matrices without running settings: a map's output is linear in its weights."""
        base = maps.run_base(hidden, call)
        for name, grams in maps.grams(base, hidden, call, batch.lengths):
            for index in concerned:
                study = self.studies[index]
                for other, others in enumerate(study.others):
                    settings = torch.cat([others, study.kept])
                    self._put(index, name, batch, other, settings @ grams @ settings.T)

    def _put(self, index: int, name: str, batch: Batch, other: int, grams: torch.Tensor) -> None:
        """Keep the Gram matrices [B, m, m] of a batch in a study."""
        self.grams[index][name][[self.places[index][row] for row in batch.rows], other] = grams


@dataclass
class _WholeModel(Accumulator[torch.Tensor]):
    """A study at level ``model``: the hidden states of every setting through all layers, then the logits."""

    study: Study

    def __post_init__(self) -> None:
        kept = self.study.kept
        self.settings = torch.cat([torch.zeros_like(kept[:1]), self.study.settings])  # stream 0 is the base model's

    def sources(self) -> list[list[Blend]]:
        """Every setting's stream."""

        def model(setting: torch.Tensor) -> Blend:
            used = setting.nonzero().flatten()
            models = [self.models[0], *(self.models[1 + expert] for expert in used.tolist())]
            return Blend(models, lambda name: setting[used], by_steps=True)

        return [[model(setting)] * len(self.tasks) for setting in self.settings]

    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """Run the layer with every setting's weights on its stream."""
        base, *experts = weights
        for stream, setting in enumerate(self.settings):
            blended = _blend(base, experts, setting)
            for number, batch in enumerate(streams.batches):
                streams.run_layer(stream, number, blended)
                report(len(batch.rows))
        return {}

    def finish(self, streams: Streams, report: Progress) -> torch.Tensor:
        """The Gram matrices [n, K, m, m] of the logits' change."""
        base_edges, *edges = (read_edges(self.decoder, model, self.decoder.edge_tensors()) for model in self.models)
        chunk = max(1, LOGITS // self.decoder.model.config.get_text_config().vocab_size)

        def logits(stream: int, states: torch.Tensor) -> torch.Tensor:
            weights = _blend(base_edges, edges, self.settings[stream])
            return ends.logits(self.decoder, states[None].to(self.decoder.device), weights)

        grams = self.study.no_grams(sum(map(len, self.tasks)))
        for row, states in streams.final():
            for part in zip(*(states[stream].split(chunk) for stream in range(len(self.settings))), strict=True):
                base, following = logits(0, part[0]), iter(enumerate(part[1:], 1))
                kept = [logits(*next(following)) - base for _ in self.study.kept]
                for other, settings in enumerate(self.study.others):
                    own = [logits(*next(following)) - base for _ in settings]
                    grams[row, other] += sample_grams([*own, *kept], [base.shape[1]])[0]
        return _put_together("model", grams, self.ranks)


def _blend(base: Weights, experts: Sequence[Weights], setting: torch.Tensor) -> Weights:
    return blend(base, experts, lambda name: setting, by_steps=True)
