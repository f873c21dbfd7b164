"""Calibration sources: what each format becomes, what a source is called, and how problems are worded."""

import gzip
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

from mergekit_slta.data.sources import read_records, source_key

pytestmark = pytest.mark.usefixtures("dataset_cache", "here")

BOM = "\ufeff"
RECORDS = [{"question": f"what is {n}?", "answer": f"it is {n}, \nno doubt"} for n in range(12)]
ROWS = [{"question": "question", "answer": "answer"}, *RECORDS]


def write_folder(path: Path) -> None:
    path.mkdir()
    write_jsonl(path / "train.jsonl", RECORDS)


def packed(path: Path) -> None:
    WRITERS[path.stem](path)
    path.write_bytes(gzip.compress(path.read_bytes()))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "records.jsonl": lambda path: write_jsonl(path, RECORDS),
    "blank_lines.jsonl": lambda path: path.write_text(BOM + "\n \n".join(map(json.dumps, RECORDS))),
    "list.json": lambda path: path.write_text(BOM + json.dumps(RECORDS, indent=1)),
    "lines.json": lambda path: write_jsonl(path, RECORDS),
    "table.csv": lambda path: path.write_text(BOM + "\n".join(f'{r["question"]},"{r["answer"]}"' for r in ROWS)),
    "table[1]*.parquet": lambda path: datasets.Dataset.from_list(RECORDS).to_parquet(str(path)),
    **dict.fromkeys(("records.jsonl.gz", "list.json.gz", "table.csv.gz"), packed),
    "packed.jsonl": lambda path: path.write_bytes(gzip.compress(b"\n".join(json.dumps(r).encode() for r in RECORDS))),
    "hf:folder": write_folder,
    "hf:saved[1]": lambda path: datasets.Dataset.from_list(RECORDS).save_to_disk(path, num_shards=2),
}


@pytest.mark.parametrize("source", WRITERS)
def test_every_format_gives_the_same_records(source: str, plain_tokenizer: PreTrainedTokenizerBase) -> None:
    path = Path(source.removeprefix("hf:"))
    WRITERS[source](path)
    for spelling in (source, source.replace(str(path), str(path.absolute()))):
        assert list(read_records(spelling)) == RECORDS
    drawn = load(source, plain_tokenizer)
    expected = [RECORDS[index] for index in random.Random(0).sample(range(12), 12)[:4]]
    assert drawn.token_ids == tuple(with_special(f"{r['question']}\n{r['answer']}") for r in expected)


CSV = [("007", "1.0"), ("2020-01-01", "true"), ("NA", "null"), ("", "nan"), (' 1"', "x\r\ny"), (200_000 * "x", "")]
CSV_TEXT = f'a,b\n007,1.0\n2020-01-01,true\nNA,null\n,nan\n" 1""","x\r\ny"\r\n{200_000 * "x"},\n'
MISSING = '{"a": NaN, "b": [Infinity, 1.5]}'  # as pandas and Python write them, and no other program
MIXED = [{"a": "2020-01-01", "b": 1}, {"a": [{"q": "x"}, "y"]}, {"c": {"d": 1.0}}]
LINES = [{"text": "one"}, {"text": "  two\x0b\u2028still two "}, {"text": "three"}]


@pytest.mark.parametrize(
    ("name", "content", "records"),
    [
        ("a.csv", CSV_TEXT, [{"a": a, "b": b} for a, b in CSV]),
        ("a.json", json.dumps(MIXED), MIXED),
        ("a.json", f"[{MISSING}]", [{"a": None, "b": [None, 1.5]}]),
        ("a.json", '{\n "a": "x"\n}\n{\n "a": 1\n}\n', [{"a": "x"}, {"a": 1}]),
        ("a.jsonl", MISSING, [{"a": None, "b": [None, 1.5]}]),
        ("a.txt", f"{BOM}one\r\n\n  two\x0b\u2028still two \n \t\nthree", LINES),
    ],
)
def test_values_stay_as_they_are_written(name: str, content: str, records: list[Any]) -> None:
    Path(name).write_bytes(content.encode())
    assert read_records(name) == records


def test_a_parquet_file_that_changed_is_read_anew_without_a_copy() -> None:
    for text in ("first", "other"):
        datasets.Dataset.from_list([{"text": text}]).to_parquet("a.parquet")
        os.utime("a.parquet", (0, 0))
        assert read_records("a.parquet") == [{"text": text}]
    assert not [*Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")]


@pytest.mark.parametrize("source", ["folder/train.parquet", "hf:folder", "hf:saved"])
def test_media_are_left_out_undecoded(source: str, caplog: pytest.LogCaptureFixture) -> None:
    broken = {"bytes": b"neither sound nor picture", "path": "a"}
    chat = ["a", {"b": 1}]
    rows = datasets.Dataset.from_list([{"chat": json.dumps(chat), "images": [broken], "audio": broken}])
    has_json = hasattr(datasets, "Json")  # older versions hold one type per field
    kinds = {"chat": datasets.Json() if has_json else datasets.Value("string"), "audio": datasets.Audio()}
    rows = rows.cast(datasets.Features({**kinds, "images": datasets.List(datasets.Image())}))
    rows.save_to_disk("saved")
    os.mkdir("folder")
    rows.to_parquet("folder/train.parquet")
    assert list(read_records(source)) == [{"chat": chat if has_json else json.dumps(chat)}]
    assert "pictures and sound are left out, the fields " in caplog.text


@pytest.mark.parametrize(
    ("source", "content", "said"),
    [
        ("empty.jsonl", b"", ["has no rows"]),
        ("broken.jsonl", b'{"text": "a"}\n\n{"text": \n', ["no JSON object in line 3: Expecting value"]),
        ("list.json", b'[{"text": "a"}, ["b"]]\n', ["must hold JSON objects"]),
        ("broken.json", b'[{"text": "a"},\n{"text": }]', ["line 2"]),
        ("columns.json", b'{"question": {"0": "a"}}', ["by columns, question, not by rows"]),
        ("twice.csv", b"a,b,b,,\n1,2,3,,\n", ["its first line names 'b' twice"]),
        ("wide.csv", b"a,b\n1,2\n1,2,3\n", ["row 2 has more fields, separated by commas"]),
        ("semicolons.csv", b"question;answer\na, b;c\n", ["separated by ';', not by commas"]),
        ("tabs.csv", b"question\tanswer\na\tc\n", ["separated by '\\t', not by commas"]),
        ("broken.jsonl.gz", b"\x1f\x8bno", ["cannot be read"]),
        ("quote.csv", b'text\n"never closed\n', ["unexpected end of data"]),
        ("latin.txt", "café".encode("latin-1"), ["UTF-8"]),
        ("broken.parquet", b"not parquet at all", ["cannot be read"]),
        ("table.tsv", b"a\tb\n", ["extension", ".csv, ", ".json, ", ".jsonl, ", ".parquet, ", ".txt"]),
        ("missing.jsonl", None, ["does not exist"]),
        ("org/dataset", None, ["no known extension", "hf:org/dataset"]),
        ("hf:", None, ["hf:DATASET"]),
        ("hf:folder?revision=main", None, ["config=NAME", "split=NAME"]),
        ("folder", None, ["hf:folder"]),
        ("hf:folder?split=nope", None, ["nope", "train"]),
        ("hf:scripted", None, ["scripts are no longer supported"]),
    ],
)
def test_sources_that_cannot_be_read_are_named(source: str, content: bytes | None, said: list[str]) -> None:
    write_folder(Path("folder"))
    write_folder(Path("scripted"))
    Path("scripted/scripted.py").write_text("raise SystemExit('a data set has run its own code')")
    if content is not None:
        Path(source).write_bytes(content)
    message = refused(read_records, source)
    for words in (repr(source), *said):
        assert words in message


def test_what_is_no_file_is_named_at_once() -> None:
    os.mkfifo("pipe.jsonl")
    os.mkdir("folder.jsonl")
    for name in ("pipe.jsonl", "folder.jsonl"):
        assert f"{name!r} is not an ordinary file" in refused(read_records, name)


def write_splits(folder: Path, save: bool = False, **splits: int) -> None:
    """Each split holds as many records as given, and tells its name in them."""
    rows = {split: [{"text": f"{split} {n}"} for n in range(count)] for split, count in splits.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if save:
        datasets.DatasetDict({split: datasets.Dataset.from_list(rows[split]) for split in rows}).save_to_disk(folder)
    for split in () if save else rows:
        write_jsonl(folder / f"{split}.jsonl", rows[split])


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(
    ("test_only", "query", "expected"),
    [
        (False, "", ["train 0", "train 1"]),
        (False, "?split=test", ["test 0"]),
        (False, "?split=train[1:]", ["train 1"]),
        (False, "?split=train+test", ["train 0", "train 1", "test 0"]),
        (True, "", ["test 0"]),
    ],
)
def test_splits_of_a_folder(save: bool, test_only: bool, query: str, expected: list[str]) -> None:
    write_splits(Path("folder"), save, **({} if test_only else {"train": 2}), test=1)
    assert [record["text"] for record in read_records(f"hf:folder{query}")] == expected


def test_several_splits_without_train_need_a_choice() -> None:
    write_splits(Path("folder"), save=True, sft=1, dpo=1)
    assert "'hf:folder' has several splits: choose with '?split=' from sft, dpo" in refused(read_records, "hf:folder")


def test_configurations_of_a_dataset_folder() -> None:
    write_splits(Path("folder/red"), train=1, test=1)
    write_splits(Path("folder/blue"), train=2)
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("red", "blue"))
    Path("folder/README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert list(read_records("hf:folder?split=test&config=red")) == [{"text": "test 0"}]
    message = refused(read_records, "hf:folder")
    assert "red" in message and "blue" in message


def test_source_key_sees_through_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
