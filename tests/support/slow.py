"""Cases of parametrized tests that the quick suite leaves out."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases in their order, all but the quick ones marked slow."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]
