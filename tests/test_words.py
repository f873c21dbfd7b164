"""Numbers, counts and lists are written as a reader expects them."""

from __future__ import annotations

import math

from mergekit_slta.words import as_score, counted, enumerated, kind_name, plain_number, possessive


def test_scores_have_two_decimals_and_zero_has_no_sign() -> None:
    shares = (0.914, -0.002, -1e-17, -0.12, math.nan, None)
    assert [as_score(share) for share in shares] == ["0.91", "0.00", "0.00", "−0.12", "–", "–"]
    assert as_score(-0.0004, 3) == "0.000"


def test_numbers_counts_and_lists() -> None:
    assert [plain_number(number) for number in (0.12345, -3.0, 1234.5, math.nan)] == ["0.123", "−3", "1.23e+03", "–"]
    assert [enumerated(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert [counted(number, "layer") for number in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
    assert [possessive(name) for name in ("math", "words")] == ["math's", "words'"]
    assert [kind_name(kind) for kind in ("attn", "mlp", "head")] == ["attention", "MLP", "head"]
