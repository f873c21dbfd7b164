"""Analyse a merge from its statistics: where it keeps each expert's feature change, where it does not, and why.

The analysis needs only Gram matrices, neither models nor data. Like the merging weights it assumes that features change
linearly with the weights, which is exactly true only at level ``linear``.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.levels import place_of
from mergekit_slta.reports.words import plain_number
from mergekit_slta.slta.solution import MOST_CONDITION, Solution
from mergekit_slta.slta.solver import (
    bootstrap,
    bootstrap_counts,
    drawn_weights,
    pooled,
    retained_share,
    task_means,
)
from mergekit_slta.tables import short_names

DRAWS = 200
INTERVAL = (0.05, 0.95)
SAMPLE_COUNTS = (1, 3, 10, 30)
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


@dataclass(frozen=True)
class SampleEffect:
    """Merging weights from fewer samples, and what they keep; each [T].

    Attributes:
        alpha: the mean of the weights over submodules and draws.
        spread: their standard deviation over draws, on average over submodules.
        retained: the share of each expert's feature change that the weights keep, measured on all samples.
    """

    alpha: torch.Tensor
    spread: torch.Tensor
    retained: torch.Tensor


@dataclass(frozen=True)
class LevelAnalysis:
    """A merge at one level.

    Attributes:
        level: the level.
        experts: the experts' names without the words that they share.
        submodules: their canonical names.
        samples: the number of samples of the task with the fewest.
        alpha: [S, T] merging weights.
        low, high: [S, T], the ends of the weights' 90 % bootstrap intervals; NaN if a task has one sample.
        retained: [S, T], the share of each expert's feature change that the merge keeps; NaN where it changes nothing.
        share: [S, T], the task's own expert's part in the feature change on the task's data: 1 if all experts change
            the features equally, T if no other expert changes them.
        condition: [S], of the scaled A; NaN where A is zero.
        cosine: [S, T, T], cosine similarity of the experts' feature changes over all tasks' data; NaN without change.
        without: [T, T], the share of expert a's feature change that the merge keeps if expert b is left out of it.
        by_samples: the merging weights from fewer samples, by the number of samples per task.
        doubts: by submodule, why its merging weights are unreliable.
    """

    level: str
    experts: tuple[str, ...]
    submodules: tuple[str, ...]
    samples: int
    alpha: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    retained: torch.Tensor
    share: torch.Tensor
    condition: torch.Tensor
    cosine: torch.Tensor
    without: torch.Tensor
    by_samples: dict[int, SampleEffect]
    doubts: dict[str, list[str]]

    @property
    def kinds(self) -> dict[str, dict[int, list[int]]]:
        """The rows of each kind of submodule, by layer."""
        return kinds_of(self.submodules)

    @property
    def kept(self) -> torch.Tensor:
        """The share of each expert's feature change that the merge keeps in all submodules together, [T]."""
        return pooled(self.retained, self.share)

    def kept_by_layer(self) -> dict[int, torch.Tensor]:
        """The share of each expert's feature change that the merge keeps in each layer, [T]."""
        layers: dict[int, list[int]] = {}
        for index, name in enumerate(self.submodules):
            layer = place_of(name).layer
            if layer is not None:
                layers.setdefault(layer, []).append(index)
        return {layer: pooled(self.retained[rows], self.share[rows]) for layer, rows in layers.items()}


# Analysis


def analyse(solution: Solution) -> LevelAnalysis:
    statistics, names = solution.statistics, list(solution.alpha)
    draws = [
        bootstrap(statistics.grams[name], statistics.task, DRAWS, seed=SEED, **solution.settings) for name in names
    ]
    low, high = (torch.stack([alpha.quantile(q, dim=0) for alpha in draws]) for q in INTERVAL)
    means = [task_means(statistics.grams[name], statistics.task, solution.balance) for name in names]
    doubts = {
        name: found
        for index, name in enumerate(names)
        if (found := _doubts(solution, name, high[index] - low[index], means[index]))
    }
    return LevelAnalysis(
        level=solution.level,
        experts=short_names(solution.models),
        submodules=tuple(names),
        samples=int(statistics.task.bincount().min()),
        alpha=torch.stack(list(solution.alpha.values())),
        low=low,
        high=high,
        retained=torch.stack(list(solution.retained.values())),
        share=torch.stack([own.share for own in solution.submodules.values()]),
        condition=torch.tensor(list(solution.condition.values()), dtype=torch.float64),
        cosine=torch.stack([_cosine(mean.sum(0)) for mean in means]),
        without=_kept_without(solution),
        by_samples=_by_samples(solution, dict(zip(names, means, strict=True))),
        doubts=doubts,
    )


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


def _cosine(matrix: torch.Tensor) -> torch.Tensor:
    norm = matrix.diagonal().sqrt()
    product = norm[:, None] * norm
    return torch.where(product > 0, matrix / product, torch.nan)


def _kept_without(solution: Solution) -> torch.Tensor:
    """[T, T], what a merge without expert b keeps of expert a; NaN on the diagonal and if no other task has weight."""
    experts = range(len(solution.models))
    task_weights = solution.task_weights or [1.0 for _ in experts]
    kept = torch.full((len(experts), len(experts)), torch.nan, dtype=torch.float64)
    for left_out in experts:
        others = [expert for expert in experts if expert != left_out]
        if not any(task_weights[expert] for expert in others):
            continue
        settings = solution.settings | {"task_weights": [task_weights[expert] for expert in others]}
        part = solution.statistics.take(others).solve(solution.level, **settings)
        kept[others, left_out] = part.kept
    return kept


def _by_samples(solution: Solution, means_by_name: Mapping[str, torch.Tensor]) -> dict[int, SampleEffect]:
    """The merging weights from fewer samples per task, drawn with replacement."""
    statistics = solution.statistics
    available = statistics.task.bincount()
    most = int(available.max())
    effects = {}
    for count in sorted({*(count for count in SAMPLE_COUNTS if count < most), most}):
        counts = bootstrap_counts(statistics.task, DRAWS // 2, SEED, most=count)
        alphas, kept, shares = [], [], []
        for name, means in means_by_name.items():
            alpha = drawn_weights(statistics.grams[name], statistics.task, counts, **solution.settings)
            alphas.append(alpha)
            kept.append(retained_share(means, alpha))
            shares.append(solution.submodules[name].share.expand_as(alpha))
        drawn = torch.stack(alphas)  # [S, draws, T]
        effects[count] = SampleEffect(
            drawn.mean((0, 1)), drawn.std(1).mean(0), pooled(torch.stack(kept), torch.stack(shares)).mean(0)
        )
    return effects
