"""The levels and the names of their submodules, around the paths of linear maps.

A submodule is a part of the model that takes merging weights of its own; a level says which parts these are
(sections 2.2, A.3.5 and A.5.5 of arXiv 2504.10902):

    model      model                               the whole model
    layer      layer.3                             each decoder layer
    attn_mlp   layer.3.attn, layer.3.mlp           the two branches of each layer
    head_mlp   layer.3.head.2, layer.3.mlp         each attention head, and the MLP branch
    linear     layer.3.self_attn.q_proj            each linear map, by its path in the layer
               layer.3.mlp.experts.4.gate_up_proj  one expert's map where a mixture holds them in one tensor

A layer whose parts at a level cannot be told apart has those of the next coarser level there: at ``attn_mlp`` and
``linear`` the whole layer, at ``head_mlp`` the branches or the whole layer. A layer that only mixes tokens, or never,
has one branch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

Level = Literal["model", "layer", "attn_mlp", "head_mlp", "linear"]
LEVELS: tuple[Level, ...] = get_args(Level)

BRANCHES = ("attn", "mlp")


@dataclass(frozen=True)
class Fallback:
    """Layers that are measured at a coarser level than asked for; as text, a sentence."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # in a statistics file

    level: str  # that was asked for
    coarser: str  # the level whose submodules these layers have instead
    layers: tuple[int, ...]
    kind: str  # the name of their class
    reason: str  # as a clause

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        where = f"layers {', '.join(map(str, self.layers))}"
        if first == last:
            where = f"layer {first}"
        elif self.layers == tuple(range(first, last + 1)):
            where = f"layers {first} to {last}"
        return f"Level {self.level} falls back to level {self.coarser} in {where} ({self.kind}): {self.reason}."


def submodule_name(layer: int, part: str = "") -> str:
    """The name of a part of a layer, such as a branch or the path of a linear map, or of the whole layer."""
    return f"layer.{layer}.{part}" if part else f"layer.{layer}"


def head_part(head: int) -> str:
    return f"head.{head}"


class Place(NamedTuple):
    """The place of a submodule: its layer, and its kind without the number of a head or of a mixture's expert."""

    layer: int | None
    kind: str


def place_of(name: str) -> Place:
    layer, part = _parsed(name)
    return Place(None, name) if layer is None else Place(layer, re.sub(r"\.\d+(?![^.])", "", part or "layer", count=1))


def _parsed(name: str) -> tuple[int | None, str]:
    """The layer of a submodule, and which part of the layer it is; "" is the whole layer."""
    match = re.fullmatch(r"layer\.(\d+)(?:\.(.+))?", name)
    return (None, name) if match is None else (int(match[1]), match[2] or "")


def kinds_of(names: Iterable[str]) -> dict[str, dict[int, list[int]]]:
    """The positions in ``names`` of the submodules of each kind, by layer."""
    kinds: dict[str, dict[int, list[int]]] = {}
    for index, name in enumerate(names):
        place = place_of(name)
        kinds.setdefault(place.kind, {}).setdefault(place.layer or 0, []).append(index)
    return kinds


def parts_at(level: str, parts: Collection[str]) -> list[str]:
    """Of a layer's parts, its submodules at a level, or where there are none those of the next coarser level.

    The parts are branches, heads and linear maps, in the order of the forward pass. "" is the whole layer.
    """
    branches = [branch for branch in BRANCHES if branch in parts]
    heads = [part for part in parts if re.fullmatch(r"head\.\d+", part)]
    finest: list[str] = []
    if level == "linear":
        finest = [part for part in parts if part and part not in (*branches, *heads)]
    elif level == "head_mlp" and heads:
        finest = [*heads, *(branch for branch in branches if branch != "attn")]
    elif level in ("attn_mlp", "head_mlp"):
        finest = branches
    return finest or [""]


def of_level(names: Collection[str], level: str) -> list[str]:
    """The names of a level's submodules among those of several levels, sorted."""
    if level == "model":
        return ["model"] if "model" in names else []
    layers: dict[int, list[str]] = {}
    for name in names:
        layer, part = _parsed(name)
        if layer is not None:
            layers.setdefault(layer, []).append(part)
    at_level = [submodule_name(layer, part) for layer, parts in layers.items() for part in parts_at(level, parts)]
    return sorted((name for name in at_level if name in names), key=sort_key)


def sort_key(name: str) -> tuple[object, ...]:
    """Sorts names by the numbers of layers, heads and experts, and by all else in alphabetical order."""
    return tuple((0, int(part), "") if re.fullmatch("[0-9]{1,9}", part) else (1, 0, part) for part in name.split("."))
