"""Calibration data: from a source that a recipe names to token ids, in an order that only the seed decides."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import random
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mergekit_slta.errors import SltaError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)

Record = Mapping[str, Any]

DATASET_PREFIX = "hf:"
CHAT_FIELDS = ("messages", "conversations")
# Shapes are tried in this order; the parts of one are joined by a newline.
TEXT_FIELDS = (
    ("text",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
ROLES = {"human": "user", "gpt": "assistant"}
# The csv module refuses fields over 128 KiB by default, which a document may well have.
CSV_FIELD_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class CalibrationData:
    """The samples drawn from one source.

    Attributes:
        source: the source as the recipe spells it.
        template: the template of the expert, or "".
        token_ids: one row of token ids per sample, in the order drawn; no padding.
        records: each row's index in the source.
        skipped: how many records were passed over because they are empty.
    """

    source: str
    template: str
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[int, ...]
    skipped: int

    @property
    def sha256(self) -> str:
        """Hex digest of the token ids: per row its length and its ids, all as little-endian int64."""
        digest = hashlib.sha256()
        for row in self.token_ids:
            digest.update(np.array((len(row), *row), dtype="<i8").tobytes())
        return digest.hexdigest()


def load_calibration(
    source: str,
    *,
    template: str = "",
    tokenizer: PreTrainedTokenizerBase,
    expert_tokenizer: Callable[[], PreTrainedTokenizerBase],
    samples: int,
    max_tokens: int,
    seed: int,
) -> CalibrationData:
    """Draw an expert's calibration samples.

    Records are taken in the order of ``random.Random(seed).sample(range(n), n)`` until enough are usable; empty ones
    are skipped. Records that are not needed are not tokenized.

    Args:
        source: what the recipe gives as ``calibration``.
        template: a ``str.format`` string over a record's fields, or "" to go by the shape of the record.
        tokenizer: the base model's; it tokenizes everything.
        expert_tokenizer: loads the expert's tokenizer; called only for a chat template that the base does not have.
        samples: how many samples to draw. Fewer than that are a warning.
        max_tokens: how many tokens of a sample to keep, from its beginning.
        seed: decides the order.

    Raises:
        SltaError: the source cannot be read, a record cannot be turned into text, or no record is usable.
    """
    encoder = _Encoder(source, template, tokenizer, expert_tokenizer, max_tokens)
    records = read_records(source)
    drawn = _draw(encoder, records, _order(len(records), seed), samples)
    if not drawn.records:
        raise SltaError(f"Calibration source {source!r} has no usable record: all {len(records)} are empty.")
    if drawn.skipped:
        LOG.warning("Calibration source %r: skipped %d empty records.", source, drawn.skipped)
    if len(drawn.records) < samples:
        LOG.warning("Calibration source %r has %d usable records of %d asked.", source, len(drawn.records), samples)
    return drawn


def held_out(
    source: str,
    *,
    template: str = "",
    tokenizer: PreTrainedTokenizerBase,
    expert_tokenizer: Callable[[], PreTrainedTokenizerBase],
    samples: int,
    max_tokens: int,
    seed: int,
    skip: CalibrationData,
) -> CalibrationData:
    """Draw records that calibration did not use: the next usable ones in the order that it took them in.

    A record that repeats a calibration sample, token by token, is passed over too.

    Args:
        skip: what ``load_calibration`` drew from the same source.
        samples: how many records to draw. Fewer than that are a warning.

    The other arguments and errors are those of ``load_calibration``.

    Raises:
        SltaError: also when calibration left no usable record.
    """
    encoder = _Encoder(source, template, tokenizer, expert_tokenizer, max_tokens)
    records = read_records(source)
    used = set(skip.records)
    order = [index for index in _order(len(records), seed) if index not in used]
    drawn = _draw(encoder, records, order, samples, exclude=set(skip.token_ids))
    if not drawn.records:
        raise SltaError(
            f"Calibration source {source!r} has no record to hold out: calibration used every usable one. "
            "Add records to it, or calibrate with fewer 'samples'."
        )
    if len(drawn.records) < samples:
        LOG.warning(
            "Calibration source %r has only %d records that calibration did not use, %d were asked for.",
            source,
            len(drawn.records),
            samples,
        )
    return drawn


def _order(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def _draw(
    encoder: _Encoder,
    records: Sequence[Record],
    order: Iterable[int],
    samples: int,
    exclude: Collection[tuple[int, ...]] = (),
) -> CalibrationData:
    rows: list[tuple[int, ...]] = []
    indices: list[int] = []
    skipped = 0
    for index in order:
        if len(rows) == samples:
            break
        row = encoder.encode(index, records[index])
        if not row:
            skipped += 1
        elif row not in exclude:
            rows.append(row)
            indices.append(index)
    return CalibrationData(encoder.source, encoder.template, tuple(rows), tuple(indices), skipped)


# From a record to token ids


@dataclass(frozen=True)
class _Encoder:
    """Turns the records of one source into token ids."""

    source: str
    template: str
    tokenizer: PreTrainedTokenizerBase
    expert_tokenizer: Callable[[], PreTrainedTokenizerBase]
    max_tokens: int

    def encode(self, index: int, record: Record) -> tuple[int, ...]:
        """The record's token ids, or an empty tuple for one that has no text or no token but the special ones."""
        where = f"Record {index + 1} of calibration source {self.source!r}"
        text, is_chat = record_text(record, self.template, where=where, render_chat=self._render_chat)
        if not text.strip():
            return ()
        # A chat template writes the special tokens itself; adding them again would double the first one.
        encoding = self.tokenizer(text, add_special_tokens=not is_chat, padding=False, truncation=False, verbose=False)
        special = 0 if is_chat else self.tokenizer.num_special_tokens_to_add()
        token_ids = encoding["input_ids"]
        # The tokenizer's own truncation may cut at the beginning, so the cut is made here.
        return tuple(token_ids[: self.max_tokens]) if len(token_ids) > special else ()

    def _render_chat(self, turns: list[dict[str, Any]]) -> str:
        return str(self.tokenizer.apply_chat_template(turns, chat_template=self._chat_template, tokenize=False))

    @cached_property
    def _chat_template(self) -> str:
        template = _chat_template_of(self.tokenizer)
        if template is None:
            template = _chat_template_of(self._load_expert_tokenizer())
        if template is None:
            raise SltaError(
                f"Calibration source {self.source!r} holds conversations, but neither the base model's tokenizer nor "
                "the expert's has a chat template: give the expert a 'template'."
            )
        return template

    def _load_expert_tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return self.expert_tokenizer()
        except (OSError, ValueError) as error:
            raise SltaError(
                f"Calibration source {self.source!r} holds conversations, the base model's tokenizer has no chat "
                f"template, and the expert's cannot be loaded ({_one_line(error)}): give the expert a 'template'."
            ) from error


def _chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except (ValueError, NotImplementedError):
        return None


def record_text(
    record: Record, template: str, *, where: str, render_chat: Callable[[list[dict[str, Any]]], str]
) -> tuple[str, bool]:
    """Turn a record into text, by the template or else by the first shape that it fits and that is not blank.

    The shapes, in order: ``messages`` or ``conversations``, ``text``, and the pairs of ``TEXT_FIELDS``.

    Args:
        record: the fields of one sample.
        template: a ``str.format`` string over the fields, or "".
        where: names the record in errors, at the beginning of a sentence.
        render_chat: renders turns, each with ``role`` and ``content``, as text with its special tokens.

    Returns:
        The text, "" for an empty record, and whether a chat template wrote it.

    Raises:
        SltaError: the record has no known shape, or does not fit the template.
    """
    if template:
        return _fill(template, record, where), False
    fits = False
    for field in CHAT_FIELDS:
        if field in record:
            fits = True
            turns = _turns(record[field], f"{where}: {field!r}")
            if not all(_is_blank(turn.get("content")) for turn in turns):
                return _render(render_chat, turns, where), True
    for fields in TEXT_FIELDS:
        if all(field in record for field in fields):
            fits = True
            parts = [_plain_text(record[field], f"{where}: {field!r}") for field in fields]
            if text := "\n".join(part for part in parts if part.strip()):
                return text, False
    if not fits:
        raise SltaError(
            f"{where} has no known shape: its fields are {_listed(record)}. "
            "Give the expert a 'template' that names the fields to use, such as '{question} {answer}'."
        )
    return "", False


def template_fields(template: str) -> list[str]:
    """The fields of a record that a template names, in order.

    Raises:
        SltaError: the template is no ``str.format`` string, or names no field.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise SltaError(f"The template {template!r} is no format string ({error}): write a brace as '{{{{'.") from error
    fields = [re.split(r"[.\[]", name, maxsplit=1)[0] for name in names]
    if not fields or any(not field or field.isdigit() for field in fields):
        raise SltaError(f"The template {template!r} must name fields of a record, such as '{{question}} {{answer}}'.")
    return fields


def _fill(template: str, record: Record, where: str) -> str:
    fields = template_fields(template)
    for field in fields:
        if field not in record:
            raise SltaError(
                f"{where} has no field {field!r}, which the template {template!r} names: "
                f"its fields are {_listed(record)}."
            )
    if all(_is_blank(record[field]) for field in fields):
        return ""
    try:
        return template.format_map({field: "" if value is None else value for field, value in record.items()})
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise SltaError(f"{where} does not fit the template {template!r} ({_one_line(error)}).") from error


def _turns(value: Any, what: str) -> list[dict[str, Any]]:
    """The turns of a conversation as dictionaries with ``role`` and ``content``."""
    if value is None:
        return []
    if isinstance(value, dict):  # how datasets hands out a sequence of structures
        value = _rows(value)
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise SltaError(f"{what} is no list of turns: give the expert a 'template'.")
    return [_turn(turn, what) for turn in value]


def _turn(turn: dict[str, Any], what: str) -> dict[str, Any]:
    if turn.get("role") is not None:
        return turn
    role = turn.get("from")
    if role is None:
        raise SltaError(
            f"{what} has a turn without 'role' and 'content', or 'from' and 'value': its fields are {_listed(turn)}."
        )
    return {"role": ROLES.get(role, role), "content": turn.get("value")}


def _render(render_chat: Callable[[list[dict[str, Any]]], str], turns: list[dict[str, Any]], where: str) -> str:
    try:
        return render_chat(turns)
    except SltaError:
        raise
    except Exception as error:  # a chat template is a program that came with the model: it may raise anything
        raise SltaError(
            f"{where} does not fit the chat template ({_one_line(error)}): give the expert a 'template'."
        ) from error


def _plain_text(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, dict, bytes)):
        raise SltaError(f"{what} holds a {type(value).__name__}, no text: give the expert a 'template'.")
    return str(value)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value)


# From a source to records


def read_records(source: str) -> Sequence[Record]:
    """Read all records of a calibration source.

    Args:
        source: a ``.jsonl``, ``.json``, ``.csv``, ``.parquet`` or ``.txt`` file (relative to the current directory), or
            ``hf:DATASET[?config=...&split=...]``, where DATASET is a dataset repository or a local folder.

    Returns:
        The records in the order of the source, as dictionaries; a dataset reads them when they are asked for.

    Raises:
        SltaError: the source is missing, unknown, broken or has no records.
    """
    records = _read_dataset(source) if source.startswith(DATASET_PREFIX) else _read_file(source)
    if not len(records):
        raise SltaError(f"Calibration source {source!r} has no records.")
    return records


def source_key(source: str) -> tuple[str, ...]:
    """What tells two calibration sources apart: equal for two spellings of the same file or dataset.

    The template is no part of it, for it does not change which data are used.

    Raises:
        SltaError: the query of a dataset is malformed.
    """
    if not source.startswith(DATASET_PREFIX):
        return ("file", _real_path(source))
    dataset = _parse_dataset(source)
    name = _real_path(dataset.name) if _is_folder(dataset.name) else dataset.name.lower()
    return ("dataset", name, dataset.config or "default", dataset.split or "train")


def source_name(source: str) -> str:
    """How published files name a source: as the recipe spells it, but a path of this machine by its last part."""
    if not source.startswith(DATASET_PREFIX):
        return _path_name(source)
    name, mark, query = source.removeprefix(DATASET_PREFIX).partition("?")
    return DATASET_PREFIX + _path_name(name) + mark + query


def _path_name(path: str) -> str:
    return os.path.basename(os.path.normpath(path)) if path.startswith("~") or os.path.isabs(path) else path


def _read_file(source: str) -> Sequence[Record]:
    path = os.path.expanduser(source)
    extension = os.path.splitext(path)[1].lower()
    if os.path.isdir(path):
        raise SltaError(f"Calibration source {source!r} is a folder: write '{DATASET_PREFIX}{source}' for a dataset.")
    if extension not in READERS:
        raise SltaError(
            f"Calibration source {source!r} has an unknown extension: it must be {_listed(READERS)}, "
            f"or '{DATASET_PREFIX}DATASET' for a dataset."
        )
    if not os.path.exists(path):
        raise SltaError(f"Calibration file {source!r} does not exist (the current directory is {os.getcwd()!r}).")
    try:
        return READERS[extension](source, path)
    except UnicodeDecodeError as error:
        raise SltaError(f"Calibration file {source!r} is not UTF-8 text: save it as UTF-8.") from error
    except OSError as error:
        raise SltaError(f"Calibration file {source!r} cannot be read ({_one_line(error)}).") from error


def _read_jsonl(source: str, path: str) -> list[Record]:
    with _open_text(path) as file:
        return list(_parse_json_lines(source, file))


def _parse_json_lines(source: str, lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise SltaError(f"Line {number} of calibration file {source!r} is broken JSON ({error.msg}).") from error
        if not isinstance(record, dict):
            raise SltaError(f"Line {number} of calibration file {source!r} is no JSON object with named fields.")
        yield record


def _read_json(source: str, path: str) -> list[Record]:
    with _open_text(path) as file:
        text = file.read()
    if not text.strip():
        return []
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines are often named .json
            return list(_parse_json_lines(source, text.split("\n")))
        raise SltaError(f"Line {error.lineno} of calibration file {source!r} is broken JSON ({error.msg}).") from error
    return _json_records(source, content)


def _json_records(source: str, content: Any) -> list[Record]:
    if isinstance(content, dict):
        data = content.get("data")
        content = data if _is_list_of_records(data) else _rows(content)
    if not _is_list_of_records(content):
        raise SltaError(
            f"Calibration file {source!r} must be a list of records, an object with that list under 'data', "
            "or an object with one list per field, all of one length."
        )
    return content


def _is_list_of_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(record, dict) for record in value)


def _rows(columns: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The records of a table that is given by its columns, None where they are no lists of one length."""
    lengths = {len(column) if isinstance(column, list) else None for column in columns.values()}
    if len(lengths) != 1 or None in lengths:
        return None
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _read_csv(source: str, path: str) -> list[Record]:
    previous = csv.field_size_limit(CSV_FIELD_LIMIT)
    try:
        with _open_text(path, newline="") as file:
            return list(_parse_csv(source, csv.DictReader(file, strict=True)))
    finally:
        csv.field_size_limit(previous)


def _parse_csv(source: str, reader: csv.DictReader[str]) -> Iterator[Record]:
    try:
        for record in reader:
            if None in record:
                raise SltaError(
                    f"Line {reader.line_num} of calibration file {source!r} has more fields than its first line names."
                )
            yield record
    except csv.Error as error:
        raise SltaError(
            f"Line {reader.reader.line_num} of calibration file {source!r} is broken CSV ({error})."
        ) from error


def _read_parquet(source: str, path: str) -> list[Record]:
    import pyarrow.parquet  # comes with datasets; slow to import

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise SltaError(f"Calibration file {source!r} is broken Parquet ({_one_line(error)}).") from error


def _read_txt(source: str, path: str) -> list[Record]:
    with _open_text(path) as file:
        return [{"text": line.rstrip("\n")} for line in file if line.strip()]


def _open_text(path: str, newline: str | None = None) -> Any:
    return open(path, encoding="utf-8-sig", newline=newline)  # spreadsheets write a byte order mark


READERS: dict[str, Callable[[str, str], Sequence[Record]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


class _Dataset(NamedTuple):
    """The parts of ``hf:NAME[?config=...&split=...]``."""

    name: str
    config: str | None = None
    split: str | None = None


def _parse_dataset(source: str) -> _Dataset:
    name, _, query = source.removeprefix(DATASET_PREFIX).partition("?")
    settings: dict[str, str] = {}
    # Not urllib's parser: a split may hold a plus sign, which that one reads as a space.
    for setting in query.split("&") if query else ():
        key, _, value = setting.partition("=")
        if key not in ("config", "split") or key in settings or not value:
            raise SltaError(
                f"Calibration source {source!r}: cannot use {setting!r}; "
                "after the '?' may stand config=NAME and split=NAME, joined by '&'."
            )
        settings[key] = value
    if not name:
        raise SltaError(f"Calibration source {source!r} names no dataset: write '{DATASET_PREFIX}DATASET'.")
    return _Dataset(name, **settings)


def _read_dataset(source: str) -> Sequence[Record]:
    dataset = _parse_dataset(source)
    name = os.path.expanduser(dataset.name)
    is_path = dataset.name.startswith((".", "~")) or os.path.isabs(name)
    if is_path and not os.path.isdir(name):
        raise SltaError(f"Calibration source {source!r}: there is no folder {dataset.name!r}.")
    try:
        loaded = _load_dataset(name, dataset)
    except Exception as error:  # datasets raises what its readers and the Hub raise, without a common base
        raise SltaError(f"Calibration source {source!r} cannot be read ({_one_line(error)}).") from error
    return _choose_split(source, loaded, dataset.split) if isinstance(loaded, dict) else loaded


def _load_dataset(name: str, dataset: _Dataset) -> Any:
    """One split where the source names it, else all of them by name."""
    import datasets  # slow to import

    if not _was_saved_to_disk(name):
        return datasets.load_dataset(name, dataset.config, split=dataset.split)
    if dataset.config:
        raise ValueError("a folder that save_to_disk wrote has no configurations")
    loaded = datasets.load_from_disk(name)
    return loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}


def _was_saved_to_disk(name: str) -> bool:
    import datasets

    markers = (datasets.config.DATASET_STATE_JSON_FILENAME, datasets.config.DATASETDICT_JSON_FILENAME)
    return any(os.path.isfile(os.path.join(name, marker)) for marker in markers)


def _choose_split(source: str, splits: Mapping[str, Any], split: str | None) -> Any:
    if split is None:
        split = "train" if len(splits) > 1 else next(iter(splits))
    if split not in splits:
        raise SltaError(
            f"Calibration source {source!r} has no split {split!r}: choose one with '?split=', from {_listed(splits)}."
        )
    return splits[split]


def _is_folder(name: str) -> bool:
    return os.path.isdir(os.path.expanduser(name))


def _real_path(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "none"


def _one_line(error: BaseException) -> str:
    """An error in one line, with the cause where its own text does not tell it."""
    text = " ".join(str(error).split()).rstrip(".")
    cause = " ".join(str(error.__cause__ or "").split()).rstrip(".")
    return f"{type(error).__name__}: {text}" + (f"; {cause}" if cause and cause not in text else "")
