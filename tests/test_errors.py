"""Several problems in one error, and other people's errors in a line."""

import pytest

from mergekit_slta.errors import SltaError, all_of, first_line, refuse


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("It is broken.\nSee there."), "It is broken"),
        (ValueError("\n Choose one of: \n- this"), "Choose one of"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_all_calls_are_made_and_their_sentences_said_once() -> None:
    calls = [lambda: refuse(["a.", "b."]), lambda: refuse([]), lambda: refuse(["b.", "c."])]
    with pytest.raises(SltaError) as caught:
        all_of(calls)
    assert caught.value.sentences == ("a.", "b.", "c.")
    assert all_of([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        all_of([lambda: 1 / 0])
