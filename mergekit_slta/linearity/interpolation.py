"""Models between and beyond the experts, measured as experts are in calibration.

A setting c [T] stands for the weights theta_0 + sum_t c_t tau_t. It runs on the base model's input to a layer, or as a
whole model, and is kept as Gram matrices of feature deltas.

Shapes: ``T`` experts, ``B`` samples in a batch, ``n`` samples of a study, ``m`` settings that are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Batch, Streams, Tasks, decoder_batches, fitting_batch
from mergekit_slta.errors import SltaError
from mergekit_slta.layers import ends
from mergekit_slta.layers.calls import LayerCall, Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.products import fast_products
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.slta.features import ExpertRun, LayerFeatures
from mergekit_slta.slta.gram import sample_grams

BRANCH_LEVELS = frozenset({"attn_mlp", "head_mlp"})
# At level model the hidden states of all settings go to the folder for temporary files if they take more than this.
MOST_HIDDEN_BYTES = 2**31
# So many logits of each setting are compared at once.
LOGITS = 2**23

# Submodule name to [n, K, m, m] float64.
Grams = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Study:
    """Settings that are compared with each other, on the data of some experts.

    Attributes:
        experts: the experts that the settings are about, and whose data is used.
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

    def rows(self, tasks: Tasks) -> list[int]:
        """The rows of the samples that are used, among those of all tasks."""
        task = [index for index, samples in enumerate(tasks) for _ in samples]
        return [row for row, index in enumerate(task) if index in self.experts]


def count_passes(studies: Sequence[Study], tasks: Tasks, levels: Sequence[str]) -> int:
    """How many forward passes of one sample studies take; all layers, or all branches, count as a pass of the model."""
    used = [len(study.rows(tasks)) for study in studies]
    runs = sum(len(study.settings) * rows for study, rows in zip(studies, used, strict=True))
    passes = runs + sum(used) if "model" in levels else 0
    passes += runs * _runs_of_layers(levels)
    return passes + sum(map(len, tasks)) * bool(set(levels) - {"model"})


def _runs_of_layers(levels: Sequence[str]) -> int:
    return ("layer" in levels) + bool(BRANCH_LEVELS & set(levels))


def blend(base: Weights, experts: Sequence[Weights], setting: Sequence[float]) -> Weights:
    """The tensors of a setting [T]: the base model's plus the weighted task vectors; of an expert, its own."""
    weights = [float(weight) for weight in setting]
    if sorted(weights) == [0.0] * (len(weights) - 1) + [1.0]:
        return experts[weights.index(1.0)]
    blended = dict(base)
    for expert, weight in zip(experts, weights, strict=True):
        for name, tensor in base.items():
            if weight and tensor.is_floating_point():
                blended[name] = torch.add(blended[name], expert[name] - tensor, alpha=weight)
    return blended


@dataclass(frozen=True, eq=False)
class Blend:
    """A setting as a model that can be read; see ``blend``.

    Attributes:
        models: the base model, then the ``T`` experts.
        setting: [T].
    """

    models: Sequence[Checkpoint]
    setting: torch.Tensor

    def read(
        self, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does."""
        used = self.setting.nonzero().flatten().tolist()
        base, *experts = (
            self.models[index].read(names, base_model_prefix, device) for index in (0, *(1 + expert for expert in used))
        )
        return dict(blend(base, experts, self.setting[used].tolist()))


@torch.no_grad()
@fast_products()
def measure(
    decoder: Decoder,
    models: Sequence[Checkpoint],
    tasks: Tasks,
    levels: Sequence[str],
    studies: Sequence[Study],
    *,
    batch_tokens: int = 0,
    progress: Callable[[int], object] = lambda samples: None,
) -> list[Grams]:
    """Measure the Gram matrices of every study on every submodule.

    Below the model, one layer of the base model, of each expert and of one setting is in memory at a time, beside what
    the kept settings of one study make of one batch. At level ``model`` every setting of a study has a stream of hidden
    states of its own, on the disk where they are many.

    Args:
        decoder: the models' common decoder.
        models: the base model, then the ``T`` experts.
        tasks: the token ids of each expert's samples.
        levels: the levels to measure.
        studies: what to measure.
        batch_tokens: the most positions in one forward pass; 0 fits it to the device.
        progress: told how many samples have passed another layer, in all as often as ``count_passes`` times the layers.

    Returns:
        For each study, submodule name to [n, K, m, m] of the study's ``n`` samples, in their order.

    Raises:
        SltaError: a level does not apply to the models, or a batch does not fit into memory.
    """
    positions = batch_tokens or fitting_batch(decoder.device)
    batches = decoder_batches(decoder, tasks, positions)
    records = [_Record(study, study.rows(tasks)) for study in studies]
    measurement = _Measurement(decoder, models, len(tasks), levels, progress)
    try:
        if set(levels) - {"model"}:
            measurement.measure_layers(records, batches)
        if "model" in levels:
            for record in records:
                measurement.measure_model(record, [b for b in batches if b.task in record.study.experts])
    except torch.OutOfMemoryError as error:
        raise SltaError(
            f"{positions} token positions at once do not fit into the memory of {decoder.device}: "
            "lower 'batch_tokens', and 'max_tokens' if one sample is too long."
        ) from error
    return [record.grams for record in records]


@dataclass
class _Record:
    """What has been measured of a study; ``rows`` are the rows of its samples."""

    study: Study
    rows: list[int]
    grams: Grams = field(default_factory=dict)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {row: place for place, row in enumerate(self.rows)}

    def put(self, name: str, rows: Sequence[int], index: int, grams: torch.Tensor) -> None:
        """Keep the Gram matrices [B, m, m] of some samples for the settings at ``index``.

        Raises:
            SltaError: they are not finite.
        """
        if not grams.isfinite().all():
            raise SltaError(f"The features at {name} are not finite: the weights of an expert overflow float32 there.")
        if name not in self.grams:
            self.grams[name] = grams.new_zeros(len(self.rows), len(self.study.others), *grams.shape[1:])
        self.grams[name][[self._places[row] for row in rows], index] = grams


@dataclass
class _Measurement:
    """What all of a measurement's parts need; see ``measure``."""

    decoder: Decoder
    models: Sequence[Checkpoint]
    tasks: int
    levels: Sequence[str]
    progress: Callable[[int], object]

    def measure_layers(self, records: Sequence[_Record], batches: Sequence[Batch]) -> None:
        """Measure all levels but the model, one layer after the other."""
        streams = Streams(self.decoder, [[self.models[0]] * self.tasks], batches, Ranks())
        for layer in range(len(self.decoder)):
            self._measure_layer(layer, records, streams)
            streams.advance()

    def _measure_layer(self, layer: int, records: Sequence[_Record], streams: Streams) -> None:
        weights = self._read(self.decoder.layer_tensors(layer))
        tokens = sum(sum(batch.lengths) for batch in streams.batches)
        run_levels = [level for level in self.levels if level not in ("model", "linear")]
        features = LayerFeatures(self.decoder, layer, weights, run_levels, tokens)
        maps = LayerFeatures(self.decoder, layer, weights, ["linear"], tokens) if "linear" in self.levels else None
        for number, batch in enumerate(streams.batches):
            hidden, call = streams.hidden(0, number), streams.call(0, number)
            base = features.run_base(hidden, call)
            concerned = [record for record in records if batch.task in record.study.experts]
            for record in concerned if run_levels else ():
                self._run_settings(record, features, base, hidden, call, batch)
            if maps is not None:
                _combine_maps(concerned, maps, hidden, call, batch)
            streams.set_output(0, number, base.output, base.state)
            self.progress(len(batch.rows))

    def _run_settings(
        self,
        record: _Record,
        features: LayerFeatures,
        base: LayerRun,
        hidden: torch.Tensor,
        call: LayerCall,
        batch: Batch,
    ) -> None:
        """Run a layer with all settings of a study on a batch."""

        def run(setting: torch.Tensor) -> ExpertRun:
            weights = blend(features.weights[0], features.weights[1:], setting.tolist())
            done = features.run(weights, base, hidden, call)
            self.progress(len(batch.rows) * _runs_of_layers(self.levels))
            # Of a setting's weights only the map that all heads share is needed again.
            output = [features.heads.output.weight] if features.heads is not None else []
            return replace(done, weights={name: weights[name] for name in output})

        kept = [run(setting) for setting in record.study.kept]
        for index, others in enumerate(record.study.others):
            for name, deltas in features.deltas(base, [*(run(setting) for setting in others), *kept]):
                record.put(name, batch.rows, index, sample_grams(deltas, batch.lengths))

    def measure_model(self, record: _Record, batches: Sequence[Batch]) -> None:
        """Measure level ``model``: the hidden states of every setting through all layers, then the logits."""
        study = record.study
        settings = torch.cat([torch.zeros_like(study.kept[:1]), study.settings])  # stream 0 is the base model's
        tokens = sum(sum(batch.lengths) for batch in batches)
        width = self.decoder.model.config.get_text_config().hidden_size
        size = 2 * len(settings) * tokens * width * torch.float32.itemsize
        folder = Path(tempfile.gettempdir()) if size > MOST_HIDDEN_BYTES else None
        sources = [[Blend(self.models, setting)] * self.tasks for setting in settings]
        streams = Streams(self.decoder, sources, batches, Ranks(), folder)
        for layer in range(len(self.decoder)):
            self._pass_layer(layer, streams, settings)
            streams.advance()
        self._compare_logits(record, streams, settings)

    def _pass_layer(self, layer: int, streams: Streams, settings: torch.Tensor) -> None:
        """Let the samples of every setting pass a layer."""
        base, *experts = self._read(self.decoder.layer_tensors(layer))
        for stream, setting in enumerate(settings):
            weights = blend(base, experts, setting.tolist())
            for number, batch in enumerate(streams.batches):
                hidden, call = streams.hidden(stream, number), streams.call(stream, number)
                run = self.decoder.run(layer, weights, hidden, call)
                streams.set_output(stream, number, run.output, run.state)
                self.progress(len(batch.rows))

    def _compare_logits(self, record: _Record, streams: Streams, settings: torch.Tensor) -> None:
        base_edges, *edges = self._read({name: name for name in self.decoder.edge_tensors()})
        chunk = max(1, LOGITS // self.decoder.model.config.get_text_config().vocab_size)

        def logits(stream: int, states: torch.Tensor) -> torch.Tensor:
            weights = blend(base_edges, edges, settings[stream].tolist())
            return ends.logits(self.decoder, states[None].to(self.decoder.device), weights)

        kept = len(record.study.kept)
        for row, states in streams.final():
            totals: dict[int, torch.Tensor] = {}
            for part in zip(*(states[stream].split(chunk) for stream in range(len(settings))), strict=True):
                base = logits(0, part[0])
                deltas = [logits(stream, part[stream]) - base for stream in range(1, 1 + kept)]
                stream = 1 + kept
                for index, others in enumerate(record.study.others):
                    own = [logits(s, part[s]) - base for s in range(stream, stream + len(others))]
                    stream += len(others)
                    totals[index] = totals.get(index, 0) + sample_grams([*own, *deltas], [base.shape[1]])
            for index, gram in totals.items():
                record.put("model", [row], index, gram)

    def _read(self, names: Mapping[str, str]) -> list[dict[str, torch.Tensor]]:
        return [model.read(names, self.decoder.base_model_prefix, self.decoder.device) for model in self.models]


def _combine_maps(
    records: Sequence[_Record], maps: LayerFeatures, hidden: torch.Tensor, call: LayerCall, batch: Batch
) -> None:
    """A linear map's output is linear in its weights: a setting's delta is the weighted sum of the experts'."""
    base = maps.run_base(hidden, call)
    for name, grams in maps.grams(base, hidden, call, batch.lengths):
        for record in records:
            for index, others in enumerate(record.study.others):
                settings = torch.cat([others, record.study.kept])
                record.put(name, batch.rows, index, settings @ grams @ settings.T)
