"""Find which linear maps of a decoder layer are solved together, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.modules.conv import _ConvNd

from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import LinearMap, is_fused, linear_maps
from mergekit_slta.layers.probe import trace
from mergekit_slta.layers.recording import LayerRun


@dataclass(frozen=True)
class MapGroup:
    """Linear maps with the same input inside one child of the layer, or the routed experts of a mixture.

    Attributes:
        child: the direct child of the layer that holds the maps.
        module: the path of the first module in the group that the layer calls.
        maps: the maps, in the order in which the layer calls them.
        fused: whether the maps are routed experts in one module, each with its own input.
        empty: if the child returns the only map's output, the number of None values beside it in a tuple; else None.
    """

    child: str
    module: str
    maps: tuple[LinearMap, ...]
    fused: bool = False
    empty: int | None = None

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
        kept: the names of the maps that stay the anchor's: routers, a mixture's experts that are separate modules, maps
            that are called more than once or in a child that is, and tensors that no module call uses.
        changed: the modules whose outputs the layer changes in place.
    """

    groups: tuple[MapGroup, ...]
    kept: tuple[str, ...]
    changed: frozenset[str]


def groups_by_layer(decoder: Decoder) -> list[LayerMaps]:
    """The groups of every layer; layers of the same kind are traced once.

    Maps that several layers share are solved in the first of them.
    """
    found, earlier = [], set[str]()
    for layer in range(len(decoder)):
        maps, names = decoder.once_per_kind(layer, find_groups), decoder.layer_tensors(layer)
        groups = [group for group in maps.groups if names[group.maps[0].weight] not in earlier]
        found.append(replace(maps, groups=tuple(groups)))
        earlier.update(names.values())
    return found


def find_groups(decoder: Decoder, layer: int) -> LayerMaps:
    """Trace a layer once to see which maps receive the same tensor, and in which order."""
    by_module: dict[str, list[LinearMap]] = {}
    for linear_map in linear_maps(decoder.layers[layer]):
        by_module.setdefault(linear_map.module, []).append(linear_map)
    with torch.no_grad():
        run = trace(decoder, layer, watch=by_module)
    groups: list[MapGroup] = []
    solved: set[str] = set()
    previous: object = None
    for module, given in run.inputs.items():
        maps, child = tuple(by_module[module]), module.partition(".")[0]
        fused = is_fused(decoder.layers[layer].get_submodule(module))
        if fused:  # called with the tokens' features and with the experts that each token goes to
            routes = given[1] if len(given) > 1 else None
            solvable = isinstance(routes, torch.Tensor) and not routes.is_floating_point()
        else:  # the numbered modules of a mixture are called with only some of the tokens
            solvable = isinstance(given[0], torch.Tensor) and not any(part.isdigit() for part in module.split("."))
        if not solvable or run.repeated & {child, module} or _is_router(maps[0], decoder.layers[layer]):
            continue
        solved |= {linear_map.name for linear_map in maps}
        same = (child, given[0].data_ptr(), given[0].numel())
        if not fused and groups and same == previous:
            groups[-1] = MapGroup(child, groups[-1].module, groups[-1].maps + maps)
        else:
            groups.append(MapGroup(child, module, maps, fused))
        previous = None if fused else same
    groups = [replace(group, empty=_empty_beside(group, run)) for group in groups]
    kept = [m.name for maps in by_module.values() for m in maps if m.name not in solved]
    known = {linear_map.weight for maps in by_module.values() for linear_map in maps}
    kept += [name for name in _stacks(decoder.layers[layer]) if name not in known]
    return LayerMaps(tuple(groups), tuple(kept), run.changed)


def _empty_beside(group: MapGroup, trace: LayerRun) -> int | None:
    returned = trace.outputs[group.child]
    first, *rest = returned if isinstance(returned, tuple) and len(returned) > 1 else [returned]
    same = first is trace.outputs[group.module] and group.module not in trace.changed
    return len(rest) if len(group.maps) == 1 and same and not any(part is not None for part in rest) else None


def _is_router(linear_map: LinearMap, layer: torch.nn.Module) -> bool:
    """Whether a map decides to which experts of a mixture a token goes: it has one row for each expert beside it."""
    if linear_map.expert is not None:
        return False
    child = linear_map.module.partition(".")[0]
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
