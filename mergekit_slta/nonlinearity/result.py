"""The result of measuring linearity: every score, by level, expert or merge, and submodule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mergekit_slta.levels import place_of
from mergekit_slta.tables import Paragraphs, Table, short_names
from mergekit_slta.words import kind_name, plain_number

METRIC, SCORE = "non_linearity", "Non-linearity score"


@dataclass(frozen=True)
class Value:
    """Mean and (population) standard deviation of ``n`` numbers; NaN if ``n`` is 0."""

    mean: float
    std: float
    n: int

    @staticmethod
    def of(numbers: torch.Tensor) -> Value:
        """Summarize the numbers [n] that are not NaN."""
        defined = numbers[~numbers.isnan()]
        if not len(defined):
            return Value(math.nan, math.nan, 0)
        return Value(float(defined.mean()), float(defined.std(correction=0)), len(defined))


def pool_values(values: Sequence[Value]) -> Value:
    """Mean and standard deviation of the numbers behind several values together."""
    defined = [value for value in values if value.n]
    n = sum(value.n for value in defined)
    if not n:
        return Value(math.nan, math.nan, 0)
    mean = sum(value.n * value.mean for value in defined) / n
    variance = sum(value.n * (value.std**2 + (value.mean - mean) ** 2) for value in defined) / n
    return Value(mean, math.sqrt(variance), n)


# metric -> level -> expert, or "A+B" -> submodule
Metrics = dict[str, dict[str, dict[str, dict[str, Value]]]]


@dataclass(frozen=True, repr=False, eq=False)
class Linearity(Paragraphs):
    """How far models and submodules are from linear in their weights; printed, it is a table."""

    experts: tuple[str, ...]  # their names
    levels: tuple[str, ...]  # that were measured
    samples: tuple[int, ...]  # how many each expert has
    # ``non_linearity`` (Eq. 19; over samples), ``distance_0.0`` ... ``distance_1.0`` (Table 18; over samples),
    # ``projection_distance`` (Eq. 8) and ``cosine_merge`` (Eq. 16), both over the settings of a merge, and
    # ``cosine_base`` (Eq. 17; over samples).
    metrics: Metrics
    # Level -> expert -> submodule -> [N + 1, N + 1], the mean distances of Figure 6.
    maps: dict[str, dict[str, dict[str, torch.Tensor]]]
    # Level -> expert or "A+B" -> how often a sample was left out of a submodule because a feature delta is zero.
    skipped: dict[str, dict[str, int]]
    members: dict[str, tuple[str, ...]]  # the experts' names of each "A+B"

    def groups(self) -> dict[str, str]:
        """The kinds of submodules, each with the first level that has such submodules."""
        groups: dict[str, str] = {}
        for level, by_expert in self.metrics[METRIC].items():
            for name in next(iter(by_expert.values())):
                groups.setdefault(_group_of(level, name), level)
        return groups

    def pooled(self, metric: str, names: Sequence[str]) -> dict[str, Value]:
        """A metric of experts or merges over all submodules of each group; 1 minus it, if it is a cosine similarity."""
        pooled = {}
        for group, level in self.groups().items():
            entries = [entry for who in names for entry in self.metrics[metric][level][who].items()]
            value = pool_values([value for name, value in entries if _group_of(level, name) == group])
            pooled[group] = replace(value, mean=1 - value.mean) if metric.startswith("cosine") else value
        return pooled

    def table(self, quantity: str, metrics: Mapping[str, str], names: Sequence[str]) -> Table:
        """Mean and standard deviation of metrics, each with words for its rows, by groups and by experts or merges."""
        short = dict(zip(self.experts, short_names(self.experts), strict=True))
        columns = [" + ".join(short[expert] for expert in self.members.get(name, [name])) for name in names]
        values = {metric: [self.pooled(metric, [name]) for name in names] for metric in metrics}
        rows = [
            [group + words, *(f"{plain_number(v[group].mean)} ± {plain_number(v[group].std)}" for v in values[metric])]
            for group in self.groups()
            for metric, words in metrics.items()
        ]
        return Table([quantity, *columns], rows)

    def parts(self) -> Iterator[str | Table]:
        """The scores, as in Table 17 of the paper, and for merges how far feature changes are from adding up."""
        yield self.table(SCORE, {METRIC: ""}, self.experts)
        yield "Mean ± standard deviation over prompts and submodules; 0 is linear."
        if merges := [name for name, members in self.members.items() if len(members) > 1]:
            yield self.table("Projection distance", {"projection_distance": ""}, merges)
            yield "The same over merges and submodules. Where it is 0, the experts' feature changes add up."


def _group_of(level: str, name: str) -> str:
    return "linear map" if level == "linear" else kind_name(place_of(name).kind)
