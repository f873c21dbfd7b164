"""Calibration records: what each shape and template becomes, and how problems are worded."""

from typing import Any

import pytest
from support.calibration_samples import SHAREGPT, TURNS, refused

from mergekit_slta.data.records import record_text, template_fields


def as_text(record: dict[str, Any], template: str = "") -> tuple[str, bool]:
    text, is_chat, *_ = record_text(
        record,
        template,
        where="Record 7 of calibration source 'x.jsonl'",
        render_chat=lambda turns: "".join(f"<{turn['role']}>{turn['content']}" for turn in turns),
    )
    return text, is_chat


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": "a"}, "a"),
        ({"prompt": "a", "response": "b"}, "a\nb"),
        ({"prompt": "Intent:", "completion": " b"}, "Intent: b"),
        ({"prompt": "a\n\n", "completion": "b"}, "a\n\nb"),
        ({"question": "a ", "answer": "b"}, "a \nb"),
        ({"question": "a", "answer": 42}, "a\n42"),
        ({"question": "a", "answer": None}, "a"),
        ({"instruction": "a", "output": "b"}, "a\nb"),
        ({"instruction": "a", "input": "i", "output": "b"}, "a\ni\nb"),
        ({"instruction": "a", "input": " ", "output": "b"}, "a\nb"),
        ({"text": "a", "prompt": "b", "completion": "c"}, "a"),
        ({"text": None, "question": "a", "answer": "b"}, "a\nb"),
        ({"messages": None, "text": "a"}, "a"),
        ({"question": None, "answer": " "}, ""),
        ({"messages": []}, ""),
        ({"conversations": [{"from": "human", "value": None}, {"role": "user", "content": " "}]}, ""),
    ],
)
def test_shapes_without_a_chat(record: dict[str, Any], text: str) -> None:
    assert as_text(record) == (text, False)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": TURNS, "text": "other"}, "<user>hi<assistant>ho"),
        ({"conversations": TURNS, "prompt": "other", "completion": "other"}, "<user>hi<assistant>ho"),
        ({"conversations": SHAREGPT}, "<system>be kind<user>hi<assistant>ho<tool>42"),
        ({"messages": [{"role": None, "content": None, "from": "gpt", "value": "ho"}]}, "<assistant>ho"),
    ],
)
def test_chat_shapes(record: dict[str, Any], text: str) -> None:
    assert as_text(record) == (text, True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {question}\nA: {answer}", "Q: a\nA: 5"),
        ("{question!r}", "'a'"),
        ("{answer:03d}", "005"),
        ("{messages[0][content]}{{}}", "hi{}"),
        ("{question} {nothing}", "a "),
        ("Nothing here: {nothing}{blank}", ""),
    ],
)
def test_template_goes_before_every_shape(template: str, text: str) -> None:
    record = {"messages": TURNS, "text": "other", "question": "a", "answer": 5, "nothing": None, "blank": " "}
    assert as_text(record, template) == (text, False)


@pytest.mark.parametrize(
    ("record", "template", "said"),
    [
        ({"prompt": "a", "label": "b"}, "", ["its fields are prompt, label", "'template'"]),
        ({"text": ["a"]}, "", ["'text'", "list"]),
        ({"prompt": ["a"], "completion": "b"}, "", ["'prompt'", "'template'"]),
        ({"prompt": TURNS, "completion": TURNS}, "{prompt}{completion}", ["list in 'prompt'", "'{prompt[key]}'"]),
        ({"q": {"a": 1}, "b": "c"}, "{b} {q!s}", ["dict in 'q'", "'messages'"]),
        ({"messages": [{"role": "alien", "content": "a"}]}, "", ["unknown role 'alien'", "assistant"]),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": ["f"]}]}, "", ["tool call without a function"]),
        ({"messages": "hi"}, "", ["'messages'", "not a list of turns"]),
        ({"messages": [{"speaker": "me", "says": "hi"}]}, "", ["its fields are speaker, says"]),
        ({"q": "a", "a": "b"}, "{q} {b}", ["'b'", "its fields are q, a"]),
        ({"q": "a"}, "{q[x]}", ["'{q[x]}'"]),
        ({"q": "a"}, "{q:d}", ["'{q:d}'"]),
    ],
)
def test_record_that_does_not_fit_is_named(record: dict[str, Any], template: str, said: list[str]) -> None:
    message = refused(as_text, record, template)
    for words in ("Record 7 of calibration source 'x.jsonl'", *said):
        assert words in message


@pytest.mark.parametrize(
    "template", ["{q", "{}", "{0}", "no field", "{q.__class__}", "{q[0].__doc__}", "{q:{q.__class__}}"]
)
def test_bad_template_is_quoted(template: str) -> None:
    assert repr(template) in refused(as_text, {"q": "a"}, template)


def test_template_fields() -> None:
    assert template_fields("{a} {b[c]}{d[0]:>5} {{e}}") == ["a", "b", "d"]
