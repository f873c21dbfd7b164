"""Analyse a merge from its statistics: where it keeps each expert's feature change, and how sure its weights are.

The analysis needs only Gram matrices, neither models nor data. Like the merging weights it assumes that features change
linearly with the weights, which is exactly true only at level ``linear``.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mergekit_slta.levels import place_of
from mergekit_slta.reports.words import plain_number
from mergekit_slta.slta.solution import MOST_CONDITION, Solution
from mergekit_slta.slta.solver import bootstrap, pooled
from mergekit_slta.tables import short_names

DRAWS = 200
INTERVAL = (0.05, 0.95)
SEED = 0
# Beyond these limits, and beyond MOST_CONDITION, a merging weight is called unreliable.
WIDEST_INTERVAL = 0.2
PLAUSIBLE_ALPHA = (-0.25, 1.25)
# With fewer samples per task than this the bootstrap gives intervals that are too narrow.
FEW_SAMPLES = 5


def kinds_of(names: Sequence[str]) -> dict[str, dict[int, list[int]]]:
    """The positions in ``names`` of the submodules of each kind, by layer."""
    kinds: dict[str, dict[int, list[int]]] = {}
    for index, name in enumerate(names):
        place = place_of(name)
        kinds.setdefault(place.kind, {}).setdefault(place.layer or 0, []).append(index)
    return kinds


@dataclass(frozen=True, eq=False)
class LevelAnalysis:
    """A merge at one level, from its solution; intervals and doubts are computed when they are asked for."""

    solution: Solution

    @cached_property
    def experts(self) -> tuple[str, ...]:
        """The experts' names without the words that they share."""
        return short_names(self.solution.models)

    @cached_property
    def submodules(self) -> tuple[str, ...]:
        """The submodules' canonical names."""
        return tuple(self.solution.alpha)

    @property
    def samples(self) -> int:
        """The number of samples of the task with the fewest."""
        return int(self.solution.statistics.task.bincount().min())

    @cached_property
    def alpha(self) -> torch.Tensor:
        """The merging weights, [S, T]."""
        return torch.stack(list(self.solution.alpha.values()))

    @cached_property
    def retained(self) -> torch.Tensor:
        """The share of each expert's feature change that the merge keeps, [S, T]; NaN where it changes nothing."""
        return torch.stack(list(self.solution.retained.values()))

    @cached_property
    def share(self) -> torch.Tensor:
        """The task's own expert's part in the feature change on the task's data, [S, T].

        It is 1 if all experts change the features equally, T if no other expert changes them.
        """
        return torch.stack([own.share for own in self.solution.submodules.values()])

    def kept_by_layer(self) -> dict[int, torch.Tensor]:
        """The share of each expert's feature change that the merge keeps in each layer, [T]."""
        layers: dict[int, list[int]] = {}
        for index, name in enumerate(self.submodules):
            layer = place_of(name).layer
            if layer is not None:
                layers.setdefault(layer, []).append(index)
        return {layer: pooled(self.retained[rows], self.share[rows]) for layer, rows in layers.items()}

    @cached_property
    def intervals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ends of the weights' 90 % bootstrap intervals, two [S, T]; NaN if a task has one sample."""
        statistics, settings = self.solution.statistics, self.solution.settings
        ends = torch.tensor(INTERVAL, dtype=torch.float64)
        found = [
            bootstrap(statistics.grams[name], statistics.task, DRAWS, seed=SEED, **settings).quantile(ends, dim=0)
            for name in self.submodules
        ]
        low, high = torch.stack(found, 1)
        return low, high

    @cached_property
    def doubts(self) -> dict[str, list[str]]:
        """By submodule, why its merging weights are unreliable."""
        widths = (self.intervals[1] - self.intervals[0]).amax(1).tolist()
        found = {name: self._doubts(name, width) for name, width in zip(self.submodules, widths, strict=True)}
        return {name: reasons for name, reasons in found.items() if reasons}

    def _doubts(self, name: str, width: float) -> list[str]:
        solved = self.solution.submodules[name]
        if not solved.measured.any():
            return ["no expert changes its features on any sample"]
        found = []
        if solved.rank < int(solved.measured.sum()):
            found.append("experts are linearly dependent")
        if solved.condition > MOST_CONDITION:
            found.append(f"condition number {plain_number(solved.condition)}")
        if width > WIDEST_INTERVAL:
            found.append(f"interval {plain_number(width)} wide")
        outside = [own for own in solved.alpha.tolist() if not PLAUSIBLE_ALPHA[0] <= own <= PLAUSIBLE_ALPHA[1]]
        if outside:
            found.append(f"weight {', '.join(map(plain_number, outside))}")
        return found
