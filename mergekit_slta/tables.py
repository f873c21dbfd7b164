"""Tables for people, with short names of models, and JSON for programs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from mergekit_slta.errors import printable

LONGEST_CELL = 100  # characters


@dataclass(frozen=True, repr=False)
class Table:
    """A table: the first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """The table as text, the first column to the left and the others to the right."""
        lines = [[printable(cell, LONGEST_CELL) for cell in line] for line in (self.header, *self.rows)]
        first, *others = [(column, max(map(len, column))) for column in zip(*lines, strict=True)]
        columns = [[cell.ljust(first[1]) for cell in first[0]]]
        columns += [[cell.rjust(width) for cell in column] for column, width in others]
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    __repr__ = __str__


def as_size(nbytes: float) -> str:
    """A number of bytes with three digits, as in "1.23 MB"."""
    size, unit = nbytes / 1e3, "KB"
    for larger in ("MB", "GB"):
        if size >= 999.5:
            size, unit = size / 1e3, larger
    return f"{size:,.0f} {unit}" if size >= 99.95 else f"{size:.3g} {unit}"


class Paragraphs:
    """A result that prints as sentences and tables."""

    def parts(self) -> Iterator[str | Table]:
        """The sentences and tables in their order."""
        raise NotImplementedError

    def __str__(self) -> str:
        parts = (printable(part, len(part)) if isinstance(part, str) else str(part) for part in self.parts())
        return "\n\n".join(parts)

    __repr__ = __str__


def as_json(content: object) -> str:
    """Content as indented JSON; numbers that are not finite become null, because JSON cannot hold them."""
    return TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="null")).dump_json(content, indent=1).decode() + "\n"


def short_names(models: Sequence[str]) -> tuple[str, ...]:
    """The models' names without folders and without the words that all names begin or end with.

    ``org/llama-math-v1`` and ``org/llama-code-v1`` are ``math`` and ``code``.
    """
    folders = [re.split(r"([/\\])", model.rstrip("/\\")) for model in models]
    last = [parts[-1] or model for parts, model in zip(folders, models, strict=True)]
    if len(set(last)) < len(last):  # such as checkpoint-500
        distinct = _without_common(folders)
        return tuple(distinct if len(set(distinct)) == len(distinct) else models)
    if len(last) == 1:
        return tuple(last)
    words = [re.split(r"([-_.])", name) for name in last]
    distinct = _without_common(words)
    are_words = all(sum(map(str.isalpha, name)) > 1 for name in distinct)  # "1" or "7b" alone would not name a model
    return tuple(distinct if are_words and len(set(distinct)) == len(distinct) else last)


def known_names(chosen: Sequence[str], every: Sequence[str] = ()) -> dict[str, str]:
    """The models' names by themselves, and by their short names in tables of the chosen ones or of all."""
    short = [*zip(short_names(every), every, strict=True), *zip(short_names(chosen), chosen, strict=True)]
    return dict(short) | {name: name for name in (*chosen, *every)}


def _without_common(names: Sequence[Sequence[str]]) -> list[str]:
    """Names in parts, of which every other one is a separator, without the parts at both ends that all have."""
    begin, end = _common(names), _common([name[::-1] for name in names])
    return ["".join(name[begin : len(name) - end]) for name in names]


def _common(names: Sequence[Sequence[str]]) -> int:
    """How many words and separators all names begin with, in whole pairs."""
    return sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, zip(*names, strict=False))) // 2 * 2
