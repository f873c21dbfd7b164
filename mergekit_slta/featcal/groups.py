"""Find which linear maps of a decoder layer are solved together, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from mergekit_slta.featcal.writers import Writer, find_writers
from mergekit_slta.layers.decoder import INPUT, Decoder
from mergekit_slta.layers.maps import LinearMap, is_fused, linear_maps
from mergekit_slta.layers.probe import made_up_layer
from mergekit_slta.layers.recording import LayerRun

# Why maps are not solved.
SOME_TOKENS = "in a module that is given some of the tokens only"
NO_ROUTES = "in a module that is not given the experts of each token"


@dataclass(frozen=True)
class MapGroup:
    """Linear maps with the same input inside one child of the layer, or the routed experts of a mixture.

    Attributes:
        child: the child of the layer that holds the maps, or of such a child the part that the layer calls.
        module: the path of the first module in the group that the layer calls.
        maps: the maps, in the order in which the layer calls them.
        fused: whether the maps are routed experts in one module, each with its own input.
    """

    child: str
    module: str
    maps: tuple[LinearMap, ...]
    fused: bool = False

    @property
    def modules(self) -> list[str]:
        """The paths of the modules that hold the maps."""
        return list(dict.fromkeys(linear_map.module for linear_map in self.maps))

    def __str__(self) -> str:
        names = [module.removeprefix(f"{self.child}.") for module in self.modules]
        return f"{self.child}.{'/'.join(names)}" if names != [self.child] else self.child


@dataclass(frozen=True)
class LayerMaps:
    """The linear maps of a layer.

    Attributes:
        groups: the maps to solve, in the order in which they feed each other.
        kept: why maps stay the anchor's, by their names; tensors that hold several matrices in an unknown way too.
        writers: the modules whose output is added to the residual stream, where that is known.
    """

    groups: tuple[MapGroup, ...]
    kept: Mapping[str, str]
    writers: Mapping[str, Writer]


@functools.lru_cache(maxsize=1)
def groups_by_layer(decoder: Decoder) -> tuple[LayerMaps, ...]:
    """The groups of every layer; layers of the same kind are traced once.

    Maps that several layers share are solved in the first of them that calls them.
    """
    found, solved, tensors = [], set[str](), [decoder.layer_tensors(layer) for layer in range(len(decoder))]
    of_kind = {layer: find_groups(decoder, layer) for layer in decoder.one_of_each_kind()}
    for layer, names in enumerate(tensors):
        maps = of_kind[decoder.first_of_kind[layer]]
        left = [(group, tuple(m for m in group.maps if names[m.weight] not in solved)) for group in maps.groups]
        groups = [replace(group, module=own[0].module, maps=own) for group, own in left if own]
        solved |= {names[m.weight] for group in groups for m in group.maps}
        known = {INPUT, *(group.child for group in groups)}
        writers = {module: writer for module, writer in maps.writers.items() if writer.before.keys() <= known}
        found.append(replace(maps, groups=tuple(groups), writers=writers))
    for layer, names in enumerate(tensors):
        elsewhere = {m.name for m in linear_maps(decoder.layers[layer]) if names[m.weight] in solved}
        kept = {name: why for name, why in found[layer].kept.items() if name not in elsewhere}
        found[layer] = replace(found[layer], kept=kept)
    return tuple(found)


def solved_in(decoder: Decoder) -> dict[str, int]:
    """By the model's names of the tensors that are solved, the layer in which they are; the output head is in none."""
    found: dict[str, int] = {}
    for layer, maps in enumerate(groups_by_layer(decoder)):
        names = decoder.layer_tensors(layer)
        found |= {names[key]: layer for group in maps.groups for m in group.maps for key in (m.weight, m.bias) if key}
    return found


def find_groups(decoder: Decoder, layer: int) -> LayerMaps:
    """Trace a layer once to see which maps receive the same tensor, and in which order."""
    own = decoder.layers[layer]
    by_module: dict[str, list[LinearMap]] = {}
    for linear_map in linear_maps(own):
        by_module.setdefault(linear_map.module, []).append(linear_map)
    made_up = made_up_layer(decoder, layer)
    with torch.no_grad():
        run = decoder.run(layer, *made_up, capture=by_module, keep=by_module)
    groups: list[MapGroup] = []
    never_called = "not used by calling the module"
    kept = {m.name: SOME_TOKENS if _is_numbered(m.module) else never_called for m in linear_maps(own)}
    previous: object = None
    for module in run.inputs:
        maps, child = tuple(by_module[module]), module.partition(".")[0]
        fused = is_fused(own.get_submodule(module))
        if why := _unsolvable(maps, child, own, run):
            kept |= {m.name: why for m in maps}
            continue
        for linear_map in maps:
            del kept[linear_map.name]
        given = run.inputs[module]
        if child in run.opened:  # whose parts the layer calls one by one, between other children
            child = module
        same = None if fused else (child, given[0].data_ptr(), given[0].shape[-1], given[0].numel())  # also for views
        if groups and same and same == previous:
            groups[-1] = replace(groups[-1], maps=groups[-1].maps + maps)
        else:
            groups.append(MapGroup(child, module, maps, fused))
        previous = same
    known = {linear_map.weight for maps in by_module.values() for linear_map in maps}
    kept |= {name: NO_ROUTES for name in _stacks(own) if name not in known}
    modules = [module for group in groups if not group.fused for module in group.modules]
    writers = find_writers(decoder, layer, made_up, run, modules, {group.child for group in groups})
    return LayerMaps(tuple(groups), kept, writers)


def kept_in_words(kept: Mapping[str, str]) -> str:
    """The maps that are not solved, those of one reason together, and the reason."""
    names: dict[str, list[str]] = {}
    for name, why in kept.items():
        names.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(own)} ({why})" for why, own in names.items())


def _unsolvable(maps: Sequence[LinearMap], child: str, layer: torch.nn.Module, run: LayerRun) -> str:
    """Why the maps of a module, which the layer calls, cannot be solved; empty if they can."""
    module = maps[0].module
    given = run.inputs[module]
    if _is_router(maps[0], child, layer):
        return "choosing a mixture's experts"
    if run.repeated & {child, module}:
        return "called more than once"
    tokens = run.output.shape[:2]
    if is_fused(layer.get_submodule(module)):
        return "" if _tells_routes(given, len({m.expert for m in maps}), tokens.numel()) else NO_ROUTES
    returned, (rows, columns) = run.outputs[module], maps[0].matrix(layer.state_dict()).shape
    if not isinstance(given[0], torch.Tensor) or not isinstance(returned, torch.Tensor):
        return "in a module that does more than multiply"
    if (given[0].shape[-1], returned.shape[-1]) != (columns, rows):  # a matrix of several blocks, each of its own input
        return "in a module that does more than multiply"
    # Features are [B, S, ...], or [B, 1, S, D] for one head of an attention.
    all_tokens = given[0].ndim > 2 and given[0].squeeze(1).shape[:2] == tokens
    return SOME_TOKENS if _is_numbered(module) and not all_tokens else ""


def _is_numbered(module: str) -> bool:
    """Whether a module may be one of a mixture's experts, which are given the features of some tokens."""
    return any(part.isdigit() for part in module.split("."))


def _tells_routes(given: tuple[Any, ...], experts: int, tokens: int) -> bool:
    """Whether a fused mixture's module is called in one of the two ways that ``routed_inputs`` knows."""
    if len(given) == 1:
        return bool(given[0].shape[:-1].numel() == experts * tokens)
    return isinstance(given[1], torch.Tensor) and not given[1].is_floating_point()


def _is_router(linear_map: LinearMap, child: str, layer: torch.nn.Module) -> bool:
    """Whether a map decides to which experts of a mixture a token goes: it has one row for each expert beside it."""
    if linear_map.expert is not None:
        return False
    rows = layer.state_dict()[linear_map.weight].shape[1 if linear_map.transposed else 0]
    return rows in {len(stack) for name, stack in _stacks(layer).items() if name.partition(".")[0] == child}


def _stacks(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that hold the matrices of several experts; convolutions do not count."""
    return {
        f"{path}.{name}": parameter
        for path, module in layer.named_modules()
        if not isinstance(module, _ConvNd)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }
