"""How far results in float32 may be from exact ones: every tolerance of one comes from here, or says why it does not.

A float32 number is off by at most 2^-24 of itself. The roundings of a sum of n terms add up like a random walk, to some
sqrt(n) of that, and those of sums one after the other likewise. Another processor or number of threads takes the terms
in another order, which draws another walk: hence the margin. No tolerance is what one machine happened to give.
"""

from __future__ import annotations

UNIT = 2.0**-24
MARGIN = 8
WIDEST = 64  # terms of the longest sums in the tests' models
FEATURES = 160  # numbers that an entry of a Gram matrix sums over, at least: five tokens in 32 dimensions


def rounding(sums: int = 4, terms: int = WIDEST) -> float:
    """The relative error of what so many sums, one after the other, of so many terms each give."""
    return MARGIN * UNIT * (sums * terms) ** 0.5


def gram_rounding(scale: float = 0.1, sums: int = 4) -> float:
    """That of a Gram matrix of feature deltas, whose size is ``scale`` of the features that are rounded.

    It is quadratic in the deltas, whose errors average out over its sum.
    """
    return 2 * rounding(sums) / scale / FEATURES**0.5
