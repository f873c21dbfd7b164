"""Turn a calibration record into text, by a template or by the names of its fields."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mergekit_slta.errors import SltaError, one_line

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
# What a template may ask for: no attribute of a value, through which a template of somebody else could read more.
_FIELD = re.compile(r"[^.\[\]]+(\[[^\[\]]+\])*")
ROLES = {"human": "user", "gpt": "assistant"}


class Text(NamedTuple):
    """A record as text.

    Attributes:
        text: "" for an empty record.
        is_chat: whether a chat template wrote it.
        answer: what the text answers, as the record's shape tells: the last turn of an assistant, the last part of a
            pair, or the last of several fields in a template that ends with it; "" where there is no such part.
    """

    text: str
    is_chat: bool = False
    answer: str = ""


def record_text(
    record: Record, template: str, *, where: object, render_chat: Callable[[list[dict[str, Any]]], str]
) -> Text:
    """Turn a record into text by the template, or else by the first of these fields that it has and that is not blank.

    In order: ``messages``, ``conversations``, and the groups of ``TEXT_FIELDS``.

    Args:
        record: the fields of one sample.
        template: a ``str.format`` string over the fields, or "".
        where: names the record at the beginning of an error message.
        render_chat: turns a conversation, a list of ``role`` and ``content``, into text with special tokens.
    """
    if template:
        return _fill(template, record, where)
    fits = False
    for field in CHAT_FIELDS:
        if field in record:
            fits = True
            turns = _turns(record[field], f"{where}: {field!r}")
            if not all(_is_blank(turn.get("content")) for turn in turns):
                try:
                    text = render_chat(turns)
                except SltaError:
                    raise
                except Exception as error:  # a chat template is a program that came with the model
                    raise SltaError(
                        f"{where} does not fit the chat template ({one_line(error)}): give the expert a 'template'."
                    ) from error
                role, content = turns[-1]["role"], turns[-1].get("content")
                return Text(text, True, content.strip() if role == "assistant" and isinstance(content, str) else "")
    for fields in TEXT_FIELDS:
        if all(field in record for field in fields):
            fits = True
            parts = [_plain_text(record[field], f"{where}: {field!r}") for field in fields]
            if text := "\n".join(part for part in parts if part.strip()):
                return Text(text, answer=parts[-1].strip() if len(parts) > 1 else "")
    if not fits:
        raise SltaError(
            f"{where} has none of the known fields: its fields are {joined(record)}. "
            "Give the expert a 'template' that names the fields to use, such as '{question} {answer}'."
        )
    return Text("")


def template_fields(template: str) -> list[str]:
    """The fields of a record that a template names, in order.

    Raises:
        SltaError: the template is not valid, or names no field.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        every = list(_all_names(template))
    except (ValueError, RecursionError) as error:
        raise SltaError(
            f"The template {template!r} is not a valid format string ({error}): write a brace as '{{{{'."
        ) from error
    fields = [re.split(r"[.\[]", name, maxsplit=1)[0] for name in names]
    if not fields or any(not field or field.isdigit() for field in fields):
        raise SltaError(f"The template {template!r} must name fields of a record, such as '{{question}} {{answer}}'.")
    if wrong := [name for name in every if not _FIELD.fullmatch(name)]:
        raise SltaError(
            f"The template {template!r} asks for {wrong[0]!r}, but it can only read a record's fields: write "
            "'{field}', or '{field[key]}' for a part of a field."
        )
    return fields


def _all_names(template: str) -> Iterator[str]:
    """All that a template asks for, also inside the format of another field."""
    for _, name, form, _ in string.Formatter().parse(template):
        if name is not None:
            yield name
            yield from _all_names(form or "")


class _Fields(string.Formatter):
    """Fills a template with a record's fields; a width that would fill the memory is refused."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5}", format_spec):
            raise ValueError(f"the width in {format_spec!r} is too large")
        return super().format_field(value, format_spec)


def _fill(template: str, record: Record, where: object) -> Text:
    fields = template_fields(template)
    for field in fields:
        if field not in record:
            raise SltaError(
                f"{where} has no field {field!r}, which the template {template!r} names: "
                f"its fields are {joined(record)}."
            )
    if all(_is_blank(record[field]) for field in fields):
        return Text("")
    values = {name: "" if value is None else value for name, value in record.items()}
    try:
        text = _Fields().vformat(template, (), values)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise SltaError(
            f"{where} does not fit the template {template!r} ({one_line(error)}): correct the template."
        ) from error
    last = values[fields[-1]]
    ends_with_it = len(fields) > 1 and template.endswith("}") and not _is_blank(last)
    return Text(text, answer=str(last).strip() if ends_with_it else "")


def _turns(value: Any, what: str) -> list[dict[str, Any]]:
    """The turns of a conversation, each with ``role`` and ``content``."""
    if value is None:
        return []
    if isinstance(value, dict):  # datasets returns a sequence of structures by columns
        value = rows(value)
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise SltaError(f"{what} is not a list of turns: give the expert a 'template'.")
    turns = []
    for turn in value:
        if turn.get("role") is None:
            if (role := turn.get("from")) is None:
                raise SltaError(
                    f"{what} has a turn without 'role' and 'content', or 'from' and 'value': "
                    f"its fields are {joined(turn)}."
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


def rows(columns: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The records of a table given by its columns; None if the columns are not lists of one length."""
    lengths = {len(column) if isinstance(column, list) else None for column in columns.values()}
    if len(lengths) != 1 or None in lengths:
        return None
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def joined(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "none"
