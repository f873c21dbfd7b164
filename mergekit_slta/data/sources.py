"""Calibration sources: read the records of the file or dataset that a recipe names.

What can be read by parts is: of ``.jsonl``, ``.csv`` and ``.txt`` files only the places of the records are kept, of
``.parquet`` files one group of rows at a time. A ``.json`` file is one value, which is read whole.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TextIO

from mergekit_slta.data.records import Record, joined, rows
from mergekit_slta.errors import SltaError, one_line
from mergekit_slta.files import published_path

DATASET_PREFIX = "hf:"
# The csv module refuses fields over 128 KiB by default, which a document may well have.
CSV_FIELD_LIMIT = 2**31 - 1
BYTE_ORDER_MARK = "\ufeff"  # spreadsheets write it at the beginning of a file


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


@dataclass(frozen=True)
class Place:
    """Names a record in error messages: by its line in a ``.jsonl`` file, else by its number.

    The file is searched for the line only when the message is written.
    """

    source: str
    index: int

    def __str__(self) -> str:
        if is_dataset(self.source) or not self.source.lower().endswith(".jsonl"):
            return f"Record {self.index + 1} of calibration source {self.source!r}"
        with _open_text(os.path.expanduser(self.source)) as file:
            lines = [number for number, line in enumerate(file, 1) if line.strip()]
        return f"Line {lines[self.index]} of calibration file {self.source!r}"


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


class _TextFile(Sequence[Record]):
    """The records of a text file; each is read when it is used, so that memory does not grow with the file.

    Args:
        parse: yields the records of lines.
        newline: what ends a line, as ``open`` takes it.
        head: takes from a file's lines those that ``parse`` needs before the lines of any record.
    """

    def __init__(
        self,
        path: str,
        parse: Callable[[Iterable[str]], Iterator[Record]],
        newline: str = "",
        head: Callable[[Iterable[str]], list[str]] = lambda lines: [],
    ) -> None:
        self._path, self._parse, self._newline = path, parse, newline
        self._changed = os.stat(path).st_mtime_ns
        self._starts = array("q")
        with self._open() as file:
            lines = _Lines(file)
            self._head = head(lines)
            start = lines.place
        with self._open() as file:
            lines = _Lines(file)
            for _ in parse(lines):
                self._starts.append(start)
                start = lines.place

    def _open(self) -> TextIO:
        return open(self._path, encoding="utf-8", newline=self._newline)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        start = self._starts[index]
        with suppress(OSError, UnicodeDecodeError, StopIteration, _BrokenFile):
            if os.stat(self._path).st_mtime_ns == self._changed:
                with self._open() as file:
                    file.seek(start)
                    return next(self._parse(itertools.chain(self._head, _Lines(file, start))))
        raise SltaError(f"Calibration file {self._path!r} has changed since its records were counted: run it again.")


class _Lines:
    """The lines of an open UTF-8 file from a place on, in bytes, without a byte order mark at its beginning."""

    def __init__(self, file: TextIO, place: int = 0) -> None:
        self._file = file
        self.place = place

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            first = self.place == 0
            self.place += len(line) if line.isascii() else len(line.encode())
            yield line.removeprefix(BYTE_ORDER_MARK) if first else line


def _parse_json_lines(lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line.removeprefix(BYTE_ORDER_MARK))  # of a file that was appended to another
            except json.JSONDecodeError as error:
                raise _BrokenFile(f"has broken JSON in line {number} ({error.msg})") from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
                raise _BrokenFile(f"cannot be read in line {number} ({one_line(error)})") from error
            if not isinstance(record, dict):
                raise _BrokenFile(f"has no JSON object in line {number}")
            yield record


def _parse_text(lines: Iterable[str]) -> Iterator[Record]:
    return ({"text": line.rstrip("\r\n")} for line in lines if line.strip())


def _parse_csv(lines: Iterable[str]) -> Iterator[Record]:
    reader = csv.DictReader(lines, strict=True)
    try:
        while True:
            with _long_fields():  # not while the record is used
                record = next(reader, None)
            if record is None:
                return
            if None in record:
                raise csv.Error("more fields than the first line names")
            yield record
    except csv.Error as error:
        raise _BrokenFile(f"has broken CSV in line {reader.reader.line_num} ({error})") from error


def _csv_head(lines: Iterable[str]) -> list[str]:
    """The lines of the names of the fields, which may hold line breaks in quotes."""
    taken = []

    def taking() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    with _long_fields(), suppress(csv.Error):  # it is said when the records are parsed
        next(csv.reader(taking(), strict=True), None)
    return taken


@contextmanager
def _long_fields() -> Iterator[None]:
    previous = csv.field_size_limit(CSV_FIELD_LIMIT)
    try:
        yield
    finally:
        csv.field_size_limit(previous)


def _read_json(path: str) -> list[Record]:
    with _open_text(path) as file:
        text = file.read()
    if not text.strip():
        return []
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines are often named .json
            return list(_parse_json_lines(text.split("\n")))
        raise _BrokenFile(f"has broken JSON in line {error.lineno} ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise _BrokenFile(f"cannot be read ({one_line(error)})") from error
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


class _Parquet(Sequence[Record]):
    """The records of a Parquet file, of which one group of rows at a time is in memory."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet  # comes with datasets; slow to import

        try:
            self._file = pyarrow.parquet.ParquetFile(path)
            metadata = self._file.metadata
            groups = range(metadata.num_row_groups)
            self._ends = list(itertools.accumulate(metadata.row_group(group).num_rows for group in groups))
            self._group = lru_cache(maxsize=1)(self._file.read_row_group)
            for group in groups:
                self._group(group)  # a broken one is found before any work
        except (pyarrow.ArrowException, OSError) as error:
            raise _BrokenFile(f"is broken Parquet ({one_line(error)})") from error

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        group = bisect.bisect_right(self._ends, index)
        begin = self._ends[group - 1] if group else 0
        return self._group(group).slice(index - begin, 1).to_pylist()[0]


def _open_text(path: str) -> TextIO:
    return open(path, encoding="utf-8-sig")


READERS: dict[str, Callable[[str], Sequence[Record]]] = {
    ".jsonl": partial(_TextFile, parse=_parse_json_lines, newline="\n"),
    ".json": _read_json,
    ".csv": partial(_TextFile, parse=_parse_csv, head=_csv_head),
    ".parquet": _Parquet,
    ".txt": partial(_TextFile, parse=_parse_text),
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
