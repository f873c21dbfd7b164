"""Numbers, counts and lists are written as a reader expects them."""

from __future__ import annotations

import math

import pytest

from mergekit_slta.words import as_score, counted, enumerated, kind_name, percent, plain_number, possessive


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.914, "91 %"), (1.0, "100 %"), (0.997, "over 99 %"), (0.0, "0 %"), (-0.002, "0 %"), (-0.12, "−12 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_scores_have_two_decimals_and_zero_has_no_sign() -> None:
    assert [as_score(share) for share in (0.914, -0.002, -0.12, math.nan)] == ["0.91", "0.00", "−0.12", "–"]


def test_numbers_counts_and_lists() -> None:
    assert [plain_number(number) for number in (0.12345, -3.0, 1234.5, math.nan)] == ["0.123", "−3", "1.23e+03", "–"]
    assert [enumerated(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert [counted(number, "layer") for number in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
    assert [possessive(name) for name in ("math", "words")] == ["math's", "words'"]
    assert [kind_name(kind) for kind in ("attn", "mlp", "head")] == ["attention", "MLP", "head"]
