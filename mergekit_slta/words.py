"""Format numbers, counts and lists for all pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def plain_number(number: float, form: str = ".3g") -> str:
    """A number, with three significant digits unless ``form`` says otherwise; a dash for NaN."""
    return "–" if math.isnan(number) else f"{number:{form}}".replace("-", "−")


def as_score(share: float | None, decimals: int = 2) -> str:
    """A share or a score, as in "0.93"; a dash for NaN or None."""
    return plain_number(round(math.nan if share is None else share, decimals) + 0.0, f".{decimals}f")  # no sign of zero


def enumerated(words: Sequence[str]) -> str:
    """Words with commas, and "and" before the last."""
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + "".join(words[-1:])


def listed(names: Iterable[str]) -> str:
    """The first three names joined by commas, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def counted(number: int, noun: str) -> str:
    """A number and what it counts, as in "1 layer" and "2 layers"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def kind_name(kind: str) -> str:
    """The name of a kind of submodule on a page."""
    return {"attn": "attention", "mlp": "MLP"}.get(kind, kind)
