"""Linearity of a family of tests, and whether another study gives the same values."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support import families
from support.families import Family

from mergekit_slta.layers.trace import trace
from mergekit_slta.nonlinearity.result import Linearity
from mergekit_slta.nonlinearity.studies import Plan, Study

NAMES = ("one", "two", "three")


def plan_of(family: Family, levels: Sequence[str], studies: Sequence[Study], tasks: Sequence[Any]) -> Plan:
    """A plan to measure studies on a family, whose experts are called by ``NAMES``."""
    models = families.checkpoints(family.folders)
    return Plan(trace(family.config), models, NAMES[: len(models) - 1], tasks, levels, studies)


def assert_same(first: Linearity, second: Linearity, tolerance: float) -> None:
    """The same numbers of values, whose means and deviations differ by the tolerance at most."""

    def near(number: str) -> Any:
        return pytest.approx(float(number), abs=tolerance, nan_ok=True)

    one, other = (json.dumps(result.metrics, default=vars) for result in (first, second))
    assert json.loads(one, parse_float=near, parse_constant=near) == json.loads(other)
