"""The weights of calibration tokens, by hand."""

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.featcal.scratch import ANSWER_WEIGHT, token_weights

W = ANSWER_WEIGHT


def task(*rows: tuple[int, tuple[int, int] | None]) -> CalibrationData:
    """Samples of some lengths, with the places of their answers."""
    token_ids = tuple(tuple(range(length)) for length, _ in rows)
    return CalibrationData("a.jsonl", "", token_ids, tuple(range(len(rows))), tuple(span for _, span in rows))


def weights(*tasks: CalibrationData) -> list[list[float]]:
    return [row.tolist() for row in token_weights(tasks)]


def test_answers_count_from_the_token_that_predicts_their_first() -> None:
    assert weights(task((6, (3, 5)))) == [[1, 1, W, W, W, 1]]


def test_an_answer_that_is_cut_off_counts_as_far_as_it_goes() -> None:
    assert weights(task((4, (3, 40)))) == [[1, 1, W, W]]


def test_samples_are_in_the_order_of_the_tasks() -> None:
    assert weights(task((3, (2, 3)), (2, None)), task((1, None), (2, (1, 2)))) == [[1, W, W], [1, 1], [1], [W, W]]
