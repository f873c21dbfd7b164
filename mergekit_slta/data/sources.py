"""Calibration sources: read the records of the file or dataset that a recipe names.

Local files are read whole. Data that do not fit into memory come through ``datasets``, as ``hf:FOLDER`` too.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mergekit_slta.data.records import Record, in_a_list
from mergekit_slta.errors import SltaError, one_line, reading
from mergekit_slta.files import published_path

DATASET_PREFIX = "hf:"


def is_dataset(source: str) -> bool:
    """Whether a source is a dataset, which may have to be downloaded, rather than a file."""
    return source.startswith(DATASET_PREFIX)


def read_records(source: str) -> Sequence[Record]:
    """Read the records of a calibration source, in its order; a dataset reads each record when it is used.

    Args:
        source: a ``.jsonl``, ``.json``, ``.csv``, ``.parquet`` or ``.txt`` file (relative to the current directory), or
            ``hf:DATASET[?config=...&split=...]``, where DATASET is a dataset repository or a local folder.

    Raises:
        SltaError: the source is missing, broken, empty or of an unknown kind.
    """
    records = _read_dataset(source) if is_dataset(source) else _read_file(source)
    if not len(records):
        raise SltaError(f"Calibration source {source!r} has no records: add some, or name another source.")
    return records


def check_source(source: str) -> None:
    """Raise an SltaError if a file cannot be read or a dataset's query is malformed; the Hub is not asked."""
    if is_dataset(source):
        parse_dataset(source)
    else:
        read_records(source)


def source_key(source: str) -> tuple[str, ...]:
    """Identify a calibration source: the key is equal for two spellings of the same file or dataset.

    Raises:
        SltaError: the query of a dataset is malformed.
    """
    if not is_dataset(source):
        return ("file", os.path.realpath(os.path.expanduser(source)))
    name, config, split = parse_dataset(source)
    name = os.path.realpath(name) if os.path.isdir(name) else name.lower()
    return ("dataset", name, config or "default", split or "train")


def source_name(source: str) -> str:
    """A source's name for published files: the recipe's spelling, but only the last part of an absolute path."""
    if not is_dataset(source):
        return published_path(source)
    name, mark, query = source.removeprefix(DATASET_PREFIX).partition("?")
    return DATASET_PREFIX + published_path(name) + mark + query


def _read_file(source: str) -> Sequence[Record]:
    path = os.path.expanduser(source)
    extension = os.path.splitext(path)[1].lower()
    if os.path.isdir(path):
        raise SltaError(f"Calibration source {source!r} is a folder: write '{DATASET_PREFIX}{source}' for a dataset.")
    if extension not in READERS:
        raise SltaError(
            f"Calibration source {source!r} has {'an unknown' if extension else 'no'} extension: it must be "
            f"{in_a_list(READERS)}, or '{DATASET_PREFIX}{'DATASET' if extension else source}' for a dataset."
        )
    if not os.path.exists(path):
        raise SltaError(f"Calibration file {source!r} does not exist (the current directory is {os.getcwd()!r}).")
    with reading(f"Calibration file {source!r}", fix="write it anew, its text as UTF-8"):
        return READERS[extension](path)


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8-sig")


def _read_json_lines(path: str) -> list[Record]:
    records: list[Record] = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"broken JSON in line {number}, column {error.colno}: {error.msg}") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"broken JSON in line {number}: {error}") from error
    return _require_records(records)


def _require_records(content: Any) -> list[Record]:
    if not isinstance(content, list) or not all(isinstance(record, dict) for record in content):
        raise ValueError("it must hold JSON objects: one per line, or a list of them, also under 'data'")
    return content


def _read_text(path: str) -> list[Record]:
    return [{"text": line} for line in _text(path).split("\n") if line.strip()]


def _read_csv(path: str) -> list[Record]:
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB, and a document may be longer
    records: list[Record] = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for record in reader:
                if len(record) == 1 and ";" in next(iter(record)):
                    raise csv.Error("its fields are separated by semicolons, not by commas")
                if None in record:
                    raise csv.Error("more fields than the first line names")
                records.append(record)
        except csv.Error as error:
            raise ValueError(f"broken CSV in line {reader.reader.line_num}: {error}") from error
    return records


def _read_json(path: str) -> list[Record]:
    try:
        content = json.loads(_text(path))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines are often named .json
            return _read_json_lines(path)
        raise
    return _require_records(content.get("data") if isinstance(content, dict) else content)


def _read_parquet(path: str) -> list[Record]:
    import pyarrow.parquet  # comes with datasets; slow to import

    return list(pyarrow.parquet.read_table(path).to_pylist())


READERS: dict[str, Callable[[str], list[Record]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}


def parse_dataset(source: str) -> tuple[str, str | None, str | None]:
    """The name, configuration and split in ``hf:NAME[?config=...&split=...]``; the name may be a folder's path."""
    name, _, query = source.removeprefix(DATASET_PREFIX).partition("?")
    settings: dict[str, str] = {}
    # urllib's parser would read the plus sign that a split may hold as a space.
    for setting in query.split("&") if query else ():
        key, _, value = setting.partition("=")
        if key not in ("config", "split") or key in settings or not value:
            raise SltaError(
                f"Calibration source {source!r}: cannot use {setting!r}; "
                "after the '?' write config=NAME or split=NAME, or both joined by '&'."
            )
        settings[key] = value
    if not name:
        raise SltaError(f"Calibration source {source!r} names no dataset: write '{DATASET_PREFIX}DATASET'.")
    return os.path.expanduser(name), settings.get("config"), settings.get("split")


def _read_dataset(source: str) -> Sequence[Record]:
    import datasets  # slow to import

    name, config, split = parse_dataset(source)
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets lets the errors of its readers and of the Hub pass
        raise SltaError(f"Calibration source {source!r} cannot be read ({one_line(error)}).") from error
    if split:
        return loaded
    chosen = "train" if len(loaded) > 1 else next(iter(loaded))
    if chosen not in loaded:
        raise SltaError(
            f"Calibration source {source!r} has several splits: choose one with '?split=', from {', '.join(loaded)}."
        )
    return loaded[chosen]
