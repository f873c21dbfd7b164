"""The Gram matrices of feature deltas, how much each expert changes each submodule's features (arXiv 2504.10902).

Algorithm 1, Eq. 14, A.3.3 and A.3.5. For a submodule with input features x, gathered by running the base model on a
sample, and expert b:

    Delta_b(x) = f(x; theta_b) - f(x; theta_0)                           the feature delta [S, D], without padding
    G_x[b, c]  = sum over tokens and dimensions of Delta_b(x) Delta_c(x)     the sample's Gram matrix [T, T] (Eq. 14)

The paper runs the base model through all layers, stores each submodule's inputs, and then goes over the submodules; the
engine's loop (``engine/loop.py``) does both layer by layer, so that no inputs are stored. Everything after the Gram
matrices is arithmetic on them (``solver.py``), and ``weights.py`` gives every tensor the weights of its submodule.

Shapes: ``N`` samples of all tasks, ``B`` of them in a batch, ``T`` experts, ``S`` tokens (right-padded), ``D``
dimensions. Task T may be the base model's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mergekit_slta import files
from mergekit_slta.data.sources import source_name
from mergekit_slta.engine.loop import LayerMethod, Progress, pass_layers
from mergekit_slta.engine.memory import batch_bytes, batch_shapes, children, edge_bytes, layer_bytes, states_bytes
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, Tasks, read_edges
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.calls import logits
from mergekit_slta.layers.decoder import Decoder, LayerCall, LayerRun
from mergekit_slta.layers.maps import Heads, LinearMap, RoutedInputs, fused_hidden, linear_maps, routed_inputs
from mergekit_slta.layers.trace import find_heads, find_structure, of_each_layer, on_device
from mergekit_slta.levels import BRANCHES, head_part, submodule_name
from mergekit_slta.models.checkpoint import Checkpoint, Tensors
from mergekit_slta.models.fingerprint import hashed_computation
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe, published_names, require_calibration
from mergekit_slta.recipe.settings import CalibrationSettings, SltaSettings
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.statistics_file import BaseContent, CalibrationInfo, Fingerprint, Info
from mergekit_slta.slta.weights import fallbacks, layer_parts

LOG = logging.getLogger(__name__)

# Submodule name to [N, T, T] float64.
Grams = dict[str, torch.Tensor]

BASE = 0  # the base model's stream; at level ``model``, streams 1 to T are the experts'
WHOLE = "whole"  # the run of a whole layer, beside those of its branches
# Numbers of each vector whose products are summed in float32: 64 chains of 64 terms are exact to 1e-7 or so.
IN_FLOAT32 = 4096
HELD = 2**17  # numbers of all vectors that are multiplied at once on a processor, whose cache holds their copies
LOGITS = 2**24  # of each model are held at once, because logits are wide


def sample_grams(deltas: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Inner products of the experts' feature deltas, one matrix per sample (the sum in Eq. 14 of arXiv 2504.10902).

    Each sample is reduced alone and without its padding, so that neither the other samples nor the padding can change
    its matrix. From ``T`` feature deltas [B, S, D] and ``B`` lengths; [B, T, T] float64 on the CPU, exactly symmetric.
    """
    rows = enumerate(lengths)
    return torch.stack([inner_products([delta[row, :length].reshape(-1) for delta in deltas]) for row, length in rows])


def inner_products(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inner products [T, T] of ``T`` float32 vectors [n], float64 on the CPU and exactly symmetric.

    The products of ``IN_FLOAT32`` numbers are summed in float32 on the vectors' device, these sums in float64 on the
    CPU.
    """
    on_cpu, total = vectors[0].device.type == "cpu", torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    size = max(HELD // len(vectors) // IN_FLOAT32, 1) * IN_FLOAT32 if on_cpu else max(len(vectors[0]), 1)
    for parts in zip(*(vector.split(size) for vector in vectors), strict=True):
        features = torch.stack(parts)
        whole = features.shape[1] // IN_FLOAT32 * IN_FLOAT32
        for blocks in (features[:, :whole].unflatten(1, (-1, IN_FLOAT32)).transpose(0, 1), features[None, :, whole:]):
            total += (blocks @ blocks.mT).cpu().double().sum(0)
    return (total + total.T) / 2


def of_all_ranks(measured: Grams, ranks: Ranks, base: object, models: Sequence[object]) -> Grams:
    """Sum Gram matrices over the ranks, each of which holds its own samples; refuse what is not finite."""
    grams = {name: ranks.sum(part) for name, part in measured.items()}
    for name, gram in grams.items():
        finite = gram.diagonal(dim1=1, dim2=2).isfinite().all(0).tolist()
        if broken := dict.fromkeys(str(model) for model, fine in zip(models, finite, strict=True) if not fine):
            raise SltaError(
                f"The features of {', '.join(broken)} at {name} are not finite: they overflow float32, because the "
                f"model's tensors or those of {base} are too large. Leave the model out, or get an undamaged copy."
            )
    return grams


class MapDeltas:
    """A map's change from the base model to each expert, and the Gram matrices of its output's change.

    The output changes by exactly x (W_t - W_0)^T, so no expert has to run. ``tensors`` are the layer's tensors of the
    base model, then of each of the ``T`` experts.
    """

    def __init__(self, linear_map: LinearMap, tensors: Sequence[Tensors]) -> None:
        base, offset = linear_map.matrix(tensors[0]), linear_map.offset(tensors[0])
        self.matrices = [linear_map.matrix(expert) - base for expert in tensors[1:]]
        offsets = [linear_map.offset(expert) for expert in tensors[1:]]
        self.biases = [None if offset is None or other is None else other - offset for other in offsets]

    def gram(self, inputs: torch.Tensor) -> torch.Tensor:
        """The Gram matrix [T, T] float64 of one sample, from the map's inputs [S, D]; exactly symmetric."""
        pairs = zip((inputs @ matrix.T for matrix in self.matrices), self.biases, strict=True)
        return inner_products([(delta if bias is None else delta + bias).flatten() for delta, bias in pairs])


@dataclass(frozen=True)
class ExpertRun:
    """Runs of a layer with other tensors than the base model's, on the base model's inputs."""

    tensors: Tensors  # those of the layer's tensors that are needed to tell the heads' features apart
    # By ``WHOLE`` the run of the whole layer, where its output is wanted; by branch the run in which all other branches
    # return what they return in the base model.
    by_part: Mapping[str, LayerRun]


class LayerFeatures:
    """One layer of all models: runs it on a batch after the other, and measures the submodules of the levels.

    At ``attn_mlp``, for each branch: ``run`` the expert's branch while the other one returns what it returns in the
    base model, subtract the base model's features (``deltas``), and take inner products prompt by prompt (``grams``).
    ``tensors`` are the layer's tensors of the base model, then of each of the ``T`` experts.
    """

    def __init__(self, decoder: Decoder, layer: int, tensors: Sequence[Tensors], levels: Sequence[str]) -> None:
        self.decoder, self.layer, self.tensors = decoder, layer, tensors
        parts = dict.fromkeys(part for level in levels for part in layer_parts(decoder, level, layer))
        self.names = [submodule_name(layer, part) for part in parts]  # of the submodules
        self.whole = "" in parts
        self.structure = of_each_layer(decoder, find_structure)[layer]
        of_layer = [name for name in tensors[0] if "." not in name]  # such as a constant that all is multiplied by
        if any(not torch.equal(expert[name], tensors[0][name]) for name in of_layer for expert in tensors[1:]):
            self.structure = replace(self.structure, summands=None)
        heads = of_each_layer(decoder, find_heads)[layer] if "head_mlp" in levels else None
        self.heads = heads if isinstance(heads, Heads) else None
        self.head_modules = {self.heads.output.module} if self.heads else set[str]()  # whose inputs tell heads apart
        split = [branch for branch in BRANCHES if branch in self.structure.branches]
        self.branches = [branch for branch in split if branch in parts]
        self.branches_to_run = [b for b in split if b in parts or (b == "attn" and self.heads is not None)]
        self.maps: dict[LinearMap, MapDeltas | None] = {}
        for linear_map in (m for m in linear_maps(decoder.layers[layer]) if m.name in parts):
            routed = linear_map.mixture_expert is not None  # there may be too many of these to have at once
            self.maps[linear_map] = None if routed else MapDeltas(linear_map, tensors)
        self.modules = {linear_map.module for linear_map in self.maps} | self.head_modules  # whose inputs are measured

    @cached_property
    def changed_children(self) -> list[frozenset[str]]:
        """For each expert, the layer's children, and tensors of its own, that differ from the base model's."""
        base, *experts = self.tensors
        return [
            frozenset(name.partition(".")[0] for name, tensor in expert.items() if not torch.equal(tensor, base[name]))
            for expert in experts
        ]

    def run(
        self,
        tensors: Tensors,
        base: LayerRun,
        hidden: torch.Tensor,
        call: LayerCall,
        changed: frozenset[str] | None = None,  # the children whose tensors differ from the base model's; None for any
    ) -> ExpertRun:
        """Run the layer with other tensors on the base model's input, and its branches each on theirs.

        Where nothing differs, a run would repeat the base model's but for rounding: that one stands for it.
        """
        by_part: dict[str, LayerRun] = {}
        for part in [*[WHOLE] * self.whole, *self.branches_to_run]:
            replay = {} if part == WHOLE else self.structure.others_of(part, base)
            how = {"replay": replay, "inputs_of": self.head_modules}
            repeats = changed is not None and not changed & self.structure.branches.get(part, changed)
            by_part[part] = base if repeats else self.decoder.run(self.layer, tensors, hidden, call, **how)
        return ExpertRun({self.heads.output.weight: tensors[self.heads.output.weight]} if self.heads else {}, by_part)

    def deltas(self, base: LayerRun, runs: Sequence[ExpertRun]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Each submodule's name and its feature deltas, one [B, S, D] per run; linear maps are left out."""
        if self.whole:
            yield submodule_name(self.layer), [self.structure.change(WHOLE, run.by_part[WHOLE], base) for run in runs]
        for branch in self.branches:
            deltas = [self.structure.change(branch, run.by_part[branch], base) for run in runs]
            yield submodule_name(self.layer, branch), deltas
        for head in range(self.heads.count if self.heads is not None else 0):
            features = self._head_features(head, base, self.tensors[0])
            deltas = [self._head_features(head, run.by_part["attn"], run.tensors) - features for run in runs]
            yield submodule_name(self.layer, head_part(head)), deltas

    def grams(
        self, base: LayerRun, hidden: torch.Tensor, call: LayerCall, lengths: Sequence[int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each submodule's name and its Gram matrices [B, T, T] float64, given the base model's run on a batch."""
        experts, runs = self.tensors[1:], list[ExpertRun]()
        if self.whole or self.branches_to_run:
            pairs = zip(experts, self.changed_children, strict=True)
            runs = [self.run(tensors, base, hidden, call, changed=changed) for tensors, changed in pairs]
        for name, deltas in self.deltas(base, runs):
            yield name, sample_grams(deltas, lengths)
        routed = {
            m.module: routed_inputs(base.inputs[m.module], len(self.tensors[0][m.weight]))
            for m in self.maps
            if m.mixture_expert == 0 and m.module in base.inputs
        }
        for linear_map, deltas_of_map in self.maps.items():
            inputs = list(self._inputs(linear_map, base, routed, lengths))
            grams = torch.zeros(len(inputs), len(experts), len(experts), dtype=torch.float64)
            if any(map(len, inputs)):
                of_map = deltas_of_map or MapDeltas(linear_map, self.tensors)
                grams = torch.stack([of_map.gram(of_sample) for of_sample in inputs])
            yield submodule_name(self.layer, linear_map.name), grams

    def _head_features(self, head: int, run: LayerRun, tensors: Tensors) -> torch.Tensor:
        """o_proj restricted to a head's columns, applied to that head's output (A.3.5)."""
        assert self.heads is not None
        output = self.heads.output
        part = run.inputs[output.module][0].unflatten(-1, (self.heads.count, -1))[..., head, :]
        columns = output.matrix(tensors).unflatten(-1, (self.heads.count, -1))[:, head, :]
        return part @ columns.T

    def _inputs(
        self, linear_map: LinearMap, base: LayerRun, routed: Mapping[str, RoutedInputs], lengths: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Each sample's inputs [S, D] to a map in the base model, of the tokens that reach it, without padding."""
        if linear_map.module not in base.inputs:  # the layer never calls it, or no token reaches it
            width = linear_map.matrix(self.tensors[0]).shape[-1]
            yield from [torch.zeros(0, width, device=self.decoder.device)] * len(lengths)
            return
        values = base.inputs[linear_map.module][0]
        values = values.reshape(-1, values.shape[-1])
        positions = torch.arange(len(values), device=values.device)
        width = len(values) // len(lengths)
        if linear_map.mixture_expert is not None:
            tokens = routed[linear_map.module]
            reaching = (tokens.routes == linear_map.mixture_expert).any(-1)
            values, positions, width = tokens.values[reaching], tokens.tokens[reaching], max(lengths)
            if linear_map.name.endswith(".down_proj"):
                place = linear_map.module, linear_map.mixture_expert
                first, _ = (m for m in self.maps if (m.module, m.mixture_expert) == place)
                module = self.decoder.layers[self.layer].get_submodule(linear_map.module)  # for its own gate
                values = fused_hidden(module, first.function(self.tensors[0])(values))
        rows = max(1, width // max(lengths))  # a token may have several hidden states
        for row, length in enumerate(lengths):
            yield values[(positions >= row * width) & (positions < row * width + min(length * rows, width))]


def logit_grams(
    decoder: Decoder, streams: Streams, grams: torch.Tensor, edges: Callable[[], Iterable[Tensors]]
) -> torch.Tensor:
    """The Gram matrices of the logits' change, from each stream's hidden states after the last layer.

    They are added to zeros ``grams`` [N, K, K] float64 for the K streams that are compared with stream 0, the base
    model's; those of other ranks' samples stay zero. ``edges`` gives the ``logit_tensors`` of each stream's model.
    """
    width = max(1, LOGITS // decoder.model.config.get_text_config().vocab_size)
    for row, states in streams.final():
        for part in zip(*(states[stream].split(width) for stream in range(len(states))), strict=True):
            pairs = zip(part, edges(), strict=True)
            base, *others = (logits(decoder, hidden[None].to(decoder.device), edge) for hidden, edge in pairs)
            grams[row] += sample_grams([other.sub_(base) for other in others], [base.shape[1]])[0]
    return grams


# All layers


def calibration_bytes(decoder: Decoder, models: int, tasks: Tasks, level: str) -> int:
    """The bytes that it takes to measure so many models, the base model included, at a level."""
    streams, linear = models if level == "model" else 1, level == "linear"
    # Of each model the outputs of the layer's children and of a run of each branch, and their change with its parts; of
    # the last one what is inside the MLP; at level ``linear`` also the changes of all maps.
    shapes, hidden = batch_shapes(decoder, tasks), (children(decoder) + 4) * models + 1
    batch = batch_bytes(decoder, shapes, hidden, inner=5 if linear else 3, scores=models + 1)
    layers = (1 + linear) * layer_bytes(decoder, models) + batch
    return states_bytes(decoder, tasks, streams) + max(edge_bytes(decoder) * streams, layers)


@dataclass
class Calibration(LayerMethod[Grams]):
    """The Gram matrix [N, T, T] of every submodule on every calibration sample, rows ordered by task.

    ``models`` are the base model, then the ``T`` experts; the layers so far are in ``grams``.
    """

    levels: Sequence[str]

    def __post_init__(self) -> None:
        samples, experts = sum(map(len, self.tasks)), len(self.models) - 1
        self.shape = samples, experts, experts
        self.followed = range(len(self.models) if "model" in self.levels else 1)  # a stream for each of these models
        self.grams: Grams = {}

    def sources(self) -> list[list[Checkpoint]]:
        """[stream][task]: the model that embeds the samples; level ``model`` also needs each expert's own stream."""
        return [[self.models[stream]] * len(self.tasks) for stream in self.followed]

    def take_layer(self, layer: int, tensors: Sequence[Tensors], streams: Streams, report: Progress) -> Tensors:
        """Measure the layer's submodules on every sample, with the base model's inputs."""
        features = LayerFeatures(self.decoder, layer, tensors, self.levels)
        measured = {name: torch.zeros(self.shape, dtype=torch.float64) for name in features.names}
        for number, batch in enumerate(streams.batches):
            hidden, call = streams.hidden(BASE, number), streams.call(BASE, number)
            base = streams.run_layer(BASE, number, tensors[0], inputs_of=features.modules)
            for name, grams in features.grams(base, hidden, call, batch.lengths):
                measured[name][list(batch.rows)] = grams
            for stream in self.followed[1:]:
                streams.run_layer(stream, number, tensors[stream])
            report(len(batch.rows))
        return self._add(measured)

    def repeat_layer(
        self, layer: int, tensors: Sequence[Tensors], stored: Tensors, streams: Streams, report: Progress
    ) -> None:
        """Take over the Gram matrices of a layer's file, and run the layer without measuring its submodules again."""
        self.grams |= stored
        for number, batch in enumerate(streams.batches):
            for stream in self.followed:
                streams.run_layer(stream, number, tensors[stream])
            report(len(batch.rows))

    def finish(self, streams: Streams, report: Progress) -> Grams:
        """All Gram matrices, those of the model as a whole included."""
        if "model" in self.levels:
            edges = [read_edges(self.decoder, model, self.decoder.logit_tensors) for model in self.models]
            zeros = torch.zeros(self.shape, dtype=torch.float64)
            self._add({"model": logit_grams(self.decoder, streams, zeros, lambda: edges)})
        return self.grams

    def _add(self, measured: Grams) -> Grams:
        """Add the Gram matrices of all ranks' samples."""
        grams = of_all_ranks(measured, self.ranks, self.models[0], self.models[1:])
        self.grams |= grams
        return grams


# A recipe's measurement


def calibrate(experiment: Experiment, levels: Sequence[str], partial: Partial | None) -> Statistics:
    """Measure an opened recipe's models on its prompts, but for the layers in a folder that this process holds."""
    recipe, config, ranks = experiment.recipe, experiment.base.config, experiment.ranks
    require_calibration(recipe)
    data, names = experiment.load_data(recipe.tasks), published_names(recipe)
    settings = recipe.settings_of(CalibrationSettings)
    if partial is not None:
        partial.begin(experiment.identity(data, levels=levels), ranks, experiment.quiet)
    described = [
        CalibrationInfo(source=source_name(drawn.source), template=task.template, sha256=drawn.sha256)
        for task, drawn in zip(recipe.tasks, data, strict=True)
    ]
    base, *experts = (model.fingerprint for model in experiment.checkpoints)
    content = BaseContent(tensors=base, config=hashed_computation(config))
    coarser = tuple(fallback for level in levels for fallback in fallbacks(experiment.decoder, level))
    for fallback in coarser:
        LOG.warning("%s", fallback)
    info = Info(
        format_version=2,
        levels=tuple(levels),
        base_model=names[0],
        models=tuple(names[1:]),
        calibration=tuple(described[: len(recipe.experts)]),
        keep=described[-1] if recipe.keep else None,
        samples=max(expert.samples for expert in recipe.experts),  # the hashes of the tokens tell the rest
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        inputs="base",
        architecture=(config.architectures or [""])[0],
        num_layers=len(experiment.decoder),
        dtype=experiment.base.dtype,
        versions=files.versions(),
        fingerprint=Fingerprint(base=content, experts=tuple(experts)),
        fallbacks=coarser,
    )
    decoder, tasks = on_device(experiment.decoder, experiment.device), [drawn.token_ids for drawn in data]
    grams = _finished(partial, len(decoder), ranks) if partial is not None and "model" not in levels else {}
    if not grams:
        calibration = Calibration(decoder, experiment.checkpoints, tasks, ranks, levels)
        grams = pass_layers(calibration, f"Calibrating {', '.join(levels)}", partial=partial, quiet=experiment.quiet)
    for model in experiment.checkpoints:
        model.refuse_changes()
    task = torch.tensor([task for task, rows in enumerate(tasks) for _ in rows])
    return Statistics(grams, task, torch.tensor([len(row) for rows in tasks for row in rows]), info)


def _finished(partial: Partial, layers: int, ranks: Ranks) -> Grams:
    """The Gram matrices of a measurement that was killed after its last layer, while mergekit wrote; else none."""
    finished = partial.finished(layers)
    ranks.require_equal(len(finished), partial.folder)
    if len(finished) < layers:
        return {}
    grams = {name: gram for layer in finished for name, gram in partial.load(layer).items()}
    ranks.wait()  # the first one removes the folder
    return grams


def solve_arguments(recipe: Recipe) -> dict[str, Any]:
    """The arguments of ``Statistics.solve`` for the merge that a recipe for ``slta`` describes."""
    settings = recipe.settings_of(SltaSettings)
    return settings.model_dump(include={"level", "balance", "ridge"}) | {"keep_weight": recipe.keep_weight}
