"""From a recipe to its statistics: measured once, matched by content, never overwritten."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conftest import MakeFamily
from safetensors import safe_open
from support import families
from support.copies import edit_tensors, edited, sharded
from support.examining import edit_config, larger_vocabulary, swap_ids
from support.families import Family
from support.rounding import weight_rounding
from support.synthetic import same

from mergekit_slta.errors import SltaError
from mergekit_slta.files import STATISTICS_OF_MERGE
from mergekit_slta.levels import Fallback
from mergekit_slta.nonlinearity.studies import linearity
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.reports.merge import report_page
from mergekit_slta.slta import grams as module
from mergekit_slta.slta.measure import measure, statistics_of
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.statistics_file import Info

SETTINGS = {"samples": 5, "max_tokens": 12, "seed": 3}


def recipe(family: Family, **arguments: Any) -> dict[str, Any]:
    return families.recipe(family, **SETTINGS | arguments)


def measured(content: dict[str, Any], path: Path | None, *levels: str) -> Statistics:
    return statistics_of(families.experiment(content), levels or ("attn_mlp",), path)


@pytest.fixture(scope="module")
def measured_once(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "stats.safetensors"
    statistics_of(families.experiment(recipe(llama)), ["attn_mlp"], path)
    return path


@pytest.fixture
def path(measured_once: Path, tmp_path: Path) -> Path:
    """The statistics of the three experts at attn_mlp, a copy of the test's own."""
    return Path(shutil.copy2(measured_once, tmp_path / "stats.safetensors"))


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a test that runs a model."""
    monkeypatch.setattr(module, "pass_layers", mock.Mock(side_effect=AssertionError("a model was run")))


def test_a_merge_that_was_killed_while_mergekit_wrote_runs_no_model_again(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = families.recipe(llama, samples=2, level="layer")
    whole = families.merge(recipe, tmp_path / "whole") / "model.safetensors"
    with pytest.raises(families.Interrupted), families.after_layer(families.LAYERS - 1):
        families.merge(recipe, tmp_path / "out")
    monkeypatch.setattr(module, "pass_layers", mock.Mock(side_effect=AssertionError("a model was run")))
    again = families.merge(recipe, tmp_path / "out") / "model.safetensors"
    assert again.read_bytes() == whole.read_bytes()


def close(first: Statistics, second: Statistics, level: str = "attn_mlp") -> bool:
    one, other = first.solve(level).alpha, second.solve(level).alpha
    return all(torch.allclose(alpha, other[name], atol=weight_rounding(), rtol=0) for name, alpha in one.items())


# What is measured


def test_rows_are_the_samples_that_the_settings_draw(llama: Family, path: Path) -> None:
    found = Statistics.load(path)
    tasks = llama.token_ids(**SETTINGS)
    assert found.tokens.tolist() == [len(ids) for samples in tasks for ids in samples]
    assert found.task.tolist() == [task for task, samples in enumerate(tasks) for _ in samples]
    expected = families.measure(llama, "attn_mlp", tasks=tasks)
    assert all(torch.equal(found.grams[name], gram) for name, gram in expected.items())


@pytest.mark.parametrize("measure", [statistics_of, linearity])
def test_logits_of_other_vocabularies_are_not_compared(
    measure: Callable[..., Any], llama: Family, tmp_path: Path, no_measuring: None
) -> None:
    """The recipe's own level may be another one, so its check does not say it."""
    content = recipe(llama, level="layer") | {"tokenizer": {"source": "base"}}
    larger_vocabulary(tmp_path / "larger")
    swap_ids(shutil.copytree(llama.experts[1], tmp_path / "other"))
    for other, why in {"larger": "expert .* of 66", "other": "tokenizers of .* have different ids for 2"}.items():
        content["models"][1]["model"] = str(tmp_path / other)
        experiment = families.experiment(content)
        for model in map(experiment.model, experiment.recipe.references):
            vars(model)["folder"] = None  # as of a model of the Hub that was downloaded after it was opened
        with pytest.raises(SltaError, match=f"'level: model' compares logits, but the {why} tokens"):
            measure(experiment, ["layer", "model"])


def test_logits_that_need_more_than_the_last_layer_and_what_is_no_level_are_refused(
    llama: Family, no_measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergekit_slta.recipe.experiment.tail_problem", lambda decoder: "It needs the first layer too.")
    with pytest.raises(SltaError, match="It needs the first layer too"):
        statistics_of(families.experiment(recipe(llama, level="layer")), ["layer", "model"])
    with pytest.raises(SltaError, match=r"'layers' is not one of model, layer, attn_mlp, head_mlp, linear\."):
        measured(recipe(llama), None, "layers")


def test_the_file_says_what_was_measured_and_holds_no_path_and_no_user_name(tmp_path: Path) -> None:
    family = families.make_family(tmp_path / "home" / "someone", experts=2, dtype=torch.float16)
    families.merge(recipe(family, statistics=str(tmp_path / "stats.safetensors")), tmp_path / "merged")
    info = Statistics.load(tmp_path / "stats.safetensors").info
    assert (info.base_model, info.models) == ("base", ("expert0", "expert1"))
    assert [entry.source for entry in info.calibration] == ["task0.jsonl", "task1.jsonl"]
    assert (info.samples, info.max_tokens, info.seed) == (5, 12, 3)
    assert (info.architecture, info.num_layers, info.dtype) == ("LlamaForCausalLM", families.LAYERS, "float16")
    with safe_open(tmp_path / "stats.safetensors", framework="pt") as file:
        text = json.dumps([file.metadata(), list(file.keys())])
    assert [word for word in ("someone", str(tmp_path)) if word in text] == []


# A file that exists


def test_a_file_that_fits_is_used_and_not_touched(
    no_measuring: None, llama: Family, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the settings of the solution, and of data that are not named."""
    before = path.stat()
    for arguments in ({"balance": False, "ridge": 0.5}, {"calibration": False, "samples": 30, "seed": 9}):
        assert same(measured(recipe(llama, **arguments), path), Statistics.load(path))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino
    assert caplog.messages == [f"{path} was measured with seed 3, and that holds instead of the recipe's."]


def test_a_subset_equals_what_it_alone_measures(llama: Family, path: Path, tmp_path: Path) -> None:
    order = [2, 0]
    alone = measured(recipe(llama, experts=order), tmp_path / "alone.safetensors")
    part = measured(recipe(llama, experts=order, calibration=False), path)
    assert same(part, Statistics.load(path).take(order)) and close(part, alone)
    assert part.info.fingerprint == alone.info.fingerprint


def test_a_subset_fits_by_its_prompts_whatever_the_number_of_the_others(llama: Family, tmp_path: Path) -> None:
    """The file knows only the most prompts of an expert."""
    content, file = recipe(llama, experts=[0, 1]), tmp_path / "numbers.safetensors"
    content["models"][1]["parameters"]["samples"] = 4
    both = measured(content, file)
    for expert, number in ((0, 5), (1, 4)):
        assert same(measured(recipe(llama, experts=[expert], samples=number), file), both.take([expert]))


def test_other_copies_of_the_same_models_fit_and_lend_their_names(
    no_measuring: None, llama: Family, path: Path, tmp_path: Path
) -> None:
    """As when an author measured local folders: cards name models as the user does, and number folders of one name."""
    folders = [sharded(folder, tmp_path / f"{index}" / "copy") for index, folder in enumerate(llama.folders)]
    for folder in folders:
        families.write_tokenizer(folder)
    copies, before = Family(folders[0], tuple(folders[1:]), llama.data, llama.config), path.read_bytes()
    for calibration in (False, True):
        found = measured(recipe(copies, calibration=calibration), path)
        assert close(found, Statistics.load(path))
        assert found.info.models == ("copy (2)", "copy (3)", "copy (4)")
        assert found.select("copy (3)").info.models == ("copy (3)",)
    assert path.read_bytes() == before


Change = Callable[[dict[str, Any], Family, Path], object]


def change_configuration(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    base = Path(shutil.copytree(llama.base, tmp_path / "stretched"))
    edit_config(base, rms_norm_eps=1e-3, rope_parameters=llama.config.rope_parameters | {"rope_theta": 1e5})
    content["base_model"] = str(base)


def change_expert(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    folder = edited(llama.experts[1], tmp_path / "other", lambda tensors: tensors["model.norm.weight"].add_(0.01))
    content["models"][1]["model"] = str(folder)


def change_records(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    other = families.write_records(tmp_path / "other.jsonl", task=4)
    content["models"][2]["parameters"]["calibration"] = str(other)


MISMATCHES: dict[str, tuple[Change, list[str]]] = {
    "base": (
        lambda content, *_: content.update(base_model=content["models"].pop(0)["model"]),
        [r"base model .*expert0 is not the one"],
    ),
    "configuration": (change_configuration, [r"stretched .* \(different rms_norm_eps, rope_parameters\.rope_theta\)"]),
    "a calibration": (
        lambda content, *_: content["models"][1]["parameters"].clear(),
        [r"Some models have a 'calibration', but not .*expert1: "],
    ),
    "expert": (change_expert, [r"expert .*other is not one of the models"]),
    "data": (change_records, [r"other\.jsonl' of .*expert2 gives other tokens than"]),
    "samples": (lambda content, *_: content["parameters"].update(samples=4), [r"expert2 gives other .*\(samples 5, "]),
    "samples of one task": (
        lambda content, *_: content["models"][1]["parameters"].update(samples=4),
        [r"^'\S+task1\.jsonl' of \S+expert1 gives other tokens"],
    ),
    "level": (
        lambda content, *_: content["parameters"].update(level="layer"),
        [r"lacks the level layer \(it holds attn_mlp\): .*calibrate RECIPE -o FILE --level attn_mlp"],
    ),
    "all at once": (
        lambda *given: [change(*given) for change in (change_configuration, change_expert, change_records)],
        ["stretched is not", "other is not one", "gives other tokens"],
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_names_the_part_and_overwrites_nothing(
    name: str, no_measuring: None, llama: Family, path: Path, tmp_path: Path
) -> None:
    (change, words), content, before = MISMATCHES[name], recipe(llama, statistics=str(path)), path.read_bytes()
    change(content, llama, tmp_path)
    with pytest.raises(SltaError) as caught:
        measured(content, None, content["parameters"].get("level", "attn_mlp"))
    sentences = caught.value.message.splitlines()
    assert len(sentences) == len(words)
    for pattern, sentence in zip(words, sentences, strict=True):
        assert re.search(pattern, sentence), sentence
        assert str(path) in sentence or name == "a calibration"
    assert path.read_bytes() == before


def test_an_entry_that_another_transformers_does_not_know_is_not_compared(
    no_measuring: None, llama: Family, path: Path
) -> None:
    found = Statistics.load(path)
    content = found.info.model_dump(mode="json")
    config = content["fingerprint"]["base"]["config"]
    config["invented_later"] = config.pop("hidden_act")
    for version in ("99.0", transformers.__version__):
        content["versions"]["transformers"] = version
        replace(found, info=Info.model_validate(content)).save(path)
        if version == "99.0":
            measured(recipe(llama), path)
    with pytest.raises(SltaError, match=r"\(different hidden_act, invented_later\)"):
        measured(recipe(llama), path)


# In a merge's output


def test_a_merge_writes_its_statistics_anew_and_one_that_names_them_measures_nothing(
    llama: Family, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, out = Statistics.load(path), tmp_path / "out"
    written = out / STATISTICS_OF_MERGE
    written.parent.mkdir(parents=True)
    written.write_bytes(b"of another merge, or damaged")
    families.merge(recipe(llama), out)
    assert same(Statistics.load(out), first)
    content, weights = written.read_bytes(), (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(module, "pass_layers", None)
    with pytest.raises(TypeError):
        families.merge(recipe(llama), tmp_path / "unnamed")
    families.merge(recipe(llama, statistics=str(written)), out)
    assert written.read_bytes() == content
    assert (out / "model.safetensors").read_bytes() == weights


def test_measure_says_when_it_takes_statistics_that_are_there(
    llama: Family, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"Note: {path} already holds the statistics of this recipe, so nothing is measured.\n"
    for quiet, expected in ((False, said), (True, "")):
        measure(Recipe(recipe(llama)), path=path, quiet=quiet)
        assert capsys.readouterr().err == expected


def test_without_a_file_nothing_is_written(llama: Family, path: Path, tmp_path: Path) -> None:
    assert same(measured(recipe(llama), None), Statistics.load(path))
    assert list(tmp_path.rglob("*")) == [path]


def test_an_expert_that_is_replaced_while_it_is_measured_is_refused(family: Family, tmp_path: Path) -> None:
    experiment = families.experiment(recipe(family))
    assert experiment.checkpoints[2].fingerprint
    edit_tensors(family.experts[1], lambda tensors: [tensor.mul_(1.3) for tensor in tensors.values()])
    with pytest.raises(SltaError, match="expert1 have changed while they were read"):
        statistics_of(experiment, ["attn_mlp"], tmp_path / "stats.safetensors")
    assert not (tmp_path / "stats.safetensors").exists()


def test_a_coarser_level_is_written_down_with_the_reason_and_kept(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, path = make_family("lfm2"), tmp_path / "stats.safetensors"
    reason = "it mixes tokens by Lfm2ShortConv, which is not known to have heads"
    fallback = Fallback("head_mlp", "attn_mlp", (0, 2), "Lfm2DecoderLayer", reason)
    sentence = f"Level head_mlp falls back to level attn_mlp in layers 0, 2 (Lfm2DecoderLayer): {reason}."
    found = measured(recipe(family), path, "attn_mlp", "head_mlp", "linear")
    assert found.info.levels == ("attn_mlp", "head_mlp", "linear")
    assert same(found, Statistics.load(path))
    assert found.info.fallbacks == found.select("expert1").info.fallbacks == (fallback,)
    assert sentence in caplog.messages
    caplog.clear()
    measured(recipe(family, experts=[1], calibration=False), path, "head_mlp")
    assert caplog.messages == [sentence]
    assert [sentence in str(found.solve(level)) for level in found.info.levels] == [False, True, False]
    assert report_page(found.solve("head_mlp")).facts["Coarser levels"] == sentence
    assert "Coarser levels" not in report_page(found).facts
