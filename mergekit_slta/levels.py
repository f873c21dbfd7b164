"""The levels and the names of their submodules, which are made and parsed only here.

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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

from mergekit_slta.errors import SltaError

Level = Literal["model", "layer", "attn_mlp", "head_mlp", "linear"]
LEVELS: tuple[Level, ...] = get_args(Level)

BRANCHES = ("attn", "mlp")


def require_levels(levels: Iterable[str]) -> None:
    """Refuse what is no level."""
    for level in levels:
        if level not in LEVELS:
            raise SltaError(f"'{level}' is not one of {', '.join(LEVELS)}.")


@dataclass(frozen=True)
class Fallback:
    """Layers that are measured at a coarser level than asked for; as text, a sentence.

    Attributes:
        level: the level that was asked for.
        coarser: the level whose submodules these layers have instead.
        layers: their indices.
        kind: the name of their class.
        reason: why, as a clause.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # in a statistics file

    level: str
    coarser: str
    layers: tuple[int, ...]
    kind: str
    reason: str

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
    """An attention head as a part of its layer."""
    return f"head.{head}"


def fused_map_part(module: str, expert: int, tensor: str) -> str:
    """The map of one expert of a mixture as a part of its layer, if one tensor holds the maps of all experts."""
    return f"{module}.{expert}.{tensor}"


class Place(NamedTuple):
    """The place of a submodule: its layer, and its kind without the number of a head or of a mixture's expert."""

    layer: int | None
    kind: str


def place_of(name: str) -> Place:
    match = re.fullmatch(r"layer\.(\d+)(?:\.(.+))?", name)
    if match is None:
        return Place(None, name)
    return Place(int(match[1]), re.sub(r"\.\d+(?![^.])", "", match[2] or "layer", count=1))


def kinds_of(names: Iterable[str]) -> dict[str, dict[int, list[int]]]:
    """The positions in ``names`` of the submodules of each kind, by layer."""
    kinds: dict[str, dict[int, list[int]]] = {}
    for index, name in enumerate(names):
        place = place_of(name)
        kinds.setdefault(place.kind, {}).setdefault(place.layer or 0, []).append(index)
    return kinds


def of_level(names: Iterable[str], level: str) -> list[str]:
    """The names of a level's submodules among those of several levels, sorted."""
    if level == "model":
        return ["model"] if "model" in names else []
    layers: dict[str, set[str]] = {}
    for name in names:
        _, _, inside = name.partition("layer.")
        layer, _, part = inside.partition(".")
        if layer:
            layers.setdefault(layer, set()).add(part)
    found = [submodule_name(int(layer), part) for layer, parts in layers.items() for part in _parts(parts, level)]
    return sorted(found, key=sort_key)


def _parts(parts: set[str], level: str) -> set[str]:
    """The parts of a layer at a level, the finest that are there; the layer itself is the empty part."""
    whole = parts & {""}
    branches = parts & set(BRANCHES)
    heads = {part for part in parts if re.fullmatch(r"head\.\d+", part)}
    if level == "attn_mlp":
        return branches or whole
    if level == "head_mlp":
        return heads | branches - {"attn"} if heads else branches or whole
    if level == "linear":
        return parts - whole - branches - heads or whole
    return whole


def sort_key(name: str) -> tuple[object, ...]:
    """Sorts names by the numbers of layers, heads and experts, and by all else in alphabetical order."""
    return tuple((0, int(part), "") if re.fullmatch("[0-9]{1,9}", part) else (1, 0, part) for part in name.split("."))
