"""What other people's errors are shortened to."""

import pytest

from mergekit_slta.errors import first_line, one_line


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


def test_one_line_has_the_cause_where_the_text_does_not() -> None:
    error = RuntimeError("the file\nis broken.")
    assert one_line(error) == "RuntimeError: the file is broken"
    error.__cause__ = ValueError("no number.")
    assert one_line(error) == "RuntimeError: the file is broken; no number"
    error.__cause__ = ValueError("the file is broken.")
    assert one_line(error) == "RuntimeError: the file is broken"
