"""Measure feature deltas of models between the base model and the experts, as calibration measures experts.

A setting c [T] stands for the weights theta_0 + sum_t c_t tau_t. Each setting runs on the base model's input to a
layer, or as a whole model; the Gram matrices of its feature deltas are kept.

Shapes: ``T`` experts, ``B`` samples in a batch, ``n`` samples of a study, ``m`` settings that are compared.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from mergekit_slta.engine.passes import Accumulator, Progress, Tensors, pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Batch, Source, Streams, Tasks, read_edges
from mergekit_slta.errors import SltaError
from mergekit_slta.layers import ends
from mergekit_slta.layers.blend import StepwiseBlend
from mergekit_slta.layers.calls import LayerCall, Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.submodules import layer_submodules
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.nonlinearity.products import BatchProducts, FirstMaps, first_maps
from mergekit_slta.slta.features import WHOLE, ExpertRun, LayerFeatures
from mergekit_slta.slta.gram import sample_grams

BRANCH_LEVELS = frozenset({"attn_mlp", "head_mlp"})
# At level model, hidden states that take more than this go to the folder for temporary files.
MOST_HIDDEN_BYTES = 2**31
# The number of logits of each setting that are compared at once; for each so many, the head is blended anew.
LOGITS = 2**24

# Submodule name to [n, K, m, m] float64.
Grams = dict[str, torch.Tensor]
# The weights of the task vectors.
Setting = tuple[float, ...]
# What running a setting gives.
Run = TypeVar("Run")


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

    def no_grams(self, samples: int) -> torch.Tensor:
        """Zeros [n, K, m, m]."""
        compared = len(self.others[0]) + len(self.kept)
        return torch.zeros(samples, len(self.others), compared, compared, dtype=torch.float64)


@dataclass(frozen=True)
class TaskStudies:
    """The studies that use the data of one task, whose settings run once although several studies have them.

    Attributes:
        studies: by its number among all, each of the studies.
        kept: the settings that are needed until all studies have run, the experts themselves first.
        others: the further settings.
    """

    studies: Mapping[int, Study]
    kept: tuple[Setting, ...]
    others: tuple[Setting, ...]

    @staticmethod
    def of(task: int, studies: Sequence[Study]) -> TaskStudies:
        """Those of one task among all studies."""
        own = {number: study for number, study in enumerate(studies) if task in study.experts}
        experts = {expert for study in own.values() for expert in study.experts}
        kept = dict.fromkeys(row for study in own.values() for row in _rows(study.kept))
        width = len(next(iter(kept), ()))
        units = [tuple(float(other == expert) for other in range(width)) for expert in sorted(experts)]
        kept = dict.fromkeys([*units, *kept])
        further = (row for study in own.values() for others in study.others for row in _rows(others))
        return TaskStudies(own, tuple(kept), tuple(row for row in further if row not in kept))

    @property
    def settings(self) -> tuple[Setting, ...]:
        return self.kept + self.others

    def compare(
        self,
        run: Callable[[Setting], Run],
        changes: Callable[[list[Run]], Iterable[tuple[str, list[torch.Tensor]]]],
        lengths: Sequence[int],
    ) -> Iterator[tuple[int, int, str, torch.Tensor]]:
        """Run the settings, and compare those that the studies compare.

        Args:
            run: runs a setting on some samples.
            changes: for several runs, each submodule's name with its features' changes [B, S, D], one for each run.
            lengths: the number of tokens of each sample.

        Returns:
            A study's number, the number of one of its ``others``, a submodule's name and the Gram matrices [B, m, m].
        """
        kept = {setting: run(setting) for setting in self.kept}
        for number, study in self.studies.items():
            own = [kept[setting] for setting in _rows(study.kept)]
            known: dict[str, torch.Tensor] = {}
            for other, settings in enumerate(study.others):
                runs = [kept[setting] if setting in kept else run(setting) for setting in _rows(settings)]
                for name, deltas in changes([*runs, *own]):
                    grams = sample_grams(deltas, lengths, known.get(name))
                    known[name] = grams[:, len(runs) :, len(runs) :]
                    yield number, other, name, grams


def _rows(settings: torch.Tensor) -> list[Setting]:
    return [tuple(row) for row in settings.tolist()]


def count_passes(studies: Sequence[Study], tasks: Tasks, levels: Sequence[str]) -> int:
    """How many forward passes of one sample studies take; all layers, or all branches, count as one pass."""
    passes = sum(map(len, tasks)) * bool(set(levels) - {"model"})
    for task, samples in enumerate(tasks):
        settings = len(TaskStudies.of(task, studies).settings)
        whole = settings + 1 if "model" in levels and settings else 0  # the base model's too
        passes += len(samples) * (whole + settings * _runs_of_layers(levels))
    return passes


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

    At levels below the model, memory holds one layer of the base model, of each expert and of one setting, and on one
    batch the features of its task's kept settings and the products that its settings share. At level ``model`` every
    setting has its own stream of hidden states on a task's samples, on the disk if they are large.

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
    of_model: list[list[torch.Tensor]] = [[] for _ in studies]  # by study, task after task
    for task in range(len(tasks)) if "model" in levels else ():
        concerned = TaskStudies.of(task, studies)
        if not concerned.studies or not tasks[task]:
            continue
        samples = [own if other == task else [] for other, own in enumerate(tasks)]
        whole = _WholeModel(decoder, models, samples, ranks, concerned)
        tokens = sum(map(len, tasks[task]))
        width = decoder.model.config.get_text_config().hidden_size
        hidden_bytes = 2 * len(whole.settings) * tokens * width * torch.float32.itemsize  # before and after a layer
        folder = Path(tempfile.gettempdir()) if hidden_bytes > MOST_HIDDEN_BYTES else None
        found = pass_layers(whole, batch_tokens=batch_tokens, folder=folder, progress=progress)
        for number, own_grams in found.items():
            of_model[number].append(own_grams)
    for grams, parts in zip(measured, of_model, strict=True):
        if parts:
            grams["model"] = torch.cat(parts)
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
        self.concerned = [TaskStudies.of(task, self.studies) for task in range(len(self.tasks))]
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
        first = first_maps(self.decoder, layer) if run_levels else {}
        shared = {run: first[run] for run in features.runs}
        watch = {module for known in shared.values() for module in known}
        maps = LayerFeatures(self.decoder, layer, weights, ["linear"], self.tokens) if "linear" in self.levels else None
        # No run needs matrices whose outputs are known; a run of the whole layer needs those that only branches know.
        known = [own for name, own in shared.items() if name == WHOLE or not features.whole]
        unused = {name for own in known for found in own.values() for name in (found.weight, found.bias)}
        needed = {name: tensor for name, tensor in weights[0].items() if name not in unused}
        blends = StepwiseBlend(needed, weights[1:])
        for number, batch in enumerate(streams.batches):
            hidden, call = streams.hidden(0, number), streams.call(0, number)
            base = features.run_base(hidden, call, watch)
            if run_levels and self.concerned[batch.task].studies:
                self._run_settings(features, shared, blends, base, hidden, call, batch, report)
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
        shared: FirstMaps,
        blends: StepwiseBlend,
        base: LayerRun,
        hidden: torch.Tensor,
        call: LayerCall,
        batch: Batch,
        report: Progress,
    ) -> None:
        """Run a layer with all settings of a task's studies on a batch."""
        concerned = self.concerned[batch.task]
        watch = {module for maps in shared.values() for module in maps}
        experts: dict[int, ExpertRun] = {}
        products = BatchProducts(shared, features.weights, base, experts)

        def run(setting: Setting) -> ExpertRun:
            row = torch.tensor(setting, dtype=torch.float64)
            own = row.nonzero().flatten().tolist()
            if sum(setting) == 1 and len(own) == 1:
                weights = features.weights[1 + own[0]]
                done = features.run(weights, base, hidden, call, watch=watch)
                experts[own[0]] = done
            else:
                weights = {**features.weights[0], **blends.at(row)}
                done = features.run(weights, base, hidden, call, known=products.outputs(row))
            report(len(batch.rows) * _runs_of_layers(self.levels))
            # Keep only those of the setting's weights that are needed again: the map that all heads share.
            output = [features.heads.output.weight] if features.heads is not None else []
            return replace(done, weights={name: weights[name].clone() for name in output})

        changes = functools.partial(features.deltas, base)
        for index, other, name, grams in concerned.compare(run, changes, batch.lengths):
            self._put(index, name, batch, other, grams)

    def _combine_maps(self, maps: LayerFeatures, hidden: torch.Tensor, call: LayerCall, batch: Batch) -> None:
        """Compute the linear maps' Gram matrices without running settings: a map's output is linear in its weights."""
        base = maps.run_base(hidden, call)
        for name, grams in maps.grams(base, hidden, call, batch.lengths):
            for index, study in self.concerned[batch.task].studies.items():
                for other, others in enumerate(study.others):
                    settings = torch.cat([others, study.kept])
                    self._put(index, name, batch, other, settings @ grams @ settings.T)

    def _put(self, index: int, name: str, batch: Batch, other: int, grams: torch.Tensor) -> None:
        """Keep the Gram matrices [B, m, m] of a batch in a study."""
        self.grams[index][name][[self.places[index][row] for row in batch.rows], other] = grams


@dataclass
class _WholeModel(Accumulator[dict[int, torch.Tensor]]):
    """One task's studies at level ``model``: each setting's hidden states through all layers, then the logits."""

    concerned: TaskStudies

    def __post_init__(self) -> None:
        base = (0.0,) * (len(self.models) - 1)  # stream 0 is the base model's
        self.settings = torch.tensor([base, *self.concerned.settings], dtype=torch.float64)

    def sources(self) -> list[list[Source]]:
        """Every setting's stream."""
        ids = torch.tensor([0, *(token for samples in self.tasks for row in samples for token in row)])  # 0 pads
        shared = _Embeddings(self.models, ends.embedding_tensor(self.decoder), ids.unique())
        return [[_Start(shared, setting)] * len(self.tasks) for setting in self.settings]

    def take_layer(self, layer: int, weights: Sequence[Weights], streams: Streams, report: Progress) -> Tensors:
        """Run the layer with every setting's weights on its stream."""
        blends = StepwiseBlend(weights[0], weights[1:])
        for stream, setting in enumerate(self.settings):
            blended = blends.at(setting)
            for number, batch in enumerate(streams.batches):
                streams.run_layer(stream, number, blended)
                report(len(batch.rows))
        return {}

    def finish(self, streams: Streams, report: Progress) -> dict[int, torch.Tensor]:
        """By study, the Gram matrices [n, K, m, m] of the logits' change on the task's samples."""
        names = ends.logit_tensors(self.decoder)
        base_edges, *edges = (read_edges(self.decoder, model, names) for model in self.models)
        blends = StepwiseBlend(base_edges, edges)
        most = max(1, LOGITS // self.decoder.model.config.get_text_config().vocab_size)
        stream_of = {setting: stream for stream, setting in enumerate(self.concerned.settings, 1)}
        samples = sum(map(len, self.tasks))
        found = {number: study.no_grams(samples) for number, study in self.concerned.studies.items()}

        def logits(stream: int, batch: int, own: slice, positions: slice) -> torch.Tensor:
            states = streams.hidden(stream, batch, own)[:, positions]
            return ends.logits(self.decoder, states, blends.at(self.settings[stream]))

        for number, batch in enumerate(streams.batches):
            for own, positions in _pieces(batch.lengths, most):
                base = logits(0, number, own, positions)

                def change(setting: Setting) -> torch.Tensor:
                    return logits(stream_of[setting], number, own, positions).sub_(base)  # noqa: B023

                lengths = [min(max(0, length - positions.start), most) for length in batch.lengths[own]]
                rows = list(batch.rows[own])
                for study, other, _, grams in self.concerned.compare(change, lambda own: [("model", own)], lengths):
                    found[study][rows, other] += grams
        return {number: _put_together("model", grams, self.ranks) for number, grams in found.items()}


def _pieces(lengths: Sequence[int], tokens: int) -> Iterator[tuple[slice, slice]]:
    """The samples and the positions of a batch in pieces of at most ``tokens`` positions, padding included.

    Args:
        lengths: the samples' numbers of tokens, the longest first.
        tokens: the most positions of a piece.
    """
    first = 0
    while first < len(lengths):
        longest = lengths[first]
        last = first + max(1, tokens // longest)
        yield from ((slice(first, last), slice(start, start + tokens)) for start in range(0, longest, tokens))
        first = last


class _Embeddings:
    """The models' tensors before the first layer, read once; of the embedding only the rows of some tokens.

    Args:
        models: the base model, then the ``T`` experts.
        name: the model's name of the embedding.
        tokens: the ids [n] of the tokens that are looked up.
    """

    def __init__(self, models: Sequence[Checkpoint], name: str, tokens: torch.Tensor) -> None:
        self._models = models
        self._name = name
        self._tokens = tokens
        self._blends: StepwiseBlend | None = None

    def at(
        self, setting: torch.Tensor, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """The tensors at a setting, until the next call."""
        if self._blends is None:
            base, *experts = self._models
            whole = base.read(names, base_model_prefix, device)
            self._embedding = whole[self._name].clone()
            own = [self._of_tokens(model.read(names, base_model_prefix, device)) for model in experts]
            self._blends = StepwiseBlend(self._of_tokens(whole), own)
        blended = self._blends.at(setting)
        self._embedding[self._tokens.to(device)] = blended[self._name]
        return {**blended, self._name: self._embedding}

    def _of_tokens(self, tensors: Weights) -> Weights:
        embedding = tensors[self._name]
        return {**tensors, self._name: embedding[self._tokens.to(embedding.device)]}


@dataclass(frozen=True)
class _Start:
    """What a setting's stream begins with."""

    embeddings: _Embeddings
    setting: torch.Tensor

    def read(
        self, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does; they are valid until another setting's are read."""
        return self.embeddings.at(self.setting, names, base_model_prefix, device)
