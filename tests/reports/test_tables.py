"""What programs read: JSON in which every number is finite."""

from __future__ import annotations

import json
import math

from mergekit_slta.linearity.scores import Value
from mergekit_slta.reports.tables import as_json


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    text = as_json({"médian": {"value": Value(math.nan, 0.1, 2)}, "list": [math.inf, -math.inf, 1e-9]})
    assert json.loads(text) == {"médian": {"value": {"mean": None, "std": 0.1, "n": 2}}, "list": [None, None, 1e-9]}
    assert "médian" in text
    assert text.endswith("}\n")
