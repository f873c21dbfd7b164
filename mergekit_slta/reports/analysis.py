"""Numbers behind the report on a merge, from Gram matrices alone, with neither models nor data.

Like the merging weights they assume that features change linearly with the weights, which is exactly true only at level
``linear``.

Shapes: ``S`` submodules of a level, ``T`` experts.
"""

from __future__ import annotations

import torch

from mergekit_slta.levels import place_of
from mergekit_slta.slta.solution import Solution
from mergekit_slta.slta.solver import SubmoduleSolution, bootstrap, pooled

DRAWS = 200
INTERVAL = (0.05, 0.95)
SEED = 0


def kept_by_layer(solution: Solution) -> dict[int, torch.Tensor]:
    """The share of each expert's feature change that the merge keeps in each layer, [T]."""
    layers: dict[int, list[SubmoduleSolution]] = {}
    for name, solved in solution.submodules.items():
        layer = place_of(name).layer
        if layer is not None:
            layers.setdefault(layer, []).append(solved)
    return {
        layer: pooled(torch.stack([own.retained for own in found]), torch.stack([own.share for own in found]))
        for layer, found in layers.items()
    }


def intervals(solution: Solution) -> torch.Tensor:
    """The ends of the merging weights' 90 % bootstrap intervals, [2, S, T]; NaN if a task has one sample."""
    statistics, ends = solution.statistics, torch.tensor(INTERVAL, dtype=torch.float64)
    draws = (
        bootstrap(statistics.grams[name], statistics.task, DRAWS, seed=SEED, **solution.settings)
        for name in solution.alpha
    )
    return torch.stack([drawn.quantile(ends, dim=0) for drawn in draws], 1)
