"""Calibration sources: what each format becomes, what a source is called, and how problems are worded."""

import csv
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.calibration_samples import load, refused, with_special, write_jsonl
from transformers import PreTrainedTokenizerBase

from mergekit_slta.data.sources import check_source, read_records, source_key, source_name

pytestmark = pytest.mark.usefixtures("dataset_cache")

RECORDS = [{"question": f"what is {n}?", "answer": f"it is {n}, \nno doubt"} for n in range(12)]


def write_csv(path: Path, rows: list[dict[str, str]] = RECORDS) -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_folder(path: Path) -> None:
    path.mkdir()
    write_jsonl(path / "train.jsonl", RECORDS)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "records.jsonl": lambda path: write_jsonl(path, RECORDS),
    "blank_lines.jsonl": lambda path: path.write_text("\n \n".join(json.dumps(record) for record in RECORDS)),
    "list.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "data.json": lambda path: path.write_text(json.dumps({"version": 1, "data": RECORDS})),
    "lines.json": lambda path: write_jsonl(path, RECORDS),
    "table.csv": write_csv,
    "table.parquet": lambda path: datasets.Dataset.from_list(RECORDS).to_parquet(str(path)),
    "hf:folder": write_folder,
}


@pytest.mark.parametrize("source", WRITERS)
def test_every_format_gives_the_same_records(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths start there
    path = source.removeprefix("hf:")
    WRITERS[source](tmp_path / path)
    assert list(read_records(source)) == RECORDS
    absolute = source.replace(path, str(tmp_path / path))
    assert list(read_records(absolute)) == RECORDS
    drawn = load(source, plain_tokenizer)
    expected = [RECORDS[index] for index in random.Random(0).sample(range(12), 12)[:4]]
    assert drawn.token_ids == tuple(with_special(f"{r['question']}\n{r['answer']}") for r in expected)


def test_text_file_is_one_sample_per_line_without_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("one\r\n\n  two\x0b\u2028still two \n \t\nthree".encode())
    assert list(read_records(str(path))) == [{"text": "one"}, {"text": "  two\x0b\u2028still two "}, {"text": "three"}]


BROKEN_FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty.jsonl": (b"", ["has no records"]),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text": \n', ["broken JSON in line 3, column 10: Expecting value"]),
    "excel.csv": (b"question;answer\n1+1;2\n", ["separated by semicolons"]),
    "deep.jsonl": (b'{"text": "a"}\n{"text": ' + b"[" * 100_000, ["broken JSON in line 2"]),
    "list.jsonl": (b'{"text": "a"}\n["b"]\n', ["must hold JSON objects"]),
    "broken.json": (b'[{"text": "a"},\n{"text": }]', ["line 2"]),
    "wide.csv": (b"a,b\n1,2\n1,2,3\n", ["line 3", "more fields"]),
    "quote.csv": (b'text\n"never closed\n', ["broken CSV in line 2"]),
    "latin.txt": ("café".encode("latin-1"), ["UTF-8"]),
    "broken.parquet": (b"not parquet at all", ["cannot be read"]),
    "table.tsv": (b"a\tb\n", ["extension", ".csv, ", ".json, ", ".jsonl, ", ".parquet, ", ".txt", "hf:DATASET"]),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_files_are_named(name: str, tmp_path: Path) -> None:
    content, said = BROKEN_FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refused(read_records, str(tmp_path / name))
    for words in (str(tmp_path / name), *said):
        assert words in message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("missing.jsonl", ["does not exist"]),
        ("org/dataset", ["has no extension", "hf:org/dataset"]),
        ("hf:", ["names no dataset"]),
        ("hf:folder?revision=main", ["revision=main", "config=NAME", "split=NAME"]),
        ("hf:folder?split=", ["'split='"]),
        ("folder", ["is a folder", "hf:folder"]),
        ("hf:folder?split=nope", ["nope", "train"]),
        ("hf:folder?config=nope", ["nope"]),
        ("hf:saved", ["load_from_disk"]),
        ("hf:scripted", ["scripts are no longer supported"]),
    ],
)
def test_sources_that_cannot_be_read_are_named(
    source: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "folder")
    datasets.Dataset.from_list(RECORDS).save_to_disk("saved")
    write_folder(tmp_path / "scripted")
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit('a data set has run its own code')")
    message = refused(read_records, source)
    for words in (repr(source), *said):
        assert words in message


def test_a_check_finds_what_is_wrong_without_reading_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text("{")
    check_source(f"hf:{tmp_path}/folder")
    check_source("hf:org/data?config=main&split=train[:5]")
    for source in (f"{tmp_path}/folder/train.jsonl", f"{tmp_path}/folder", "hf:", "hf:folder?split="):
        assert refused(check_source, source) == refused(read_records, source)


def test_unreachable_dataset_repository_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach\n'org/data' on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert "'hf:org/data'" in refused(read_records, "hf:org/data")


def write_splits(folder: Path, **splits: int) -> None:
    """Each split holds as many records as given, and tells its name in them."""
    folder.mkdir(parents=True)
    for split, count in splits.items():
        write_jsonl(folder / f"{split}.jsonl", [{"text": f"{split} {n}"} for n in range(count)])


@pytest.mark.parametrize(
    ("splits", "query", "expected"),
    [
        ({"train": 2, "test": 1}, "", ["train 0", "train 1"]),
        ({"train": 2, "test": 1}, "?split=test", ["test 0"]),
        ({"train": 2, "test": 1}, "?split=train[1:]", ["train 1"]),
        ({"train": 2, "test": 1}, "?split=train+test", ["train 0", "train 1", "test 0"]),
        ({"test": 1}, "", ["test 0"]),
    ],
)
def test_splits_of_a_dataset_folder(splits: dict[str, int], query: str, expected: list[str], tmp_path: Path) -> None:
    write_splits(tmp_path / "folder", **splits)
    records = read_records(f"hf:{tmp_path / 'folder'}{query}")
    assert [record["text"] for record in records] == expected


def test_several_splits_without_train_need_a_choice(tmp_path: Path) -> None:
    write_splits(tmp_path / "folder", test=1, validation=1)
    source = f"hf:{tmp_path / 'folder'}"
    message = refused(read_records, source)
    assert source in message
    assert "test" in message and "validation" in message and "?split=" in message


def test_configurations_of_a_dataset_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_splits(folder / "red", train=1, test=1)
    write_splits(folder / "blue", train=2)
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("red", "blue"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    records = read_records(f"hf:{folder}?split=test&config=red")
    assert [record["text"] for record in records] == ["test 0"]
    message = refused(read_records, f"hf:{folder}")
    assert "red" in message and "blue" in message


# Names


def test_source_key_sees_through_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    write_folder(tmp_path / "folder")
    os.symlink("a.jsonl", "link.jsonl")
    files = ["a.jsonl", "./a.jsonl", "folder/../a.jsonl", "~/a.jsonl", "link.jsonl", str(tmp_path / "a.jsonl")]
    assert len({source_key(source) for source in files}) == 1
    folders = ["hf:folder", "hf:./folder/?split=train", "hf:~/folder?config=default", f"hf:{tmp_path / 'folder'}"]
    assert len({source_key(source) for source in folders}) == 1
    repositories = ["hf:Org/Data?config=c&split=train", "hf:org/data?split=train&config=c", "hf:org/data?config=c"]
    assert len({source_key(source) for source in repositories}) == 1
    others = ["a.jsonl", "b.jsonl", "folder", "hf:folder", "hf:folder?split=test", "hf:folder?config=c", "hf:org/data"]
    assert len({source_key(source) for source in others}) == len(others)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/math.jsonl", "data/math.jsonl"),
        ("/home/alice/math.jsonl", "math.jsonl"),
        ("~/private/math.jsonl", "math.jsonl"),
        ("hf:org/data?config=a&split=b", "hf:org/data?config=a&split=b"),
        ("hf:./folder", "hf:./folder"),
        ("hf:/home/alice/folder?split=train", "hf:folder?split=train"),
        ("hf:~/folder?config=a", "hf:folder?config=a"),
    ],
)
def test_source_name_has_no_path_of_this_machine(source: str, name: str) -> None:
    assert source_name(source) == name
