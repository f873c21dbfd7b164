"""Turn a calibration record into text, by a template or by the names of its fields."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from mergekit_slta.data import chats
from mergekit_slta.data.chats import Span, UnfitRecord, is_blank, without_blanks
from mergekit_slta.errors import SltaError, first_line

Record = Mapping[str, Any]

CHAT_FIELDS = ("messages", "conversations")
# These groups of fields are tried in order; the texts of one group are joined by a newline, unless a prompt brings its
# own blanks.
TEXT_FIELDS = (
    ("text",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
ANSWERS = {fields[-1] for fields in TEXT_FIELDS[1:]}
# A template reads no attribute of a value: through these the template of somebody else could read more than a record.
_FIELD = re.compile(r"(?!\d+(\[|$))[^.\[\]]+(\[[^\[\]]+\])*")
_APART = r"(?!(?<=\w)\w)"  # no place inside a word


class Text(NamedTuple):
    """A record as text.

    Attributes:
        text: "" for an empty record.
        is_chat: whether a chat template wrote it.
        answer: the place of the answer in the text, without blanks around it: the index of its first character, and of
            the one after its last. The answer is the last turn if it is an assistant's, the last part of a pair, or of
            several fields in a template the last one, if the template ends with it or it is an answer by its name. In
            the record's own text it is the only place for the last part of a pair that the record has too. None where
            there is no such part or place.
        left_out: what the chat template does not write of the record, as in "the reasoning".
    """

    text: str
    is_chat: bool = False
    answer: Span | None = None
    left_out: tuple[str, ...] = ()


def record_text(record: Record, template: str, *, where: object, render_chat: Callable[..., str]) -> Text:
    """Turn a record into text by the template, or else by the first of these fields that it has and that is not blank.

    In order: ``messages``, ``conversations``, and the groups of ``TEXT_FIELDS``; a group with turns is a conversation.

    Args:
        record: the fields of one sample.
        template: a ``str.format`` string over the fields, or "".
        where: names the record at the beginning of an error message.
        render_chat: turns a conversation, a list of ``role`` and ``content``, into text with special tokens; its
            argument ``tools`` is given where the record has some.

    Raises:
        UnfitRecord: the record lacks these fields, or does not fit the template or the chat template.
        SltaError: the template is not valid, or there is no chat template.
    """
    if template:
        return _fill(template, record, where)
    chat_fields = [field for field in CHAT_FIELDS if field in record]
    for field in chat_fields:
        if turns := chats.normalized(record[field], f"{field!r} of {where}"):
            return _chat_text(turns, record, where, render_chat)
    groups = _groups_in(record)
    for fields in groups:
        values = [chats.plain(record[field]) for field in fields]
        if len(fields) > 1 and any(map(chats.is_turns, values)):
            if turns := chats.normalized(_one_chat(values), f"{fields[0]!r} of {where}"):
                return _chat_text(turns, record, where, render_chat)
            continue
        parts = [_plain_text(record[field], f"{field!r} of {where}") for field in fields]
        if any(part.strip() for part in parts):
            return _joined(fields, parts, record)
    if not chat_fields and not groups:
        raise UnfitRecord(
            f"{where} has none of the known fields: its fields are {in_a_list(record)}. "
            "Give the expert a 'template' that names the fields to use, such as '{question} {answer}'."
        )
    return Text("")


def _chat_text(turns: chats.Turns, record: Record, where: object, render_chat: Callable[..., str]) -> Text:
    tools = chats.plain(record.get("tools"))
    tools = [*map(chats.plain, tools)] if isinstance(tools, list) else tools
    render = partial(render_chat, tools=tools) if tools else render_chat
    turns, text = chats.written(turns, render, where)
    if chats.loses_reasoning(turns, text):  # some templates have a switch for it
        thinking = partial(render, enable_thinking=True, thinking=True)
        kept = chats.attempt(thinking, turns)
        if kept is not None and not chats.loses_reasoning(turns, kept):
            render, text = thinking, kept
    left_out = ["the reasoning"] * chats.loses_reasoning(turns, text)
    others = {turn["role"] for turn in turns if turn["role"] != "assistant" and chats.leaves_out(turn, text)}
    left_out += [f"a turn of the {role}" for role in sorted(others)]
    left_out += ["the tools"] * (bool(tools) and chats.attempt(render_chat, turns) == text)
    return Text(text, True, chats.answer_in(turns, text, render), tuple(left_out))


def _one_chat(values: list[Any]) -> list[Any]:
    """A prompt and its completion, of which one is a list of turns, as one conversation."""
    turns = []
    for number, value in enumerate(values, 1):
        if chats.is_turns(value):
            turns += value
        elif not is_blank(value):
            turns.append({"role": "user" if number < len(values) else "assistant", "content": value})
    return turns


def _joined(fields: tuple[str, ...], parts: list[str], record: Record) -> Text:
    """The texts of a group of fields; its last one is the answer, if there are several fields."""
    text = ""
    for part in filter(str.strip, parts):
        blank = fields[0] == "prompt" and (text[-1:].isspace() or part[0].isspace())
        text += "\n" * bool(text and not blank) + part
    if len(fields) == 1:
        return Text(text, answer=_answer_in(text, record))
    begin = len(text) - len(parts[-1]) if parts[-1].strip() else len(text)
    return Text(text, answer=without_blanks(text, begin, len(text)))


def _groups_in(record: Record) -> list[tuple[str, ...]]:
    """The groups of ``TEXT_FIELDS`` that a record has."""
    return [fields for fields in TEXT_FIELDS if all(field in record for field in fields)]


def _answer_in(text: str, record: Record) -> Span | None:
    """Where the answer of a known pair of the record is, in a text that holds the pair's parts one after the other.

    None where several places could be the answer's: what follows an answer may hold the same letters.
    """
    for fields in _groups_in(record):
        parts = [re.escape("" if record[field] is None else str(record[field]).strip()) for field in fields]
        before = re.match(".*?".join(["", *parts[:-1]]), text, re.DOTALL)
        if len(parts) > 1 and parts[-1] and before:
            answer = re.compile(_APART + parts[-1] + _APART, re.ASCII)
            places = [place.span() for place in answer.finditer(text, before.end())]
            if len(places) == 1:
                return places[0]
    return None


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


def _fill(template: str, record: Record, where: object) -> Text:
    fields = template_fields(template)
    for field in fields:
        if field not in record:
            raise UnfitRecord(
                f"{where} has no field {field!r}, which the template {template!r} names: "
                f"its fields are {in_a_list(record)}."
            )
    if all(is_blank(record[field]) for field in fields):
        return Text("")
    text, tail, formatter = "", "", string.Formatter()
    last: Span = 0, 0
    for words, name, form, conversion in formatter.parse(template):
        text, tail = text + words, tail + words if name is None else ""
        if name is None:
            continue
        try:
            value, _ = formatter.get_field(name, (), record)
            shown = formatter.convert_field("" if value is None else value, conversion)
            written = str(formatter.format_field(shown, form or ""))
        except Exception as error:  # of any kind: the value is any, and so is what is asked of it
            raise UnfitRecord(
                f"{where} does not fit the template {template!r} ({first_line(error)}): correct the template."
            ) from error
        if isinstance(value, (list, dict, bytes)):
            raise UnfitRecord(
                f"{where} has a {type(value).__name__} in {name!r}, which the template {template!r} would print: write "
                f"a part of it, such as '{{{name}[key]}}', or leave the template out and give a chat as 'messages'."
            )
        last = len(text), len(text) + len(written)
        text += written
    known = len(fields) > 1 and (fields[-1] in ANSWERS or not (tail.strip() or ANSWERS & {*fields}))
    return Text(text, answer=without_blanks(text, *last) if known else None)


def _plain_text(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, dict, bytes)):
        raise UnfitRecord(f"{what} holds a {type(value).__name__}, not text: give the expert a 'template'.")
    return str(value)


def in_a_list(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "none"
