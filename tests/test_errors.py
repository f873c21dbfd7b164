"""Several problems in one error."""

import pytest

from mergekit_slta.errors import SltaError, all_of, refuse


def test_all_calls_are_made_and_their_sentences_said_once() -> None:
    calls = [lambda: refuse(["a.", "b."]), lambda: refuse([]), lambda: refuse(["b.", "c."])]
    with pytest.raises(SltaError) as caught:
        all_of(calls)
    assert caught.value.sentences == ("a.", "b.", "c.")
    assert all_of([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        all_of([lambda: 1 / 0])
