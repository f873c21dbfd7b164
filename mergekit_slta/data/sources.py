"""Calibration sources: read the records of the file or dataset that a recipe names.

Local files are read whole. Data that do not fit into memory come through ``datasets``, as ``hf:FOLDER`` too.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TextIO

from mergekit_slta.data.records import Record, joined, rows
from mergekit_slta.errors import SltaError, one_line
from mergekit_slta.files import published_path

DATASET_PREFIX = "hf:"
# The csv module refuses fields over 128 KiB by default, which a document may well have.
CSV_FIELD_LIMIT = 2**31 - 1


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
    """Raise an SltaError if a file cannot be read or a dataset's name is wrong; datasets are not downloaded."""
    if is_dataset(source):
        _find_dataset(source)
    else:
        read_records(source)


def source_key(source: str) -> tuple[str, ...]:
    """Identify a calibration source: the key is equal for two spellings of the same file or dataset.

    Raises:
        SltaError: the query of a dataset is malformed.
    """
    if not is_dataset(source):
        return ("file", os.path.realpath(os.path.expanduser(source)))
    dataset = _parse_dataset(source)
    name = os.path.realpath(dataset.folder) if os.path.isdir(dataset.folder) else dataset.name.lower()
    return ("dataset", name, dataset.config or "default", dataset.split or "train")


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
            f"Calibration source {source!r} has an unknown extension: it must be {joined(READERS)}, "
            f"or '{DATASET_PREFIX}DATASET' for a dataset."
        )
    if not os.path.exists(path):
        raise SltaError(f"Calibration file {source!r} does not exist (the current directory is {os.getcwd()!r}).")
    try:
        return READERS[extension](path)
    except UnicodeDecodeError as error:
        raise SltaError(f"Calibration file {source!r} is not UTF-8 text: save it as UTF-8.") from error
    except _BrokenFile as error:
        raise SltaError(f"Calibration file {source!r} {error}.") from error
    except OSError as error:
        raise SltaError(
            f"Calibration file {source!r} cannot be read ({one_line(error)}): check its permissions and its disk."
        ) from error


class _BrokenFile(Exception):
    """A file cannot be parsed; the text completes a sentence that begins with the file's name."""


def _read_json_lines(path: str) -> list[Record]:
    with _open_text(path, newline="\n") as file:
        return _parse_json_lines(file)


def _parse_json_lines(lines: Iterable[str]) -> list[Record]:
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # broken, or a number of thousands of digits, or brackets
                raise _BrokenFile(f"has broken JSON in line {number} ({one_line(error)})") from error
            if not isinstance(record, dict):
                raise _BrokenFile(f"has no JSON object in line {number}")
            records.append(record)
    return records


def _read_text(path: str) -> list[Record]:
    with _open_text(path) as file:
        return [{"text": line.rstrip("\n")} for line in file if line.strip()]


def _read_csv(path: str) -> list[Record]:
    records: list[Record] = []
    previous = csv.field_size_limit(CSV_FIELD_LIMIT)
    with _open_text(path, newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for record in reader:
                if None in record:
                    raise csv.Error("more fields than the first line names")
                records.append(record)
        except csv.Error as error:
            raise _BrokenFile(f"has broken CSV in line {reader.reader.line_num} ({error})") from error
        finally:
            csv.field_size_limit(previous)
    return records


def _read_json(path: str) -> list[Record]:
    with _open_text(path) as file:
        text = file.read()
    if not text.strip():
        return []
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines are often named .json
            return _parse_json_lines(text.split("\n"))
        raise _BrokenFile(f"has broken JSON in line {error.lineno} ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise _BrokenFile(f"has broken JSON ({one_line(error)})") from error
    if isinstance(content, dict):
        data = content.get("data")
        content = data if _is_list_of_records(data) else rows(content)
    if not _is_list_of_records(content):
        raise _BrokenFile(
            "must hold a list of records, an object with that list under 'data', or an object with one list per field, "
            "all of one length"
        )
    return content


def _is_list_of_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(record, dict) for record in value)


def _read_parquet(path: str) -> list[Record]:
    import pyarrow.parquet  # comes with datasets; slow to import

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise _BrokenFile(f"is broken Parquet ({one_line(error)})") from error


def _open_text(path: str, newline: str | None = None) -> TextIO:
    return open(path, encoding="utf-8-sig", newline=newline)


READERS: dict[str, Callable[[str], list[Record]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}


class _Dataset(NamedTuple):
    """The parts of ``hf:NAME[?config=...&split=...]``; the name may be the path of a folder."""

    name: str
    config: str | None = None
    split: str | None = None

    @property
    def folder(self) -> str:
        return os.path.expanduser(self.name)


def _parse_dataset(source: str) -> _Dataset:
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
    return _Dataset(name, **settings)


def _find_dataset(source: str) -> _Dataset:
    """Parse a dataset's source; a name that can only be a path must be an existing folder."""
    dataset = _parse_dataset(source)
    is_path = dataset.name.startswith((".", "~")) or os.path.isabs(dataset.name)
    if is_path and not os.path.isdir(dataset.folder):
        raise SltaError(f"Calibration source {source!r}: there is no folder {dataset.name!r}, correct the path.")
    return dataset


def _read_dataset(source: str) -> Sequence[Record]:
    dataset = _find_dataset(source)
    try:
        loaded = _load_dataset(dataset)
    except Exception as error:  # datasets lets the errors of its readers and of the Hub pass
        raise SltaError(f"Calibration source {source!r} cannot be read ({one_line(error)}).") from error
    if not isinstance(loaded, dict):
        return loaded
    split = dataset.split or ("train" if len(loaded) > 1 else next(iter(loaded)))
    if split not in loaded:
        raise SltaError(
            f"Calibration source {source!r} has no split {split!r}: choose one with '?split=', from {joined(loaded)}."
        )
    return loaded[split]


def _load_dataset(dataset: _Dataset) -> Any:
    """The split that the source names, or all splits by name."""
    import datasets  # slow to import

    saved = (datasets.config.DATASET_STATE_JSON_FILENAME, datasets.config.DATASETDICT_JSON_FILENAME)
    if not any(os.path.isfile(os.path.join(dataset.folder, file)) for file in saved):
        return datasets.load_dataset(dataset.folder, dataset.config, split=dataset.split)
    if dataset.config:
        raise ValueError("a folder that save_to_disk wrote has no configurations")
    loaded = datasets.load_from_disk(dataset.folder)
    return loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
