"""Format numbers, counts and lists for all pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby


def plain_number(number: float, form: str = ".3g") -> str:
    """A number, with three significant digits unless ``form`` says otherwise; a dash for NaN."""
    return "–" if math.isnan(number) else f"{number:{form}}".replace("-", "−")


def percent(share: float) -> str:
    """A share as a whole percentage; a share just below 1 is "over 99 %", because something is missing."""
    if math.isnan(share):
        return "–"
    return "over 99 %" if 0.995 <= share < 1 else f"{plain_number(round(100 * share), 'd')} %"


def enumerated(words: Sequence[str]) -> str:
    """Words with commas, and "and" before the last."""
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + "".join(words[-1:])


def counted(number: int, noun: str) -> str:
    """A number and what it counts, as in "1 layer" and "2 layers"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def possessive(name: str) -> str:
    """A name's possessive form, as in "math's" and "words'"."""
    return f"{name}'{'s' * (not name.endswith('s'))}"


def where_most(by_layer: Mapping[int, float]) -> str:
    """The layers with the largest values, a quarter, at most three, as in " in layers 0 and 3-4"; "" without any."""
    most = sorted(by_layer, key=by_layer.__getitem__, reverse=True)[: math.ceil(min(len(by_layer), 12) / 4)]
    pairs = enumerate(sorted(most))
    runs = [[layer for _, layer in run] for _, run in groupby(pairs, lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f" in layer{'s' * (len(most) > 1)} {enumerated(words)}" if words else ""


def kind_name(kind: str) -> str:
    """The name of a kind of submodule on a page."""
    return {"attn": "attention", "mlp": "MLP"}.get(kind, kind)
