"""How far results may be from exact ones: a comparison's tolerance is one of these rules, times what magnifies it.

A float32 number is off by at most 2^-24 of itself. The roundings of a sum of n terms add up like a random walk, to some
sqrt(n) of that, and those of sums one after the other likewise. Another processor or number of threads takes the terms
in another order, which draws another walk: hence the margin. No tolerance is what one machine happened to give;
``MERGEKIT_SLTA_TIGHT=4 pytest`` shows what comes within a quarter of one.
"""

import os

import torch

MARGIN = 8 / float(os.environ.get("MERGEKIT_SLTA_TIGHT", "1"))
WIDEST = 64  # terms of the longest sums in the tests' models
FEATURES = 160  # numbers that an entry of a Gram matrix sums over, at least: five tokens in 32 dimensions
LAYERS = 3
CONDITION = 8  # of slta's equations in the tests, at most; they are means over four samples at least


def rounding(sums: int = 4, terms: int = WIDEST, dtype: torch.dtype = torch.float32) -> float:
    """The relative error of what so many sums, one after the other, of so many terms each give.

    A solution of equations has that of its system times the system's condition.
    """
    return MARGIN * torch.finfo(dtype).eps / 2 * (sums * terms) ** 0.5


# Of numbers that float64 computes, and of slta's weights from Gram matrices that are known exactly.
IN_FLOAT64 = rounding(dtype=torch.float64)
SOLVED_IN_FLOAT64 = CONDITION * IN_FLOAT64


def state_rounding(largest: float = 4.0, layers: int = LAYERS) -> float:
    """The error of hidden states and logits up to the largest, after some eight sums in each layer."""
    return largest * rounding(8 * layers)


def gram_rounding(scale: float = 0.1, sums: int = 4) -> float:
    """The relative error of a Gram matrix of feature deltas, whose size is ``scale`` of the features that are rounded.

    It is quadratic in the deltas, whose errors average out over its sum.
    """
    return 2 * rounding(sums) / scale / FEATURES**0.5


def weight_rounding(scale: float = 0.1, sums: int = 4) -> float:
    """The error of merging weights of about one that are solved for from such Gram matrices."""
    return CONDITION * gram_rounding(scale, sums) / 4**0.5


def distance_rounding(nearest: float, scale: float = 0.1) -> float:
    """That of the distance of two feature deltas, in shares of their size and at least ``nearest``, by a Gram matrix.

    The matrix gives the square as a difference of rounded numbers near 1; its root divides that by the distance.
    """
    return gram_rounding(scale) + rounding(1, FEATURES) / nearest


def regression_rounding(ridge: float = 0.003) -> float:
    """That of a float32 regression's matrix: magnified by the root of its condition, which the ridge limits."""
    return rounding() / ridge**0.5
