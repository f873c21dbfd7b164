"""Find which linear maps of a decoder layer are solved together, in which order, and which add to the residual stream.

The last can correct what the maps before them have missed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from mergekit_slta.layers.calls import made_up_layer, random_numbers
from mergekit_slta.layers.decoder import INPUT, Decoder, LayerCall, LayerRun, all_before, hidden_of, ratio
from mergekit_slta.layers.maps import LinearMap, is_fused, is_numbered, linear_maps, takes_some_tokens
from mergekit_slta.models.checkpoint import Weights

# Why maps are not solved.
SOME_TOKENS = "in a module that receives only some of the tokens"
SHARED = "shared by several layers"
NO_ROUTES = "that compute all routed experts together: which tokens each expert gets is not known"


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
class Writer:
    """A module whose output a layer adds to the residual stream.

    Attributes:
        factor: the constant that its output is multiplied by.
        before: what the stream is the sum of before: the layer's input and the outputs of children, each with the
            constant that it is multiplied by.
    """

    factor: float
    before: Mapping[str, float]


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
    """The groups of every layer; layers of the same kind are traced once."""
    of_kind = {layer: find_groups(decoder, layer) for layer in decoder.one_of_each_kind()}
    return tuple(of_kind[first] for first in decoder.first_of_kind)


def find_groups(decoder: Decoder, layer: int) -> LayerMaps:
    """Trace a layer once to see which maps receive the same tensor, and in which order."""
    own, names = decoder.layers[layer], decoder.layer_tensors(layer)
    by_module: dict[str, list[LinearMap]] = {}
    for linear_map in linear_maps(own):
        by_module.setdefault(linear_map.module, []).append(linear_map)
    made_up = made_up_layer(decoder, layer)
    with torch.no_grad():
        run = decoder.run(layer, *made_up, capture=by_module, keep=by_module)
    groups: list[MapGroup] = []
    never_called = "not used by calling the module"
    kept = {m.name: SOME_TOKENS if is_numbered(m.module) else never_called for m in linear_maps(own)}
    kept |= {m.name: SHARED for m in linear_maps(own) if names[m.weight] in decoder.shared_tensors}
    previous: object = None
    for module in run.inputs:
        maps, child = tuple(by_module[module]), module.partition(".")[0]
        fused = is_fused(own.get_submodule(module))
        shared = decoder.shared_tensors.intersection(names[m.weight] for m in maps)
        if why := SHARED if shared else _unsolvable(maps, child, own, run):
            kept |= {m.name: why for m in maps}
            continue
        for linear_map in maps:
            del kept[linear_map.name]
        given = run.inputs[module]
        same = None if fused else (child, given[0].data_ptr(), given[0].shape[-1], given[0].numel())  # also for views
        if child in run.opened:  # whose parts the layer calls one by one, between other children
            child = module
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
        return "that choose a mixture's routed experts"
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
    return SOME_TOKENS if takes_some_tokens(module, given[0], tokens) else ""


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


@torch.no_grad()
def find_writers(
    decoder: Decoder,
    layer: int,
    made_up: tuple[Weights, torch.Tensor, LayerCall],
    run: LayerRun,
    modules: Sequence[str],
    children: Collection[str],
) -> dict[str, Writer]:
    """The writers among a layer's modules; of those that write side by side, only the last.

    A norm, a learned gate or a router's weight behind a module multiplies its output by another number for each token,
    or with other weights: such a module is no writer.

    Args:
        decoder: the layer's decoder.
        layer: the layer's index.
        made_up: what ``made_up_layer`` gives for it.
        run: the layer's run on that, which has kept the modules' outputs.
        modules: paths of modules that are solved, in their order.
        children: the layer's children whose outputs are known when a later module is solved.
    """
    _, hidden, call = made_up
    structure = decoder.structures[layer]
    if hidden.ndim != 3 or structure.summands is None:
        return {}
    others = random_numbers(decoder.layers[layer].state_dict(), decoder.device, seed=1)
    runs = (run, decoder.run(layer, others, hidden, call, keep=modules))
    before_child = all_before(structure.reads)
    sources = [INPUT, *(child for child in structure.reads if child in structure.summands)]  # in the order of the calls

    def factor(child: str, module: str) -> float:
        """What the output of a module in a child is multiplied by to be the child's; nan for no constant."""
        outputs = [hidden_of(own.outputs[child]) for own in runs]
        first, second = (ratio(output, own.outputs.get(module)) for output, own in zip(outputs, runs, strict=True))
        return first if outputs[0].shape == hidden.shape and math.isclose(first, second, rel_tol=1e-4) else math.nan

    found = {}
    for place, child in enumerate(sources[1:], 1):
        complete = {*sources[:place]} <= {INPUT, *children} and {*sources} == structure.summands.keys()
        complete = complete and all(child in before_child[later] for later in sources[place + 1 :])
        for module in [own for own in modules if own.partition(".")[0] == child][-1:]:
            written = structure.summands[child] * factor(child, module)
            if complete and math.isfinite(written):
                found[module] = Writer(written, {source: structure.summands[source] for source in sources[:place]})
    return found
