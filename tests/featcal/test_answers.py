"""The weights of calibration tokens, by hand."""

from __future__ import annotations

import pytest

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.featcal.answers import ANSWER_SHARE, token_weights

Span = tuple[int, int] | None


def task(*rows: tuple[int, Span]) -> CalibrationData:
    """Samples of some lengths, with the places of their answers."""
    token_ids = tuple(tuple(range(length)) for length, _ in rows)
    return CalibrationData("a.jsonl", "", token_ids, tuple(range(len(rows))), tuple(span for _, span in rows), 0)


def test_answers_have_their_share_of_the_weight() -> None:
    first, second = token_weights([task((10, (8, 10)), (20, (19, 20)))])
    assert first[:7].tolist() == [1.0] * 7 and second[:18].tolist() == [1.0] * 18
    answered = float(first[7:].sum() + second[18:].sum())
    assert answered / float(first.sum() + second.sum()) == pytest.approx(ANSWER_SHARE)
    assert len(set(first[7:].tolist() + second[18:].tolist())) == 1


def test_long_answers_are_not_made_less_of() -> None:
    (weights,) = token_weights([task((100, (3, 100)))])
    assert weights.tolist() == [1.0] * 100


def test_an_answer_that_is_cut_off_counts_as_far_as_it_goes() -> None:
    (weights,) = token_weights([task((10, (9, 40)))])
    assert weights[:8].tolist() == [1.0] * 8
    assert float(weights[8:].sum() / weights.sum()) == pytest.approx(ANSWER_SHARE)


def test_samples_without_a_known_answer_keep_their_weight() -> None:
    first, second, third = token_weights([task((10, (9, 10)), (5, None)), task((4, None))])
    assert second.tolist() == [1.0] * 5 and third.tolist() == [1.0] * 4
    assert float(first[8:].sum() / first.sum()) == pytest.approx(ANSWER_SHARE)
