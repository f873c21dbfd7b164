"""Which submodules a decoder's layers have at each level, and where a coarser level takes the place of another."""

from __future__ import annotations

from collections.abc import Sequence

from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import Heads, linear_maps
from mergekit_slta.layers.trace import find_heads, find_structure, of_each_layer
from mergekit_slta.levels import Fallback, head_part, parts_at, submodule_name


def submodules(decoder: Decoder, level: str, layer: int) -> list[str]:
    """The canonical names of a level's submodules in one layer, in the order of the forward pass; none at ``model``."""
    return [submodule_name(layer, part) for part in layer_parts(decoder, level, layer)]


def layer_parts(decoder: Decoder, level: str, layer: int) -> Sequence[str]:
    """The parts of a layer that are its submodules at a level, as they end the names; "" is the whole layer.

    Where the layer's parts at a level cannot be told apart, they are those of the next coarser level, as ``fallbacks``
    says.
    """
    split = of_each_layer(decoder, find_structure)[layer]
    if level == "model":
        return []
    heads = of_each_layer(decoder, find_heads)[layer] if level == "head_mlp" else ""
    of_heads = map(head_part, range(heads.count)) if isinstance(heads, Heads) else ()
    maps = () if split.of_some_tokens else (linear_map.name for linear_map in linear_maps(decoder.layers[layer]))
    return parts_at(level, [*split.branches, *of_heads, *maps])


def fallbacks(decoder: Decoder, level: str) -> list[Fallback]:
    """Which layers are measured at a coarser level than asked for, and why."""
    coarser_layers: dict[tuple[str, str, str], list[int]] = {}
    for layer in range(len(decoder)):
        if why := _fallback(decoder, level, layer):
            coarser_layers.setdefault((*why, type(decoder.layers[layer]).__name__), []).append(layer)
    return [Fallback(level, coarser, tuple(at), kind, reason) for (coarser, reason, kind), at in coarser_layers.items()]


def _fallback(decoder: Decoder, level: str, layer: int) -> tuple[str, str] | None:
    """The coarser level at which a layer is measured, and why; None where it is measured as asked for."""
    split = of_each_layer(decoder, find_structure)[layer]
    if level == "linear":
        if split.of_some_tokens:
            return "layer", f"{split.of_some_tokens} is given the features of some tokens only"
        return None if linear_maps(decoder.layers[layer]) else ("layer", "it has no linear maps")
    if level in ("attn_mlp", "head_mlp") and not split.branches:
        return "layer", "its attention and MLP branches cannot be told apart"
    if level == "head_mlp" and split.mixers and isinstance(heads := of_each_layer(decoder, find_heads)[layer], str):
        return "attn_mlp", heads
    return None
