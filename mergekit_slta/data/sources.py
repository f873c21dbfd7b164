"""Calibration sources: read the records of the file or dataset that a recipe names.

Local files are read whole; data that do not fit into memory can be read as ``hf:FOLDER``. CSV and JSON are not left to
``datasets``, which turns text into dates and numbers, adds fields, and drops one where the first row has too many.
"""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    if extension not in READERS:
        raise SltaError(
            f"Calibration source {source!r} has no known extension: it must be {in_a_list(READERS)}; "
            f"write '{DATASET_PREFIX}{source}' if it is a dataset or a folder."
        )
    if not os.path.exists(path):
        raise SltaError(f"Calibration file {source!r} does not exist (the current directory is {os.getcwd()!r}).")
    with reading(f"Calibration file {source!r}", fix="write it anew, its text as UTF-8"):
        return READERS[extension](path)


def _text(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8-sig")


def _read_json(path: str) -> list[Record]:
    text = _text(path)
    if text.lstrip().startswith("["):
        records = json.loads(text)
    else:
        records = [_json_in(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("it must hold JSON objects: one per line, or a list of them")
    return records


def _json_in(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON object in line {number}: {getattr(error, 'msg', error)}") from error


def _read_text(path: str) -> list[Record]:
    return [{"text": line} for line in _text(path).split("\n") if line.strip()]


def _read_csv(path: str) -> list[Record]:
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB, and a document may be longer
    with open(path, encoding="utf-8-sig", newline="") as file:
        records: list[Record] = [*csv.DictReader(file, strict=True)]
    if more := next((number for number, record in enumerate(records, 1) if None in record), None):
        raise ValueError(f"record {more} has more fields, separated by commas, than the first line names")
    return records


def _read_parquet(path: str) -> list[Record]:
    import datasets  # slow to import

    # Streaming leaves no copy of the file in the user's cache.
    stream = partial(datasets.load_dataset, "parquet", data_files=glob.escape(path), split="train", streaming=True)
    return list(stream(columns=_text_columns(stream().features)))


READERS: dict[str, Callable[[str], list[Record]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}


def parse_dataset(source: str) -> tuple[str, str | None, str | None]:
    """The name, configuration and split in ``hf:NAME[?config=...&split=...]``; the name may be a folder's path."""
    name, _, query = source.removeprefix(DATASET_PREFIX).partition("?")
    # urllib's parser would read the plus sign that a split may hold as a space.
    pairs = [setting.partition("=")[::2] for setting in query.split("&") if query]
    settings = dict(pairs)
    valid = len(settings) == len(pairs) and settings.keys() <= {"config", "split"} and all(settings.values())
    if not name or not valid:
        raise SltaError(
            f"Calibration source {source!r} must be '{DATASET_PREFIX}DATASET', alone or followed by '?config=NAME', "
            "'?split=NAME' or '?config=NAME&split=NAME'."
        )
    return os.path.expanduser(name), settings.get("config"), settings.get("split")


def _saved_files(folder: Path) -> dict[str, str]:
    """The files of each split in a folder that ``save_to_disk`` wrote; none in another folder."""
    splits = {"train": folder} if (folder / "state.json").is_file() else {}
    if (listing := folder / "dataset_dict.json").is_file():
        splits = {split: folder / split for split in json.loads(_text(listing))["splits"]}
    return {split: f"{glob.escape(str(part))}/*.arrow" for split, part in splits.items()}


def _text_columns(features: Mapping[str, Any]) -> list[str]:
    """The columns without pictures, sound and the like, which take further libraries and memory to decode."""
    return [name for name, kind in features.items() if "decode=True" not in repr(kind).replace("Json(decode=True)", "")]


def _read_dataset(source: str) -> Sequence[Record]:
    import datasets  # slow to import

    name, config, split = parse_dataset(source)
    try:
        files = _saved_files(Path(name))
        loaded = datasets.load_dataset("arrow" if files else name, config, data_files=files or None, split=split)
    except Exception as error:  # datasets lets the errors of its readers and of the Hub pass
        raise SltaError(f"Calibration source {source!r} cannot be read ({one_line(error)}).") from error
    if not split:
        split = "train" if len(loaded) > 1 else next(iter(loaded))
        if split not in loaded:
            raise SltaError(
                f"Calibration source {source!r} has several splits: choose with '?split=' from {in_a_list(loaded)}."
            )
        loaded = loaded[split]
    return loaded.select_columns(_text_columns(loaded.features))
