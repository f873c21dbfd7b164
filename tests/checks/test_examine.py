"""A recipe examined as a whole: all that is wrong at once, data and statistics, and the same through mergekit-yaml."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from support import families
from support.adapters import edit, write_adapter
from support.calibration_samples import load, write_jsonl
from support.copies import edit_tensors
from support.examining import look, only, problems, with_data
from support.families import Family
from support.hub import downloaded_dataset, serve
from transformers import PreTrainedTokenizerBase

from mergekit_slta.checks.examine import check, examine, first_sample
from mergekit_slta.recipe.recipe import Recipe


def test_first_the_text_then_everything_else(family: Family, tmp_path: Path) -> None:
    recipe = families.recipe(family)
    recipe["models"][0]["parameters"]["calibration"] = str(tmp_path / "none.jsonl")
    del recipe["models"][1]["parameters"]["calibration"]
    edit_tensors(family.experts[2], lambda tensors: tensors.pop("model.norm.weight"))
    for words in ("none.jsonl", "has no 'calibration'", "lacks model.norm.weight"):
        assert sum(words in problem for problem in problems(recipe)) == 1
    assert len(problems(recipe)) == 3
    recipe["base_model"] = "org/none"
    assert [problem.split(" ")[0] for problem in problems(recipe) if "org/none" in problem] == ["org/none"]
    assert any("none.jsonl" in problem for problem in problems(recipe))
    recipe["parameters"] |= {"sampels": 3, "ridge": -1}
    assert [problem.split("'")[1] for problem in problems(recipe)] == ["sampels", "ridge", "calibration"]


@pytest.mark.parametrize("kind", ["adapter", "on the Hub", "in a folder"])
def test_an_expert_that_was_trained_on_another_model_is_named(kind: str, family: Family, tmp_path: Path) -> None:
    """By an adapter's configuration, or by a model's card."""
    repositories, adapter = tmp_path / "hub" / "org", write_adapter(family.base, tmp_path / "adapter", "q_proj")
    edit(adapter, base_model_name_or_path="org/other")
    for folder, name in ((family.base, "model"), (family.experts[0], "tuned")):
        shutil.copytree(folder, repositories / name)
    (repositories / "tuned" / "README.md").write_text("---\nbase_model: org/other\n---\n")
    expert = {"adapter": f"org/model+{adapter}", "on the Hub": "org/tuned"}.get(kind, str(repositories / "tuned"))
    recipe = {"merge_method": "sftm", "base_model": "org/model", "models": [{"model": expert}]}
    with serve(tmp_path / "hub", tmp_path / "cache"):
        found = look(recipe, options={"lora_merge_cache": str(tmp_path / "cache")})
    named = adapter if kind == "adapter" else expert
    said = f"{named} was trained on org/other, not on org/model: a merge makes sense only if one is a copy"
    assert sum(note.startswith(said) for note in found.notes) == 1


def test_a_gpu_that_is_not_used_and_memory_that_is_not_there_are_named(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(families.recipe(family))
    assert not [words for words in ("has a GPU", "machine has only") if words in str(check(recipe))]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(os, "sysconf", lambda _: 1000)
    said = str(check(recipe))
    assert "This machine has a GPU, which this run does not use: add --cuda" in said
    assert " (this machine has only 1 MB)" in said


def test_where_there_is_a_network_a_dataset_must_exist(family: Family, tmp_path: Path) -> None:
    (tmp_path / "hub" / "datasets" / "org" / "data").mkdir(parents=True)
    with serve(tmp_path / "hub", tmp_path / "cache"):
        assert problems(with_data(family, "hf:org/data?config=main&split=train[:5]")) == []
        refused = "Calibration source 'hf:org/dta' cannot be used: on the Hub, there is no such repository"
        assert only(with_data(family, "hf:org/dta")).startswith(refused)
        assert "not the name of a repository" in only(with_data(family, "hf:org/da ta"))


@pytest.mark.usefixtures("dataset_cache")
def test_the_prompts_of_a_downloaded_dataset_are_seen_without_a_network(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are drawn as those of the same file, and a folder's too; what a merge could not read is refused."""
    with downloaded_dataset(tmp_path / "cache", "org/data") as folder:
        shutil.copy(family.data[0], folder / "train.jsonl")
        drawn = []
        for source in (family.data[0], "hf:org/data", f"hf:{folder}"):
            experiment = families.experiment(with_data(family, source, samples=3))
            assert not [note for note in examine(experiment) if "has not seen" in note]
            drawn.append([data.token_ids for data in experiment.drawn.values()])
        assert drawn[0] == drawn[1] == drawn[2]
        with monkeypatch.context() as online:
            online.setattr("mergekit_slta.checks.examine._on_hub", lambda _: True)
            recipe = Recipe.parse(json.dumps(with_data(family, "hf:org/data", samples=3)), "recipe.yml")
            assert "has not seen" in str(check(recipe, quiet=True))
            merge = families.experiment(with_data(family, "hf:org/data", samples=3))
            notes = examine(merge, downloading=True)  # before models are downloaded
            assert not [note for note in notes if "has not seen" in note]
        unknown = check(Recipe.parse(json.dumps(with_data(family, "hf:org/other")), "recipe.yml"), quiet=True)
        assert "'hf:org/other' cannot be read" in str(unknown) and unknown.exit_code == 3
        (folder / "train.jsonl").write_text('{"text": " "}\n')
        assert "has no usable row" in only(with_data(family, f"hf:{folder}"))


def test_check_says_that_a_merge_of_one_expert_is_its_copy(family: Family) -> None:
    said = "the merge is nearly a copy of the expert"
    for recipe, expected in ((families.recipe(family, experts=[0]), 1), (families.recipe(family), 0)):
        notes = check(Recipe.parse(json.dumps(recipe), "recipe.yml"), quiet=True).notes
        assert sum(said in note for note in notes) == expected
    alone = families.recipe(family, "featcal", experts=[0])
    assert f"would only approach {family.experts[0]}, the one model with prompts: list the base" in only(alone)
    assert problems(families.recipe(family, "featcal", experts=[0], keep={"weight": 0.0})) == [only(alone)]
    assert problems(families.recipe(family, "featcal", experts=[0], keep={})) == []
    assert problems(alone, merging=False) == []  # `evaluate` scores the expert


@pytest.mark.parametrize(
    ("samples", "tested", "words"),
    [
        (5, None, ""),
        (6, None, "has only 6 prompts, which all calibrate: none is left for `evaluate`. Name test data with `evaluat"),
        (6, "abcabc", ""),
        (6, "", "has only prompts that calibrate: none is left for `evaluate`"),  # a copy
        (5, "missing", "does not exist"),
    ],
)
def test_check_says_that_calibration_leaves_no_record_for_evaluate(
    make_family: MakeFamily, tmp_path: Path, samples: int, tested: str | None, words: str
) -> None:
    family = make_family(records=6)
    recipe = families.recipe(family, experts=[0], keep={"calibration": "hf:org/data"}, samples=samples)
    file = tmp_path / "test.jsonl"
    if tested is not None:
        recipe["models"][0]["parameters"]["evaluation"] = str(file)
        if tested != "missing":
            file.write_text(json.dumps({"text": tested}) if tested else family.data[0].read_text())
    (tmp_path / "hub" / "datasets" / "org" / "data").mkdir(parents=True)
    with serve(tmp_path / "hub", tmp_path / "cache"):
        found = check(Recipe.parse(json.dumps(recipe), "recipe.yml"), quiet=True)
    unseen, *notes = [note for note in found.notes if "as the model sees it" not in note]
    assert unseen == "The prompts of hf:org/data are read when the merge begins: this check has not seen them."
    assert not found.problems and len(notes) == bool(words)
    assert all(words in note and str(file if tested is not None else family.data[0]) in note for note in notes)


def test_check_shows_a_sample_as_the_model_sees_it(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    def said(*records: dict[str, str | None], max_tokens: int = 2000) -> str:
        source = write_jsonl(tmp_path / "a.jsonl", records)
        return first_sample(load(source, plain_tokenizer, max_tokens=max_tokens), plain_tokenizer)

    long = said({"question": "ab" * 400, "answer": "c d"})
    assert long.startswith(f"Row 1 of '{tmp_path / 'a.jsonl'}' as the model sees it: '<s>abab") and len(long) < 500
    assert long.endswith(" … " + "ab" * 71 + "\\nc d</s>'; its answer is 'c d'.")
    assert said({"question": "ab", "answer": "c"}, max_tokens=3).endswith("'<s>ab'; no answer is known in it.")
    assert said({"text": "ab"}).endswith("'<s>ab</s>'; no answer is known in it.")
    pairs = [{"question": "a", "answer": answer} for answer in ("b", None, "c")]
    assert said(*pairs).endswith(" An answer is known in 2 of 3 prompts.")
    assert "1 of 3 prompts have an empty answer" in caplog.text


def test_statistics_stand_for_calibration(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "stats.safetensors"
    families.merge(families.recipe(family, level="layer", statistics=str(file)), tmp_path / "merged")
    recipe = families.recipe(family, calibration=False, level="layer", statistics=str(file))
    assert problems(recipe) == []
    recipe["parameters"]["level"] = "attn_mlp"
    said = "The statistics hold no level 'attn_mlp', only layer: measure another file with 'mergekit-slta calibrate "
    assert only(recipe) == f"{said}RECIPE -o FILE --level layer --level attn_mlp'."
    assert only(families.recipe(family, statistics=str(file))) == only(recipe)
    file.unlink()
    assert only(recipe).startswith(f"There is no statistics file {file} (the current directory is ")


def test_a_check_leaves_the_prompts_that_were_drawn_and_not_the_files_that_they_are_from(family: Family) -> None:
    experiment = families.experiment(families.recipe(family, samples=2))
    examine(experiment, merging=False)
    assert len(experiment.drawn) == len(family.experts) and not experiment.sources
