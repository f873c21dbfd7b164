"""Calibration data: what each source and record shape becomes, in which order, and how problems are worded."""

import csv
import hashlib
import json
import logging
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
from tokenizers import models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mergekit_slta import data
from mergekit_slta.data import CalibrationData
from mergekit_slta.errors import SltaError

BOS, EOS = 0, 1
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?[]\n"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
)
RECORDS = [{"question": f"what is {n}?", "answer": f"it is {n}, \nno doubt"} for n in range(12)]


def write_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """A character-level tokenizer that adds <s> and </s>, and drops characters that it does not know.

    Its files say to pad, and to truncate on the left.
    """
    vocabulary = {"<s>": BOS, "</s>": EOS, "<pad>": 2} | {c: i for i, c in enumerate(CHARACTERS, 3)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    backend.enable_padding(pad_id=2, pad_token="<pad>", length=64)
    backend.enable_truncation(max_length=5, direction="left")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        truncation_side="left",
        model_max_length=16,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return write_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return write_tokenizer(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE)


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def spelled(text: str) -> tuple[int, ...]:
    return tuple(3 + CHARACTERS.index(character) for character in text)


def with_special(text: str) -> tuple[int, ...]:
    return (BOS, *spelled(text), EOS)


def not_needed() -> PreTrainedTokenizerBase:
    raise AssertionError("the expert's tokenizer was loaded although nothing needs it")


DEFAULTS: dict[str, Any] = {"expert_tokenizer": not_needed, "samples": 4, "max_tokens": 100, "seed": 0}


def write_jsonl(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def load(source: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> CalibrationData:
    settings = DEFAULTS | settings
    return data.load_calibration(source, tokenizer=tokenizer, **settings)


def hold_out(source: str, tokenizer: PreTrainedTokenizerBase, skip: CalibrationData, **settings: Any) -> Any:
    settings = DEFAULTS | settings
    return data.held_out(source, tokenizer=tokenizer, skip=skip, **settings)


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(SltaError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


# Sources


def write_csv(path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(RECORDS)


def write_folder(path: Path) -> None:
    path.mkdir()
    write_jsonl(path / "train.jsonl", RECORDS)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "records.jsonl": lambda path: write_jsonl(path, RECORDS),
    "UPPER.JSONL": lambda path: write_jsonl(path, RECORDS),
    "blank_lines.jsonl": lambda path: path.write_text("\n \n".join(json.dumps(record) for record in RECORDS)),
    "list.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "data.json": lambda path: path.write_text(json.dumps({"version": 1, "data": RECORDS})),
    "columns.json": lambda path: path.write_text(
        json.dumps({field: [record[field] for record in RECORDS] for field in RECORDS[0]})
    ),
    "lines.json": lambda path: write_jsonl(path, RECORDS),
    "table.csv": write_csv,
    "table.parquet": lambda path: datasets.Dataset.from_list(RECORDS).to_parquet(str(path)),
    "hf:folder": write_folder,
    "hf:saved": lambda path: datasets.Dataset.from_list(RECORDS).save_to_disk(str(path)),
    "hf:saved_splits?split=train": lambda path: datasets.DatasetDict(
        {"test": datasets.Dataset.from_list(RECORDS[:1]), "train": datasets.Dataset.from_list(RECORDS)}
    ).save_to_disk(str(path)),
}


@pytest.mark.parametrize("source", WRITERS)
def test_every_format_gives_the_same_records(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths start there
    path, _, _ = source.removeprefix("hf:").partition("?")
    WRITERS[source](tmp_path / path)
    assert list(data.read_records(source)) == RECORDS
    absolute = source.replace(path, str(tmp_path / path))
    assert list(data.read_records(absolute)) == RECORDS
    drawn = load(source, plain_tokenizer)
    expected = [RECORDS[index] for index in random.Random(0).sample(range(12), 12)[:4]]
    assert drawn.token_ids == tuple(with_special(f"{r['question']}\n{r['answer']}") for r in expected)


def test_text_file_is_one_sample_per_line_without_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("one\r\n\n  two\x0b\u2028still two \n \t\nthree".encode())
    assert data.read_records(str(path)) == [{"text": "one"}, {"text": "  two\x0b\u2028still two "}, {"text": "three"}]


def test_csv_takes_long_fields_and_leaves_the_global_limit(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    limit = csv.field_size_limit()
    path.write_text("text\n" + "a" * (limit + 1) + "\n")
    assert data.read_records(str(path)) == [{"text": "a" * (limit + 1)}]
    assert csv.field_size_limit() == limit


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    write_folder(tmp_path / "folder")
    assert data.read_records("~/a.jsonl") == RECORDS
    assert list(data.read_records("hf:~/folder")) == RECORDS


BROKEN_FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty.jsonl": (b"", ["has no records"]),
    "blank.json": (b" \n", ["has no records"]),
    "blank.txt": (b"\n \n", ["has no records"]),
    "empty.csv": (b"", ["has no records"]),
    "header.csv": (b"text\n", ["has no records"]),
    "empty_list.json": (b"[]", ["has no records"]),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text": \n', ["Line 3", "broken JSON"]),
    "list.jsonl": (b'{"text": "a"}\n["b"]\n', ["Line 2", "no JSON object"]),
    "broken.json": (b'[{"text": "a"},\n{"text": }]', ["Line 2", "broken JSON"]),
    "broken_lines.json": (b'{"text": "a"}\n{"text": \n', ["Line 2", "broken JSON"]),
    "strings.json": (b'["a", "b"]', ["list of records"]),
    "ragged.json": (b'{"a": [1, 2], "b": [1]}', ["list of records"]),
    "one.json": (b'{"text": "a"}', ["list of records"]),
    "wide.csv": (b"a,b\n1,2\n1,2,3\n", ["Line 3", "more fields"]),
    "quote.csv": (b'text\n"never closed\n', ["Line 2", "broken CSV"]),
    "latin.txt": ("café".encode("latin-1"), ["UTF-8"]),
    "broken.parquet": (b"not parquet at all", ["broken Parquet"]),
    "table.tsv": (b"a\tb\n", ["extension", ".csv, ", ".json, ", ".jsonl, ", ".parquet, ", ".txt", "hf:DATASET"]),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_files_are_named(name: str, tmp_path: Path) -> None:
    content, said = BROKEN_FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refused(data.read_records, str(tmp_path / name))
    for words in (str(tmp_path / name), *said):
        assert words in message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("missing.jsonl", ["does not exist"]),
        ("org/dataset", ["hf:DATASET"]),
        ("", ["''"]),
        ("hf:", ["names no dataset"]),
        ("hf:./missing", ["no folder './missing'"]),
        ("hf:folder?revision=main", ["revision=main", "config=NAME", "split=NAME"]),
        ("hf:folder?split=", ["'split='"]),
        ("hf:folder?split=train&split=test", ["'split=test'"]),
        ("folder", ["is a folder", "hf:folder"]),
        ("hf:folder?split=nope", ["nope", "train"]),
        ("hf:folder?config=nope", ["nope"]),
        ("hf:saved?split=nope", ["'nope'", "from train"]),
        ("hf:saved?config=nope", ["no configurations"]),
        ("hf:void", []),
    ],
)
def test_sources_that_cannot_be_read_are_named(
    source: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "folder")
    datasets.Dataset.from_list(RECORDS).save_to_disk("saved")
    (tmp_path / "void").mkdir()
    message = refused(data.read_records, source)
    for words in (repr(source), *said):
        assert words in message


def test_unreachable_dataset_repository_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach\n'org/data' on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert "'hf:org/data'" in refused(data.read_records, "hf:org/data")


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
    records = data.read_records(f"hf:{tmp_path / 'folder'}{query}")
    assert [record["text"] for record in records] == expected


@pytest.mark.parametrize("saved", [False, True])
def test_several_splits_without_train_need_a_choice(saved: bool, tmp_path: Path) -> None:
    write_splits(tmp_path / "folder", test=1, validation=1)
    source = f"hf:{tmp_path / 'folder'}"
    if saved:
        datasets.load_dataset(str(tmp_path / "folder")).save_to_disk(str(tmp_path / "saved"))
        source = f"hf:{tmp_path / 'saved'}"
    message = refused(data.read_records, source)
    assert source in message
    assert "test" in message and "validation" in message and "?split=" in message
    assert [record["text"] for record in data.read_records(source + "?split=validation")] == ["validation 0"]


def test_configurations_of_a_dataset_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_splits(folder / "red", train=1, test=1)
    write_splits(folder / "blue", train=2)
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("red", "blue"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert len(data.read_records(f"hf:{folder}?config=blue")) == 2
    records = data.read_records(f"hf:{folder}?split=test&config=red")
    assert [record["text"] for record in records] == ["test 0"]
    message = refused(data.read_records, f"hf:{folder}")
    assert "red" in message and "blue" in message


def test_datasets_is_imported_only_for_a_source_that_needs_it(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    code = (
        "import sys; from mergekit_slta import data; data.read_records(sys.argv[1]); "
        "assert not {'datasets', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, source], check=True)


# Records


def as_text(record: dict[str, Any], template: str = "") -> tuple[str, bool]:
    return data.record_text(
        record,
        template,
        where="Record 7 of calibration source 'x.jsonl'",
        render_chat=lambda turns: "".join(f"<{turn['role']}>{turn['content']}" for turn in turns),
    )


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SHAREGPT = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "ho"},
    {"from": "tool", "value": "42"},
]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": "a"}, "a"),
        ({"text": 7}, "7"),
        ({"prompt": "a", "completion": "b"}, "a\nb"),
        ({"prompt": "a", "response": "b"}, "a\nb"),
        ({"question": "a", "answer": 42}, "a\n42"),
        ({"question": "a", "answer": None}, "a"),
        ({"instruction": "a", "output": "b"}, "a\nb"),
        ({"instruction": "a", "input": "i", "output": "b"}, "a\ni\nb"),
        ({"instruction": "a", "input": " ", "output": "b"}, "a\nb"),
        ({"instruction": "a", "input": None, "output": "b"}, "a\nb"),
        ({"text": "a", "prompt": "b", "completion": "c"}, "a"),
        ({"prompt": "a", "completion": "b", "question": "c", "answer": "d"}, "a\nb"),
        ({"text": None, "question": "a", "answer": "b"}, "a\nb"),
        ({"messages": None, "text": "a"}, "a"),
        ({"id": 3, "text": "  a "}, "  a "),
        ({"text": None}, ""),
        ({"text": " \n"}, ""),
        ({"question": None, "answer": " "}, ""),
        ({"messages": []}, ""),
        ({"messages": None}, ""),
        ({"conversations": [{"from": "human", "value": None}, {"role": "user", "content": " "}]}, ""),
    ],
)
def test_shapes_without_a_chat(record: dict[str, Any], text: str) -> None:
    assert as_text(record) == (text, False)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": TURNS, "text": "other"}, "<user>hi<assistant>ho"),
        ({"conversations": TURNS, "prompt": "other", "completion": "other"}, "<user>hi<assistant>ho"),
        ({"conversations": SHAREGPT}, "<system>be kind<user>hi<assistant>ho<tool>42"),
        ({"messages": [{"role": None, "content": None, "from": "gpt", "value": "ho"}]}, "<assistant>ho"),
        ({"messages": {"role": ["user", "assistant"], "content": ["hi", "ho"]}}, "<user>hi<assistant>ho"),
    ],
)
def test_chat_shapes(record: dict[str, Any], text: str) -> None:
    assert as_text(record) == (text, True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {question}\nA: {answer}", "Q: a\nA: 5"),
        ("{question!r}", "'a'"),
        ("{answer:03d}", "005"),
        ("{messages[0][content]}{{}}", "hi{}"),
        ("{question} {nothing}", "a "),
        ("Nothing here: {nothing}{blank}", ""),
    ],
)
def test_template_goes_before_every_shape(template: str, text: str) -> None:
    record = {"messages": TURNS, "text": "other", "question": "a", "answer": 5, "nothing": None, "blank": " "}
    assert as_text(record, template) == (text, False)


@pytest.mark.parametrize(
    ("record", "template", "said"),
    [
        ({"prompt": "a", "label": "b"}, "", ["its fields are prompt, label", "'template'"]),
        ({}, "", ["its fields are none"]),
        ({"text": ["a"]}, "", ["'text'", "list"]),
        ({"prompt": TURNS, "completion": TURNS}, "", ["'prompt'", "'template'"]),
        ({"messages": "hi"}, "", ["'messages'", "no list of turns"]),
        ({"messages": ["hi"]}, "", ["'messages'", "no list of turns"]),
        ({"messages": [{"speaker": "me", "says": "hi"}]}, "", ["its fields are speaker, says"]),
        ({"q": "a", "a": "b"}, "{q} {b}", ["'b'", "its fields are q, a"]),
        ({"q": "a"}, "{q.answer}", ["'{q.answer}'"]),
        ({"q": "a"}, "{q[x]}", ["'{q[x]}'"]),
        ({"q": "a"}, "{q:d}", ["'{q:d}'"]),
    ],
)
def test_record_that_does_not_fit_is_named(record: dict[str, Any], template: str, said: list[str]) -> None:
    message = refused(as_text, record, template)
    for words in ("Record 7 of calibration source 'x.jsonl'", *said):
        assert words in message


@pytest.mark.parametrize("template", ["{q", "q}", "{}", "{0}", "no field", " "])
def test_bad_template_is_quoted(template: str) -> None:
    assert repr(template) in refused(as_text, {"q": "a"}, template)


def test_template_fields() -> None:
    assert data.template_fields("{a} {b.c}{d[0]:>{width}} {{e}}") == ["a", "b", "d"]


# Tokens


def test_text_gets_special_tokens_and_keeps_its_beginning(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefgh" * 20}])
    assert load(source, plain_tokenizer, samples=1, max_tokens=500).token_ids == (with_special("abcdefgh" * 20),)
    assert load(source, plain_tokenizer, samples=1, max_tokens=6).token_ids == ((BOS, *spelled("abcde")),)


def test_chat_template_has_its_beginning_of_text_token_once(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    expected = (BOS, *spelled("[user]hi\n[assistant]ho\n"))
    assert load(source, chat_tokenizer, samples=1).token_ids == (expected,)
    assert load(source, chat_tokenizer, samples=1, max_tokens=9).token_ids == (expected[:9],)


def test_chat_of_a_dataset_is_that_of_a_file(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    records = [{"conversations": SHAREGPT}]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    from_dataset = load(f"hf:{tmp_path / 'saved'}", chat_tokenizer, samples=1)
    assert from_dataset.token_ids == load(source, chat_tokenizer, samples=1).token_ids


def test_expert_chat_template_is_loaded_once_and_only_if_the_base_has_none(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}, {"text": "a"}, {"messages": TURNS[:1]}])
    loads = []

    def expert() -> PreTrainedTokenizerBase:
        loads.append(1)
        return chat_tokenizer

    by_expert = load(source, plain_tokenizer, expert_tokenizer=expert, samples=3)
    assert by_expert.token_ids == load(source, chat_tokenizer, samples=3).token_ids
    assert len(loads) == 1


def test_conversation_without_any_chat_template_is_refused(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    message = refused(load, source, plain_tokenizer, expert_tokenizer=lambda: plain_tokenizer)
    assert repr(source) in message and "'template'" in message

    def missing() -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(str(tmp_path))

    assert repr(source) in refused(load, source, plain_tokenizer, expert_tokenizer=missing)
    drawn = load(source, plain_tokenizer, template="{messages[1][content]}", samples=1)
    assert drawn.token_ids == (with_special("ho"),)


def test_what_a_chat_template_refuses_is_said(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "strict", "{{ raise_exception('roles must alternate') }}")
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    message = refused(load, source, tokenizer)
    assert repr(source) in message and "roles must alternate" in message


# Drawing


def expected_order(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


@pytest.mark.parametrize("seed", [0, 1])
def test_order_is_the_seeds_and_empty_records_are_counted(
    seed: int, tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    empty = expected_order(26, seed)[1::3]
    nothing = [" ", None, "\u00e9"]  # the tokenizer knows no accents: the last is only <s> and </s>
    records = [{"text": nothing[i % 3] if i in empty else CHARACTERS[i]} for i in range(26)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    with caplog.at_level(logging.INFO, logger="mergekit_slta"):
        drawn = load(source, plain_tokenizer, samples=5, seed=seed)
    usable = [index for index in expected_order(26, seed) if index not in empty]
    assert drawn.records == tuple(usable[:5])
    assert drawn.token_ids == tuple(with_special(CHARACTERS[index]) for index in usable[:5])
    assert drawn.skipped == 2  # at places 1 and 4 of the first seven
    assert source in caplog.text and "2 empty" in caplog.text
    assert load(source, plain_tokenizer, samples=5, seed=seed) == drawn


def test_records_that_are_not_needed_are_not_looked_at(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    first = expected_order(10, 0)[:3]
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"} if i in first else {"no": "shape"} for i in range(10)])
    assert load(source, plain_tokenizer, samples=3).records == tuple(first)
    assert repr(source) in refused(load, source, plain_tokenizer, samples=4)


def test_fewer_than_asked_is_a_warning(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("a", "", "b")])
    drawn = load(source, plain_tokenizer, samples=30)
    assert sorted(drawn.records) == [0, 2]
    assert drawn.skipped == 1
    (shortage,) = [record.getMessage() for record in caplog.records if "of 30 asked" in record.getMessage()]
    assert source in shortage and "2 usable" in shortage


def test_enough_samples_are_no_warning(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in "abcdefgh"])
    hold_out(source, plain_tokenizer, load(source, plain_tokenizer))
    assert not [record for record in caplog.records if record.name.startswith("mergekit_slta")]


def test_no_usable_record_is_refused(tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": None}])
    message = refused(load, source, plain_tokenizer)
    assert source in message and "all 2 are empty" in message


def test_sha256_is_that_of_lengths_and_ids() -> None:
    rows = ((5, 2**40), (7,), (1, 2, 3))
    packed = b"".join(struct.pack(f"<{len(row) + 1}q", len(row), *row) for row in rows)
    assert CalibrationData("a", "", rows, (0, 1, 2), 0).sha256 == hashlib.sha256(packed).hexdigest()


def test_sha256_depends_on_the_token_ids_alone() -> None:
    digest = CalibrationData("a.txt", "", ((1, 2), (3,)), (0, 1), 0).sha256
    assert CalibrationData("b.txt", "{x}", ((1, 2), (3,)), (4, 5), 6).sha256 == digest
    for rows in (((1,), (2, 3)), ((3,), (1, 2)), ((1, 2, 3),), ((1, 2), (3,), ())):
        assert CalibrationData("a.txt", "", rows, (0, 1), 0).sha256 != digest


# Held-out records


def test_held_out_goes_on_where_calibration_stopped(tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase) -> None:
    records = [{"text": CHARACTERS[i] if i % 4 else ""} for i in range(26)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    calibration = load(source, plain_tokenizer, samples=6)
    rest = hold_out(source, plain_tokenizer, calibration, samples=5)
    together = load(source, plain_tokenizer, samples=11)
    assert calibration.records + rest.records == together.records
    assert calibration.token_ids + rest.token_ids == together.token_ids


def test_held_out_is_disjoint_also_when_it_cuts_elsewhere(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": CHARACTERS[i:]} for i in range(10)])
    calibration = load(source, plain_tokenizer, samples=4, max_tokens=5)
    rest = hold_out(source, plain_tokenizer, calibration, samples=6, max_tokens=7)
    assert calibration.records + rest.records == tuple(expected_order(10, 0))


def test_held_out_leaves_out_copies_of_calibration_samples(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = ["a", "b", "c", "d"] * 3
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    calibration = load(source, plain_tokenizer, samples=2)
    rest = hold_out(source, plain_tokenizer, calibration, samples=12)
    assert not set(rest.token_ids) & set(calibration.token_ids)
    seen = {texts[index] for index in calibration.records}
    assert sorted(rest.records) == [index for index, text in enumerate(texts) if text not in seen]


def test_held_out_shortage_is_a_warning_and_none_an_error(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in "abcde"])
    rest = hold_out(source, plain_tokenizer, load(source, plain_tokenizer, samples=4), samples=3)
    assert len(rest.records) == 1
    assert source in caplog.text and "only 1 " in caplog.text and "3 were asked" in caplog.text
    message = refused(hold_out, source, plain_tokenizer, load(source, plain_tokenizer, samples=5))
    assert source in message and "calibration used every" in message


# Names


def test_source_key_sees_through_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    write_folder(tmp_path / "folder")
    os.symlink("a.jsonl", "link.jsonl")
    files = ["a.jsonl", "./a.jsonl", "folder/../a.jsonl", "~/a.jsonl", "link.jsonl", str(tmp_path / "a.jsonl")]
    assert len({data.source_key(source) for source in files}) == 1
    folders = ["hf:folder", "hf:./folder/?split=train", "hf:~/folder?config=default", f"hf:{tmp_path / 'folder'}"]
    assert len({data.source_key(source) for source in folders}) == 1
    repositories = ["hf:Org/Data?config=c&split=train", "hf:org/data?split=train&config=c", "hf:org/data?config=c"]
    assert len({data.source_key(source) for source in repositories}) == 1
    others = ["a.jsonl", "b.jsonl", "folder", "hf:folder", "hf:folder?split=test", "hf:folder?config=c", "hf:org/data"]
    assert len({data.source_key(source) for source in others}) == len(others)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/math.jsonl", "data/math.jsonl"),
        ("./math.jsonl", "./math.jsonl"),
        ("/home/alice/math.jsonl", "math.jsonl"),
        ("~/private/math.jsonl", "math.jsonl"),
        ("hf:org/data?config=a&split=b", "hf:org/data?config=a&split=b"),
        ("hf:./folder", "hf:./folder"),
        ("hf:/home/alice/folder?split=train", "hf:folder?split=train"),
        ("hf:/home/alice/folder/", "hf:folder"),
        ("hf:~/folder?config=a", "hf:folder?config=a"),
    ],
)
def test_source_name_has_no_path_of_this_machine(source: str, name: str) -> None:
    assert data.source_name(source) == name
