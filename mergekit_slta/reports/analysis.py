"""Analyse a merge from its statistics: where it keeps each expert's feature change, where it does not, and why.

The analysis needs only Gram matrices, neither models nor data. Like the merging weights it assumes that features change
linearly with the weights, which is exactly true only at level ``linear``.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mergekit_slta.levels import place_of
from mergekit_slta.reports.words import plain_number
from mergekit_slta.slta.solution import MOST_CONDITION, Solution
from mergekit_slta.slta.solver import bootstrap, pooled, task_means
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
    """A merge at one level; what takes many draws of the samples is computed when it is asked for.

    Attributes:
        solution: the merge's weights.
    """

    solution: Solution

    @property
    def level(self) -> str:
        """The level."""
        return self.solution.level

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
        return int(self._task.bincount().min())

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

    @property
    def kinds(self) -> dict[str, dict[int, list[int]]]:
        """The rows of each kind of submodule, by layer."""
        return kinds_of(self.submodules)

    @property
    def kept(self) -> torch.Tensor:
        """The share of each expert's feature change that the merge keeps in all submodules together, [T]."""
        return self.solution.kept

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
        settings = self.solution.settings
        draws = (bootstrap(grams, self._task, DRAWS, seed=SEED, **settings) for grams in self._grams())
        ends = ([own.quantile(q, dim=0) for q in INTERVAL] for own in draws)
        low, high = (torch.stack(found) for found in zip(*ends, strict=True))
        return low, high

    @cached_property
    def doubts(self) -> dict[str, list[str]]:
        """By submodule, why its merging weights are unreliable."""
        low, high = self.intervals
        rows = zip(self.submodules, high - low, map(self._means, self._grams()), strict=True)
        return {name: found for name, width, means in rows if (found := _doubts(self.solution, name, width, means))}

    @property
    def _task(self) -> torch.Tensor:
        return self.solution.statistics.task

    def _grams(self) -> Iterator[torch.Tensor]:
        return (self.solution.statistics.grams[name] for name in self.submodules)

    def _means(self, grams: torch.Tensor) -> torch.Tensor:
        return task_means(grams, self._task, self.solution.balance)


def _doubts(solution: Solution, name: str, width: torch.Tensor, means: torch.Tensor) -> list[str]:
    """Why the merging weights of a submodule, with intervals of ``width`` [T], are unreliable."""
    if not bool(means.any()):
        return ["no expert changes its features on any sample"]
    found = []
    changing = means.sum(0).diagonal() > 0
    if solution.rank[name] < int(changing.sum()):
        found.append("experts are linearly dependent")
    if solution.condition[name] > MOST_CONDITION:
        found.append(f"condition number {plain_number(solution.condition[name])}")
    if float(width.max()) > WIDEST_INTERVAL:
        found.append(f"interval {plain_number(float(width.max()))} wide")
    alpha = solution.alpha[name].tolist()
    outside = [value for value in alpha if not PLAUSIBLE_ALPHA[0] <= value <= PLAUSIBLE_ALPHA[1]]
    if outside:
        found.append(f"weight {', '.join(map(plain_number, outside))}")
    return found
