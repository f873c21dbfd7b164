"""Find which linear maps of a decoder layer are solved together, and in which order.

Those that add to the residual stream can correct what the maps before them have missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mergekit_slta.layers.calls import made_up_layer
from mergekit_slta.layers.decoder import INPUT, Decoder, LayerRun, Writer
from mergekit_slta.layers.maps import (
    LinearMap,
    expert_stacks,
    is_fused,
    is_numbered,
    linear_maps,
    matrices_in,
    takes_some_tokens,
)
from mergekit_slta.layers.trace import find_writers, of_each_layer
from mergekit_slta.words import listed

# Why maps are not solved.
SOME_TOKENS = "in a module that receives only some of the tokens"
SHARED = "shared by several layers"
NO_ROUTES = "that compute all routed experts together: which tokens each expert gets is not known"


@dataclass(frozen=True)
class MapGroup:
    """Linear maps with the same input inside one child of the layer, or the routed experts of a mixture."""

    child: str  # the child of the layer that holds the maps, or of such a child the part that the layer calls
    module: str  # the path of the first module in the group that the layer calls
    maps: tuple[LinearMap, ...]  # in the order in which the layer calls them
    outputs: int  # how many numbers for a token their modules' outputs have
    fused: bool = False  # whether the maps are routed experts in one module, each with its own input

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(linear_map.module for linear_map in self.maps))

    def __str__(self) -> str:
        names = [module.removeprefix(f"{self.child}.") for module in self.modules]
        return f"{self.child}.{'/'.join(names)}" if names != [self.child] else self.child


@dataclass(frozen=True)
class LayerMaps:
    """The linear maps of a layer."""

    groups: tuple[MapGroup, ...]  # the maps to solve, in the order in which they feed each other
    unsolved: Mapping[str, str]  # why maps, and tensors that hold several in an unknown way, stay the anchor's; by name
    anchored: tuple[LinearMap, ...]  # the maps and matrices of these, and what no expert of a mixture uses
    writers: Mapping[str, Writer]  # of the layer, solved when all that the stream is the sum of before them is known


def find_groups(decoder: Decoder, layer: int) -> LayerMaps:
    """Trace a layer once to see which maps receive the same tensor, and in which order."""
    built, names = decoder.layers[layer], decoder.layer_tensors[layer]
    every, by_module = linear_maps(built), dict[str, list[LinearMap]]()
    for linear_map in every:
        by_module.setdefault(linear_map.module, []).append(linear_map)
    with torch.no_grad():
        run = decoder.run(layer, *made_up_layer(decoder, layer), inputs_of=by_module, outputs_of=by_module)
    groups: list[MapGroup] = []
    never_called = "not used by calling the module"
    unsolved = {m.name: SOME_TOKENS if is_numbered(m.module) else never_called for m in every}
    shared = {m.module for m in every if names[m.weight] in decoder.shared_tensors}
    unsolved |= {m.name: SHARED for m in every if m.module in shared}
    previous: object = None
    for module in run.inputs:
        maps, child = tuple(by_module[module]), module.partition(".")[0]
        fused = is_fused(built.get_submodule(module))
        if why := SHARED if module in shared else _unsolvable(maps, every, built, run):
            unsolved |= {m.name: why for m in maps}
            continue
        for linear_map in maps:
            del unsolved[linear_map.name]
        features, outputs = run.inputs[module][0], run.outputs[module].numel() // run.output.shape[:2].numel()
        same = None if fused else (child, features.data_ptr(), features.shape[-1], features.numel())  # also for views
        if child in run.opened:  # whose parts the layer calls one by one, between other children
            child = module
        if groups and same and same == previous:
            groups[-1] = replace(groups[-1], maps=groups[-1].maps + maps, outputs=groups[-1].outputs + outputs)
        else:
            groups.append(MapGroup(child, module, maps, outputs, fused))
        previous = same
    known = {(linear_map.weight, linear_map.mixture_expert) for linear_map in every}
    stacks = {name: matrices_in(built, name) for name in expert_stacks(built)}
    anchored = [linear_map for linear_map in every if linear_map.name in unsolved]
    anchored += [part for parts in stacks.values() for part in parts if (part.weight, part.mixture_expert) not in known]
    unsolved |= {name: NO_ROUTES for name in stacks if (name, 0) not in known}
    modules = {module for group in groups if not group.fused for module in group.modules}
    writers = find_writers(decoder, layer)
    known_sources = {INPUT, *(group.child for group in groups), *(writer.norm for writer in writers.values())}
    writers = {
        module: one for module, one in writers.items() if module in modules and one.stream.keys() <= known_sources
    }
    return LayerMaps(tuple(groups), unsolved, tuple(anchored), writers)


def uncorrected(decoder: Decoder) -> str:
    """The layers in which no map corrects drift, in a sentence; empty if there are none."""
    maps = enumerate(of_each_layer(decoder, find_groups))
    layers = [str(layer) for layer, of_layer in maps if not of_layer.writers]
    return f"In layers {listed(layers)}, no map corrects what earlier layers have missed." if layers else ""


def in_words(unsolved: Mapping[str, str]) -> str:
    """The maps that are not solved, those of one reason together, and the reason."""
    names: dict[str, list[str]] = {}
    for name, why in unsolved.items():
        names.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(maps)} ({why})" for why, maps in names.items())


def _unsolvable(maps: Sequence[LinearMap], every: Sequence[LinearMap], layer: torch.nn.Module, run: LayerRun) -> str:
    """Why the maps of a module, which the layer calls, cannot be solved; empty if they can."""
    module, state = maps[0].module, layer.state_dict()
    inputs, child, parent = run.inputs[module], module.partition(".")[0], module.rpartition(".")[0]
    rows, columns = maps[0].matrix(state).shape
    alone = [m.module.partition(".")[0] for m in every].count(child) == 1
    stacks = expert_stacks(layer).items()  # in the map's child of the layer, or anywhere if it is alone there
    mixture_experts = {len(stack) for name, stack in stacks if name.partition(".")[0] == child or alone}
    if maps[0].mixture_expert is None and rows in mixture_experts:  # one row for each expert of a mixture
        beside = (m for m in every if m.mixture_expert is None and m.module.rpartition(".")[0] == parent)
        if not any(m.matrix(state).shape[1] == rows for m in beside):  # which takes a shared expert's rows
            return "that choose a mixture's routed experts"
    if run.repeated & {child, module}:
        return "called more than once"
    tokens = run.output.shape[:2]
    if is_fused(layer.get_submodule(module)):
        return "" if _tells_routes(inputs, len({m.mixture_expert for m in maps}), tokens.numel()) else NO_ROUTES
    sizes = [given.shape[-1] for given in (inputs[0], run.outputs[module]) if isinstance(given, torch.Tensor)]
    if sizes != [columns, rows]:  # it may be a matrix of blocks, each of another input
        return "in a module that does more than multiply"
    return SOME_TOKENS if takes_some_tokens(module, inputs[0], tokens) else ""


def _tells_routes(inputs: tuple[Any, ...], experts: int, tokens: int) -> bool:
    """Whether a fused mixture's module is called in one of the two ways that ``routed_inputs`` knows."""
    if len(inputs) == 1:
        return bool(inputs[0].shape[:-1].numel() == experts * tokens)
    return isinstance(inputs[1], torch.Tensor) and not inputs[1].is_floating_point()
