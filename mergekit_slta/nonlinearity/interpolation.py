"""Measure feature deltas of models between the base model and the experts, as calibration measures experts.

A setting c [T] stands for the weights theta_0 + sum_t c_t tau_t. Each setting runs on the base model's input to a
layer, or as a whole model; the Gram matrices of its feature deltas are kept.

Shapes: ``T`` experts, ``B`` samples in a batch, ``n`` samples of a study.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.engine.accumulator import Accumulator, Progress, Tensors
from mergekit_slta.engine.batches import Batch, Tasks
from mergekit_slta.engine.loop import pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Source, Streams, read_edges
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

# Logits of one setting that are compared at once: with a large vocabulary they outgrow everything else in memory.
LOGITS = 2**24

# Submodule name to [n, K, m, m] float64.
Grams = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Study:
    """Settings whose features are compared, on the data of the experts in them.

    Attributes:
        experts: the experts in the settings.
        kept: [k, T], settings that are compared with each other, and with each of the others.
        others: [K, T], settings that are compared with the kept ones alone; there may be none.
    """

    experts: tuple[int, ...]
    kept: torch.Tensor
    others: torch.Tensor

    @property
    def settings(self) -> torch.Tensor:
        """All settings [k + K, T], the kept ones first."""
        return torch.cat([self.kept, self.others])

    @property
    def comparisons(self) -> list[torch.Tensor]:
        """The settings [m, T] of each Gram matrix: one of the others before the kept ones, or these alone."""
        return [torch.cat([other, self.kept]) for other in self.others.split(1)]  # an empty tensor is one part

    def no_grams(self, samples: int) -> torch.Tensor:
        """Zeros [n, K, m, m], for the Gram matrices of all comparisons; K is 1 where there are no others."""
        found = self.comparisons
        return torch.zeros(samples, len(found), len(found[0]), len(found[0]), dtype=torch.float64)


def count_passes(studies: Sequence[Study], tasks: Tasks, levels: Sequence[str]) -> int:
    """How many forward passes of one sample studies take; all layers, or all branches, count as one pass."""
    passes = sum(map(len, tasks)) * bool({*levels} - {"model"})
    for study in studies:
        whole = len(study.settings) + 1 if "model" in levels else 0  # the base model's too
        passes += sum(len(tasks[task]) for task in study.experts) * (whole + len(study.settings) * _runs(levels))
    return passes


def _runs(levels: Sequence[str]) -> int:
    """How often a layer runs with a setting: as a whole, and as its branches."""
    return ("layer" in levels) + bool({"attn_mlp", "head_mlp"} & {*levels})


def measure_studies(
    decoder: Decoder,
    models: Sequence[Checkpoint],
    tasks: Tasks,
    levels: Sequence[str],
    studies: Sequence[Study],
    batch_tokens: int,
    ranks: Ranks,
    progress: Progress,
) -> list[Grams]:
    """Measure the Gram matrices of every study on every submodule.

    At levels below the model, memory holds one layer of the base model, of each expert and of one setting, and on one
    batch the features of a study's kept settings. At level ``model`` every setting of a study has its own stream of
    hidden states.

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
    measured: list[Grams] = [{} for _ in studies]
    if below := [level for level in levels if level != "model"]:
        submodules = _Submodules(decoder, models, tasks, ranks, below, studies)
        measured = pass_layers(submodules, batch_tokens=batch_tokens, progress=progress)
    for study, grams in zip(studies, measured, strict=True) if "model" in levels else ():
        samples = [own if task in study.experts else [] for task, own in enumerate(tasks)]
        whole = _WholeModel(decoder, models, samples, ranks, study)
        grams["model"] = pass_layers(whole, batch_tokens=batch_tokens, progress=progress)
    return measured


def _put_together(name: str, grams: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum the Gram matrices over the ranks, each of which holds its own samples."""
    if not ranks.sum(grams).isfinite().all():
        raise SltaError(
            f"The features at {name} are not finite: the weights of an expert are so large that they overflow float32, "
            "leave the expert out or get a sound copy."
        )
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
            if run_levels:
                self._run_settings(features, base, hidden, call, batch, report)
            if maps is not None:
                self._combine_maps(maps, hidden, call, batch)
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
        features: LayerFeatures,
        base: LayerRun,
        hidden: torch.Tensor,
        call: LayerCall,
        batch: Batch,
        report: Progress,
    ) -> None:
        """Run a layer with the settings of every study that uses the batch's task, and compare them."""

        def run(setting: torch.Tensor) -> ExpertRun:
            done = features.run(_at(setting, features.weights), base, hidden, call)
            report(len(batch.rows) * _runs(self.levels))
            return done

        for index, study in self._studies_of(batch):
            kept = [run(setting) for setting in study.kept]
            for place, other in enumerate(study.others.split(1)):
                for name, deltas in features.deltas(base, [*map(run, other), *kept]):
                    self._put(index, name, batch, place, sample_grams(deltas, batch.lengths))

    def _combine_maps(self, maps: LayerFeatures, hidden: torch.Tensor, call: LayerCall, batch: Batch) -> None:
        """Compute the linear maps' Gram matrices without running settings: a map's output is linear in its weights."""
        base = maps.run_base(hidden, call)
        for name, grams in maps.grams(base, hidden, call, batch.lengths):
            for index, study in self._studies_of(batch):
                for place, settings in enumerate(study.comparisons):
                    self._put(index, name, batch, place, settings @ grams @ settings.T)

    def _studies_of(self, batch: Batch) -> list[tuple[int, Study]]:
        return [(index, study) for index, study in enumerate(self.studies) if batch.task in study.experts]

    def _put(self, index: int, name: str, batch: Batch, comparison: int, grams: torch.Tensor) -> None:
        """Keep the Gram matrices [B, m, m] of a batch in a study."""
        self.grams[index][name][[self.places[index][row] for row in batch.rows], comparison] = grams


@dataclass
class _WholeModel(Accumulator[torch.Tensor]):
    """A study at level ``model``: the hidden states of each setting through all layers, then the logits."""

    study: Study

    def __post_init__(self) -> None:
        base = torch.zeros(1, len(self.models) - 1, dtype=torch.float64)  # stream 0 is the base model's
        self.settings = torch.cat([base, self.study.settings])

    def sources(self) -> list[list[Source]]:
        """The stream of each setting."""
        return [[_model_at(setting, self.models)] * len(self.tasks) for setting in self.settings]

    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """Run the layer with the weights of each setting on its stream."""
        for stream, setting in enumerate(self.settings):
            blended = _at(setting, weights)
            for number, batch in enumerate(streams.batches):
                streams.run_layer(stream, number, blended)
                report(len(batch.rows))
        return {}

    def finish(self, streams: Streams, report: Progress) -> torch.Tensor:
        """The Gram matrices [n, K, m, m] of the logits' change."""
        names = ends.logit_tensors(self.decoder)
        edges = [read_edges(self.decoder, model, names) for model in self.models]
        vocabulary = self.decoder.model.config.get_text_config().vocab_size
        found = self.study.no_grams(sum(map(len, self.tasks)))
        for number, batch in enumerate(streams.batches):
            width = max(1, LOGITS // (vocabulary * len(batch.rows)))
            for start in range(0, max(batch.lengths), width):
                hidden = [streams.hidden(s, number)[:, start : start + width] for s in range(len(self.settings))]
                lengths = [min(max(0, length - start), width) for length in batch.lengths]
                for place, grams in enumerate(self._compare(hidden, edges, lengths)):
                    found[list(batch.rows), place] += grams
        return _put_together("model", found, self.ranks)

    def _compare(
        self, hidden: Sequence[torch.Tensor], edges: Sequence[Weights], lengths: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """The Gram matrices [B, m, m] of each comparison, from the settings' hidden states [B, S, D]."""

        def logits(setting: int) -> torch.Tensor:
            return ends.logits(self.decoder, hidden[setting], _at(self.settings[setting], edges))

        base, others = logits(0), 1 + len(self.study.kept)
        kept = [logits(setting).sub_(base) for setting in range(1, others)]
        for other in torch.arange(others, len(hidden)).split(1):
            yield sample_grams([*(logits(int(setting)).sub_(base) for setting in other), *kept], lengths)


def _at(setting: torch.Tensor, weights: Sequence[Weights]) -> dict[str, torch.Tensor]:
    """The tensors theta_0 + sum_t c_t tau_t of a setting c [T], from those of the base model and the experts."""
    return blend(weights[0], weights[1:], lambda name: setting)


def _model_at(setting: torch.Tensor, models: Sequence[Checkpoint]) -> Blend:
    return Blend(models, lambda name: setting)
