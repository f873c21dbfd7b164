"""What people and programs read: aligned tables, short numbers and names, and JSON in which every number is finite.

That HTML is escaped is what tests/reports says.
"""

import json
import math

import pytest

from mergekit_slta.nonlinearity.result import Value
from mergekit_slta.tables import Table, as_json, as_size, short_names
from mergekit_slta.words import as_score


def test_a_share_has_two_decimals_and_zero_has_no_sign() -> None:
    shares = (0.914, -0.002, -1e-17, -0.12, math.nan, None)
    assert [as_score(share) for share in shares] == ["0.91", "0.00", "0.00", "−0.12", "–", "–"]


@pytest.mark.parametrize(
    ("nbytes", "written"), [(0, "0 KB"), (1234, "1.23 KB"), (999_500, "1 MB"), (1_234_000_000_000, "1,234 GB")]
)
def test_a_size_has_three_digits(nbytes: int, written: str) -> None:
    assert as_size(nbytes) == written


def test_columns_are_aligned() -> None:
    assert str(Table(["of", "one"], [["a", "1"], ["bcd", "23456"]])) == "of     one\na        1\nbcd  23456"


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    text = as_json({"médian": {"value": Value(math.nan, 0.1, 2)}, "list": [math.inf, -math.inf, 0.5]})
    assert json.loads(text) == {"médian": {"value": {"mean": None, "std": 0.1, "n": 2}}, "list": [None, None, 0.5]}
    assert "médian" in text and text.endswith("}\n")


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["org/llama-math", "org/llama-code"], ("math", "code")),
        (["WizardMath-7B-V1.0", "./WizardCoder-7B-V1.0"], ("WizardMath", "WizardCoder")),
        (["runs/a/x", "runs/b/x"], ("a", "b")),
        (["a/x", "a/x"], ("a/x", "a/x")),
        (["C:\\models\\math\\", "code/"], ("math", "code")),
    ],
)
def test_short_names_tell_experts_apart(models: list[str], names: tuple[str, ...]) -> None:
    assert short_names(models) == names
