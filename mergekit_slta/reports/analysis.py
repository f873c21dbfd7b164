"""Analyse a merge from its statistics: where it keeps each expert's feature change, where it does not, and why.

The analysis needs only Gram matrices, neither models nor data. Like the merging weights it assumes that features change
linearly with the weights, which is exactly true only at level ``linear``.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.levels import place_of
from mergekit_slta.reports.words import extent, plain_number
from mergekit_slta.slta.solution import MOST_CONDITION, Solution
from mergekit_slta.slta.solver import (
    bootstrap,
    bootstrap_counts,
    drawn_weights,
    left_out,
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

# Sentences and charts name this many experts at most; of more they give the extremes, and the tables hold all.
MOST_NAMED = 16


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
    def many(self) -> bool:
        """Whether there are more experts than sentences and charts can name."""
        return len(self.experts) > MOST_NAMED

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
    task, samples = statistics.task, statistics.task.bincount()
    most = int(samples.max())
    counts = {
        count: bootstrap_counts(task, DRAWS // 2, SEED, most=count)
        for count in sorted({*(count for count in SAMPLE_COUNTS if count < most), most})
    }
    intervals, cosines, without, doubts = [], [], [], {}
    by_samples: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {count: [] for count in counts}
    for name in names:
        grams = statistics.grams[name]
        means = task_means(grams, task, solution.balance)
        draws = bootstrap(grams, task, DRAWS, seed=SEED, **solution.settings)
        low, high = (draws.quantile(q, dim=0) for q in INTERVAL)
        intervals.append((low, high))
        cosines.append(_cosine(means.sum(0)))
        without.append(left_out(grams, task, **solution.settings))
        if found := _doubts(solution, name, high - low, means):
            doubts[name] = found
        for count, drawn in counts.items():
            alpha = drawn_weights(grams, task, drawn, **solution.settings)
            by_samples[count].append((alpha, retained_share(means, alpha)))
    share = torch.stack([own.share for own in solution.submodules.values()])
    low, high = (torch.stack(ends) for ends in zip(*intervals, strict=True))
    retained, others_share = (torch.stack(found) for found in zip(*without, strict=True))
    return LevelAnalysis(
        level=solution.level,
        experts=short_names(solution.models),
        submodules=tuple(names),
        samples=int(samples.min()),
        alpha=torch.stack(list(solution.alpha.values())),
        low=low,
        high=high,
        retained=torch.stack(list(solution.retained.values())),
        share=share,
        condition=torch.tensor(list(solution.condition.values()), dtype=torch.float64),
        cosine=torch.stack(cosines),
        without=pooled(retained, others_share).T,
        by_samples={count: _effect(found, share) for count, found in by_samples.items()},
        doubts=doubts,
    )


def _effect(found: Sequence[tuple[torch.Tensor, torch.Tensor]], share: torch.Tensor) -> SampleEffect:
    """The effect of fewer samples, from each submodule's weights and what they keep, both [draws, T]."""
    alpha, retained = (torch.stack(values) for values in zip(*found, strict=True))  # [S, draws, T]
    kept = pooled(retained, share[:, None].expand_as(retained))
    return SampleEffect(alpha.mean((0, 1)), alpha.std(1).mean(0), kept.mean(0))


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
    if len(outside) > MOST_NAMED:
        found.append(f"{len(outside)} of {len(alpha)} weights, {extent(outside, plain_number)}")
    elif outside:
        found.append(f"weight {', '.join(map(plain_number, outside))}")
    return found


def _cosine(matrix: torch.Tensor) -> torch.Tensor:
    norm = matrix.diagonal().sqrt()
    product = norm[:, None] * norm
    return torch.where(product > 0, matrix / product, torch.nan)
