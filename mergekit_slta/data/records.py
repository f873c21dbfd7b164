"""Turn a calibration record into text, by a template or by the names of its fields."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from mergekit_slta.errors import SltaError, reading

Record = Mapping[str, Any]

CHAT_FIELDS = ("messages", "conversations")
# These groups of fields are tried in order; the texts of one group are joined by a newline.
TEXT_FIELDS = (
    ("text",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
# A template reads no attribute of a value: through these the template of somebody else could read more than a record.
_FIELD = re.compile(r"(?!\d+(\[|$))[^.\[\]]+(\[[^\[\]]+\])*")
ROLES = {"human": "user", "gpt": "assistant"}
MARK = "\ue000"  # a character for private use, which chat templates neither strip nor write themselves

Turns = list[dict[str, Any]]
Span = tuple[int, int]


class Text(NamedTuple):
    """A record as text.

    Attributes:
        text: "" for an empty record.
        is_chat: whether a chat template wrote it.
        answer: the place of the answer in the text, without blanks around it: the index of its first character, and of
            the one after its last. The answer is the last turn if it is an assistant's, the last part of a pair, or the
            last of several fields in a template that ends with it; where a text or a template shows none, the last
            part of a pair that the record has too, if all its parts are in the text. None where there is no such part,
            or where a chat template does not show which part of its text is the last turn.
    """

    text: str
    is_chat: bool = False
    answer: Span | None = None


def record_text(record: Record, template: str, *, where: object, render_chat: Callable[[Turns], str]) -> Text:
    """Turn a record into text by the template, or else by the first of these fields that it has and that is not blank.

    In order: ``messages``, ``conversations``, and the groups of ``TEXT_FIELDS``.

    Args:
        record: the fields of one sample.
        template: a ``str.format`` string over the fields, or "".
        where: names the record at the beginning of an error message.
        render_chat: turns a conversation, a list of ``role`` and ``content``, into text with special tokens.

    Raises:
        SltaError: the record lacks these fields, or does not fit the template or the chat template.
    """
    if template:
        return _fill(template, record, where)
    chats = [field for field in CHAT_FIELDS if field in record]
    for field in chats:
        turns = _turns(record[field], f"{where}: {field!r}")
        if not all(_is_blank(turn.get("content")) for turn in turns):
            with reading(where, "does not fit the chat template", "give the expert a 'template'"):
                text = render_chat(turns)
            return Text(text, True, _last_turn(turns, text, render_chat))
    groups = _groups_in(record)
    for fields in groups:
        parts = [_plain_text(record[field], f"{where}: {field!r}") for field in fields]
        if text := "\n".join(part for part in parts if part.strip()):
            return Text(text, answer=_answer_of_pair(record, text))
    if not chats and not groups:
        raise SltaError(
            f"{where} has none of the known fields: its fields are {in_a_list(record)}. "
            "Give the expert a 'template' that names the fields to use, such as '{question} {answer}'."
        )
    return Text("")


def _groups_in(record: Record) -> list[tuple[str, ...]]:
    """The groups of ``TEXT_FIELDS`` that a record has."""
    return [fields for fields in TEXT_FIELDS if all(field in record for field in fields)]


def _answer_of_pair(record: Record, text: str) -> Span | None:
    """Where the answer of a known pair of the record is, in a text that holds the pair's parts one after the other."""
    for fields in _groups_in(record):
        if len(fields) == 1:  # no pair
            continue
        *parts, answer = ("" if record.get(field) is None else str(record[field]).strip() for field in fields)
        end = 0
        for part in parts:
            begin = text.find(part, end)
            end = begin + len(part) if begin >= 0 else len(text)
        if answer and (begin := text.rfind(answer, end)) >= 0:
            return begin, begin + len(answer)
    return None


def has_known_fields(fields: Iterable[str]) -> bool:
    """Whether a record with these fields needs no template."""
    return any({*group} <= {*fields} for group in (*zip(CHAT_FIELDS), *TEXT_FIELDS))


def require_fields(fields: Iterable[str], template: str, source: str) -> None:
    """Refuse records with these fields in all, none of which has what the template names, or a known field.

    Raises:
        SltaError: this, or the template is not valid.
    """
    missing = [name for name in template_fields(template) if name not in fields] if template else []
    if missing:
        raise SltaError(
            f"No record of calibration source {source!r} has a field {missing[0]!r}, which the template {template!r} "
            f"names: the fields are {in_a_list(fields)}."
        )
    if not template and not has_known_fields(fields):
        raise SltaError(
            f"No record of calibration source {source!r} has any of the known fields: the fields are "
            f"{in_a_list(fields)}. Give the expert a 'template' that names the fields to use, such as "
            "'{question} {answer}'."
        )


def _last_turn(turns: Turns, text: str, render_chat: Callable[[Turns], str]) -> Span | None:
    """Where in the text of a conversation its last turn is, if it is an assistant's.

    The conversation is rendered once more with a mark in place of the turn's content. The text before and after the
    mark is the template's; the content is between.
    """
    last, content = turns[-1], turns[-1].get("content")
    mark: Any = MARK
    if isinstance(content, list):
        content = "".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
        mark = [{"type": "text", "text": MARK}]
    if last["role"] != "assistant" or _is_blank(content):
        return None
    try:
        rendered = render_chat([*turns[:-1], last | {"content": mark}])
    except Exception:  # the template takes the content apart, which the mark does not survive
        return None
    if rendered.count(MARK) != 1:  # the template leaves the turn out, or repeats it
        return None
    before, after = rendered.split(MARK)
    begin = _shared(text, before)
    end = len(text) - _shared(text[begin:][::-1], after[::-1])
    # A template may write the beginning of the content itself, such as the tag before a chain of thought, or leave it
    # out. More than the content shows that the template depends on the content elsewhere.
    is_content = "".join(str(content).split()).endswith("".join(text[begin:end].split()))
    return _without_blanks(text, begin, end) if is_content else None


def _shared(first: str, second: str) -> int:
    """How many characters two texts share at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _without_blanks(text: str, begin: int, end: int) -> Span | None:
    """A part of a text without the blanks around it; None if nothing else is in it."""
    part = text[begin:end]
    begin += len(part) - len(part.lstrip())
    return (begin, begin + len(part.strip())) if part.strip() else None


def template_fields(template: str) -> list[str]:
    """The fields of a record that a template names, in order.

    Raises:
        SltaError: the template is not valid, or names no field.
    """
    try:
        named = [(name, form) for _, name, form, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise SltaError(
            f"The template {template!r} is not a valid format string ({error}): write a brace as '{{{{'."
        ) from error
    if not named or any(not _FIELD.fullmatch(name) or "{" in (form or "") for name, form in named):
        raise SltaError(
            f"The template {template!r} must name fields of a record, each as '{{field}}', '{{field[key]}}' for a part "
            "of a field, or '{field:format}'."
        )
    return [name.split("[")[0] for name, _ in named]


class _Formatter(string.Formatter):
    """Fills a template and keeps the text of its last field."""

    last = ""

    def format_field(self, value: Any, format_spec: str) -> str:
        self.last = str(super().format_field(value, format_spec))
        return self.last


def _fill(template: str, record: Record, where: object) -> Text:
    fields = template_fields(template)
    for field in fields:
        if field not in record:
            raise SltaError(
                f"{where} has no field {field!r}, which the template {template!r} names: "
                f"its fields are {in_a_list(record)}."
            )
    if all(_is_blank(record[field]) for field in fields):
        return Text("")
    formatter = _Formatter()
    with reading(where, f"does not fit the template {template!r}", "correct the template"):
        text = formatter.vformat(template, (), {name: "" if value is None else value for name, value in record.items()})
    ended = template.rstrip()  # a block of YAML ends with a newline
    *_, (_, last, _, _) = formatter.parse(ended)
    if len(fields) < 2 or last is None:  # the template ends with words of its own
        return Text(text, answer=_answer_of_pair(record, text))
    end = len(text) - (len(template) - len(ended))
    return Text(text, answer=_without_blanks(text, end - len(formatter.last), end))


def _turns(value: Any, what: str) -> Turns:
    """The turns of a conversation, each with ``role`` and ``content``."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise SltaError(f"{what} is not a list of turns: give the expert a 'template'.")
    turns = []
    for turn in value:
        if turn.get("role") is None:
            if (role := turn.get("from")) is None:
                raise SltaError(
                    f"{what} has a turn without 'role' and 'content', or 'from' and 'value': "
                    f"its fields are {in_a_list(turn)}."
                )
            turn = {"role": ROLES.get(str(role), role), "content": turn.get("value")}
        turns.append(turn)
    return turns


def _plain_text(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, dict, bytes)):
        raise SltaError(f"{what} holds a {type(value).__name__}, not text: give the expert a 'template'.")
    return str(value)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value)


def in_a_list(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "none"
