"""Calibration data and statistics files that a merge could not use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import MakeFamily
from support import families
from support.architecture_scan import small_configs
from support.examining import only, problems, with_data
from support.families import Family
from support.hub import serve
from transformers import AutoTokenizer

from mergekit_slta.checks.examine import check
from mergekit_slta.recipe.recipe import Recipe

CHAT = "{% for turn in messages %}{{ turn.content }}{% endfor %}"


# Sources


def test_two_sources_with_the_same_samples(family: Family, tmp_path: Path) -> None:
    copy = shutil.copy(family.data[1], tmp_path / "copy.jsonl")
    assert only(with_data(family, copy)) == (
        f"'{copy}' of {family.experts[0]} and '{family.data[1]}' of {family.experts[1]} give the same tokens: "
        "give each expert the data of its own task, because with equal data every merging weight of slta is one over "
        "the number of experts."
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "has no records"),
        ("blank.jsonl", '{"text": " "}\n', "has no usable record: all 1 are empty"),
        ("shape.jsonl", '{"q": 1, "a": 2}', "has none of the known fields: its fields are q, a."),
        (
            "mixed.jsonl",
            '{"text": ["x"]}\n{"q": 1}\n',
            "no usable record: 2 do not fit and 0 are empty, the first because",
        ),
    ],
)
def test_data_that_cannot_be_used(family: Family, tmp_path: Path, name: str, content: str | None, words: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    problem = only(with_data(family, file))
    assert words in problem and str(file) in problem


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{question}", "has no field 'question', which the template '{question}' names: its fields are text."),
        ("{text", "is not a valid format string"),
    ],
)
def test_a_template_that_does_not_fit(family: Family, template: str, words: str) -> None:
    assert words in only(with_data(family, family.data[0], template))


def test_a_record_of_each_source_is_shown(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "ab:", "completion": " cd"}\n{"q": 1}\n')
    notes = check(Recipe.parse(json.dumps(with_data(family, file)), "recipe")).notes
    shown, _ = (note for note in notes if "as the model sees it" in note)
    tokenizer = AutoTokenizer.from_pretrained(family.base)
    text, answer = tokenizer.decode(tokenizer("ab: cd")["input_ids"]), tokenizer.decode(tokenizer.encode("cd")[1:-1])
    assert shown == f"Record 1 of '{file}' as the model sees it: {text!r}; its answer is {answer!r}."


def test_a_dataset_is_checked_for_its_spelling_and_where_there_is_a_network_for_its_existence(
    family: Family, tmp_path: Path
) -> None:
    assert "?split=NAME" in only(with_data(family, "hf:org/data?splt=train"))
    sound = with_data(family, "hf:org/data?config=main&split=train[:5]")
    assert problems(sound) == []
    (tmp_path / "hub" / "datasets" / "org" / "data").mkdir(parents=True)
    with serve(tmp_path / "hub", tmp_path / "cache"):
        assert problems(sound) == []
        said = only(with_data(family, "hf:org/dta"))
        assert said.startswith(
            "Calibration source 'hf:org/dta' cannot be used: on the Hub, there is no such repository"
        )
        assert "not the name of a repository" in only(with_data(family, "hf:org/da ta"))
        assert problems(with_data(family, f"hf:{tmp_path}")) == []


@pytest.mark.parametrize(
    ("samples", "tested", "words"),
    [
        (5, None, []),
        (6, None, ["has only 6 records: all calibrate, none is left for `evaluate`. Add records (60 or more: 30 cal"]),
        (30, None, ["has only 6 records: all calibrate, none is left for `evaluate`"]),
        (6, "abcabc", []),
        (6, "", ["has only records that calibrate, none is left for `evaluate`"]),  # a copy
        (5, "missing", ["does not exist"]),
    ],
)
def test_check_says_that_calibration_leaves_no_record_for_evaluate(
    make_family: MakeFamily, tmp_path: Path, samples: int, tested: str | None, words: list[str]
) -> None:
    family = make_family(records=6)
    recipe = families.recipe(family, experts=[0], keep={"calibration": "hf:org/data"}, samples=samples)
    file = tmp_path / "test.jsonl"
    if tested is not None:
        recipe["models"][0]["parameters"]["evaluation"] = str(file)
        if tested != "missing":
            file.write_text(json.dumps({"text": tested}) if tested else family.data[0].read_text())
    found = check(Recipe.parse(json.dumps(recipe), "recipe.yml"), quiet=True)
    notes = [note for note in found.notes if "as the model sees it" not in note]
    assert not found.problems and len(notes) == len(words)
    for note, said in zip(notes, words, strict=True):
        assert said in note and str(file if tested is not None else family.data[0]) in note


def test_conversations_need_a_chat_template(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "abc"}]}))
    assert "neither the base model's tokenizer nor the expert's has a chat template" in only(with_data(family, file))
    families.write_tokenizer(family.experts[0], CHAT)
    assert problems(with_data(family, file)) == []


def test_data_is_read_even_if_the_base_model_is_missing(family: Family, tmp_path: Path) -> None:
    recipe = with_data(family, tmp_path / "none.txt") | {"base_model": str(tmp_path / "none")}
    assert ["no such folder" in problem or "does not exist" in problem for problem in problems(recipe)] == [True, True]


# Samples


def test_a_base_model_without_tokenizer_is_named_once(family: Family) -> None:
    for file in family.base.glob("tokenizer*"):
        file.unlink()
    assert only(families.recipe(family)).startswith(f"{family.base} has no usable tokenizer (")


def test_samples_longer_than_the_table_of_positions(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("gpt2")
    (tmp_path / "long.txt").write_text("a" * 200)
    problem = only(with_data(family, tmp_path / "long.txt"))
    assert "has samples of 202 tokens" in problem and problem.endswith("128 positions: set 'max_tokens: 128' or less.")
    assert problems(with_data(family, tmp_path / "long.txt", max_tokens=128)) == []


def test_a_table_of_two_segments_limits_no_sample(tmp_path: Path) -> None:
    config = next(small_configs("kosmos-2.5", "Kosmos2_5ForConditionalGeneration"))
    family = families.make_family(tmp_path, config, records=2, longest=10)
    assert problems(families.recipe(family)) == []


# Statistics


def test_models_of_one_name_cannot_be_told_apart_in_the_statistics(family: Family, tmp_path: Path) -> None:
    recipe = families.recipe(family, experts=[0, 1])
    for number, entry in enumerate(recipe["models"]):
        entry["model"] = str(shutil.copytree(entry["model"], tmp_path / f"run{number}" / "checkpoint-500"))
    assert "same name in the statistics (base, checkpoint-500, checkpoint-500)" in only(recipe)
    assert problems(recipe | {"merge_method": "featcal"}) == []


def measured(family: Family, file: Path, level: str = "layer") -> Path:
    """A statistics file of the family, written by a merge."""
    families.merge(families.recipe(family, level=level, statistics=str(file)), file.parent / "merged")
    return file


def test_statistics_stand_for_calibration(family: Family, tmp_path: Path) -> None:
    file = measured(family, tmp_path / "stats.safetensors")
    recipe = families.recipe(family, calibration=False, level="layer", statistics=str(file))
    assert problems(recipe) == []
    recipe["parameters"]["level"] = "attn_mlp"
    assert only(recipe).startswith(f"{file} lacks the level attn_mlp (it holds layer): ")
    assert only(families.recipe(family, statistics=str(file))) == only(recipe)
    file.unlink()
    assert len(problems(recipe)) == len(family.experts)
    assert all("has no 'calibration'" in problem for problem in problems(recipe))


def test_statistics_that_cannot_be_read(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "stats.safetensors"
    file.write_text("nothing")
    assert only(families.recipe(family, statistics=str(file))).startswith(
        f"{file} cannot be read as a safetensors file"
    )
    assert "There is no statistics file" in only(families.recipe(family, statistics=str(tmp_path)))


def test_published_statistics_that_cannot_be_reached(family: Family) -> None:
    recipe = families.recipe(family, calibration=False, statistics="hf:org/repo/file.safetensors")
    assert "the Hub cannot be reached" in only(recipe)


def test_statistics_may_be_written_into_a_new_folder_but_not_into_a_file(family: Family, tmp_path: Path) -> None:
    assert problems(families.recipe(family, statistics=str(tmp_path / "new" / "stats.safetensors"))) == []
    (tmp_path / "file").write_text("")
    problem = only(families.recipe(family, statistics=str(tmp_path / "file" / "stats.safetensors")))
    assert f"{tmp_path}/file is not a writable folder" in problem
