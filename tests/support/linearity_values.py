"""Linearity of a family of tests, all its values, and whether another study's are the same."""

from collections.abc import Sequence
from typing import Any

import pytest
from support import families
from support.families import Family

from mergekit_slta.layers.trace import trace
from mergekit_slta.nonlinearity.result import Linearity, Value
from mergekit_slta.nonlinearity.studies import Plan, Study

NAMES = ("one", "two", "three")


def plan_of(
    family: Family, levels: Sequence[str], studies: Sequence[Study], tasks: Sequence[Any], **arguments: Any
) -> Plan:
    """A plan to measure studies on a family, whose experts are called by ``NAMES``."""
    models = families.checkpoints(family.folders)
    return Plan(trace(family.config), models, NAMES[: len(models) - 1], tasks, levels, studies, **arguments)


def all_values(result: Linearity) -> dict[tuple[str, str, str, str], Value]:
    """Every value by its metric, level, group and submodule."""
    return {
        (metric, level, group, name): value
        for metric, by_level in result.metrics.items()
        for level, by_group in by_level.items()
        for group, submodules in by_group.items()
        for name, value in submodules.items()
    }


def assert_same(first: Linearity, second: Linearity, tolerance: float) -> None:
    """The same numbers of values, whose means and deviations differ by the tolerance at most."""
    other = all_values(second)
    assert all_values(first).keys() == other.keys()
    for key, value in all_values(first).items():
        assert value.n == other[key].n, key
        assert value.mean == pytest.approx(other[key].mean, abs=tolerance, nan_ok=True), key
        assert value.std == pytest.approx(other[key].std, abs=tolerance, nan_ok=True), key
