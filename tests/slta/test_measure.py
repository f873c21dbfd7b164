"""From a recipe to its statistics: measured once, matched by content, never overwritten."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MakeFamily
from mergekit.io.tasks import LoaderCache
from safetensors import safe_open
from safetensors.torch import load_file
from support import families
from support.copies import edit_tensors, edited, sharded
from support.examining import edit_config, larger_vocabulary, problems
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.levels import Fallback
from mergekit_slta.nonlinearity.scores import plan_linearity
from mergekit_slta.reports.merge import report_page
from mergekit_slta.slta import measure
from mergekit_slta.slta.measure import measured_statistics
from mergekit_slta.slta.statistics import Info, Statistics

SETTINGS = {"samples": 5, "max_tokens": 12, "seed": 3}


def recipe(family: Family, **arguments: Any) -> dict[str, Any]:
    return families.recipe(family, **SETTINGS | arguments)


def measured(content: dict[str, Any], path: Path | None, *levels: str) -> Statistics:
    LoaderCache.loaders.clear()
    return measured_statistics(families.experiment(content), levels or ("attn_mlp",), path)


@pytest.fixture(scope="module")
def measured_once(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "stats.safetensors"
    measured_statistics(families.experiment(recipe(llama)), ["attn_mlp"], path)
    return path


@pytest.fixture
def path(measured_once: Path, tmp_path: Path) -> Path:
    """The statistics of the three experts at attn_mlp, a copy of the test's own."""
    return Path(shutil.copy2(measured_once, tmp_path / "stats.safetensors"))


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a test that runs a model."""

    def run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was run")

    monkeypatch.setattr(measure, "calibrate", run)


def same(first: Statistics, second: Statistics) -> bool:
    return first.info == second.info and all(
        torch.equal(first.grams[name], gram) for name, gram in second.grams.items()
    )


def close(first: Statistics, second: Statistics, level: str = "attn_mlp") -> bool:
    one, other = first.solve(level).alpha, second.solve(level).alpha
    return all(torch.allclose(alpha, other[name], atol=1e-8, rtol=0) for name, alpha in one.items())


# What is measured


def test_rows_are_the_samples_that_the_settings_draw(llama: Family, path: Path) -> None:
    found = Statistics.load(path)
    tasks = llama.token_ids(**SETTINGS)
    assert found.tokens.tolist() == [len(ids) for samples in tasks for ids in samples]
    assert found.task.tolist() == [task for task, samples in enumerate(tasks) for _ in samples]
    expected = families.measure(llama, "attn_mlp", tasks=tasks)
    assert all(torch.equal(found.grams[name], gram) for name, gram in expected.items())


@pytest.mark.parametrize("measure", [measured_statistics, plan_linearity])
def test_logits_of_other_vocabularies_are_not_compared(
    measure: Callable[..., Any], llama: Family, tmp_path: Path, no_measuring: None
) -> None:
    """The recipe's own level may be another one, so its check does not say it."""
    content = recipe(llama, level="layer") | {"tokenizer": {"source": "base"}}
    content["models"][1]["model"] = str(larger_vocabulary(tmp_path / "larger"))
    with pytest.raises(SltaError, match="'level: model' compares logits, but the expert .* of 66 tokens"):
        measure(families.experiment(content), ["layer", "model"])


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


def test_a_file_that_fits_is_used_and_not_touched(no_measuring: None, llama: Family, path: Path) -> None:
    """Whatever the settings of the solution, and of data that are not named."""
    before = path.stat()
    for arguments in (
        {"balance": False, "ridge": 0.5, "edges": "mean", "batch_tokens": 7},
        {"calibration": False, "samples": 30, "seed": 9},
    ):
        assert same(measured(recipe(llama, **arguments), path), Statistics.load(path))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_a_subset_equals_what_it_alone_measures(llama: Family, path: Path, tmp_path: Path) -> None:
    order = [2, 0]
    alone = measured(recipe(llama, experts=order), tmp_path / "alone.safetensors")
    part = measured(recipe(llama, experts=order, calibration=False), path)
    assert same(part, Statistics.load(path).take(order)) and close(part, alone)
    assert part.info.fingerprint == alone.info.fingerprint


def test_other_copies_of_the_same_models_fit_and_lend_their_names(
    no_measuring: None, llama: Family, path: Path, tmp_path: Path
) -> None:
    """As when an author measured local folders, and a user has the Hub's: cards name the models as the user does."""
    folders = [sharded(folder, tmp_path / f"copy{index}") for index, folder in enumerate(llama.folders)]
    for folder in folders:
        families.write_tokenizer(folder)
    copies, before = Family(folders[0], tuple(folders[1:]), llama.data, llama.config), path.read_bytes()
    for calibration in (False, True):
        found = measured(recipe(copies, calibration=calibration), path)
        assert close(found, Statistics.load(path))
        assert found.info.models == ("copy1", "copy2", "copy3")
        assert found.select("copy2").info.models == ("copy2",)
    assert path.read_bytes() == before


def change_base(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    content["base_model"] = content["models"][0]["model"]
    content["models"] = content["models"][1:]


def change_configuration(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    base = shutil.copytree(llama.base, tmp_path / "stretched")
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 10
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    content["base_model"] = str(base)


def leave_out_a_calibration(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    del content["models"][1]["parameters"]["calibration"]


def change_expert(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    def retrain(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] += 0.01

    content["models"][1]["model"] = str(edited(llama.experts[1], tmp_path / "retrained", retrain))


def change_records(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    other = families.write_records(tmp_path / "other.jsonl", task=4)
    content["models"][2]["parameters"]["calibration"] = str(other)


def change_setting(name: str, value: int) -> Callable[[dict[str, Any], Family, Path], None]:
    def change(content: dict[str, Any], llama: Family, tmp_path: Path) -> None:
        content["parameters"][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_base, r"base model .*expert0 is not the one"),
        (change_configuration, r"stretched is not the one .* \(other rms_norm_eps, rope_parameters\.rope_theta\)"),
        (leave_out_a_calibration, r"Some models have a 'calibration', but not .*expert1: "),
        (change_expert, r"expert .*retrained is not one of the models"),
        (change_records, r"other\.jsonl' of .*expert2 gives other tokens than 'task2\.jsonl'"),
        (change_setting("samples", 4), r"samples 4, but .* 5"),
    ],
    ids=["base", "configuration", "a calibration", "expert", "data", "samples"],
)
def test_a_mismatch_names_the_part_and_overwrites_nothing(
    change: Callable[[dict[str, Any], Family, Path], None],
    words: str,
    no_measuring: None,
    llama: Family,
    path: Path,
    tmp_path: Path,
) -> None:
    content, before = recipe(llama), path.read_bytes()
    change(content, llama, tmp_path)
    with pytest.raises(SltaError, match=words) as caught:
        measured(content, path)
    assert str(path) in caught.value.message or change is leave_out_a_calibration
    assert path.read_bytes() == before
    content["parameters"]["statistics"] = str(path)
    assert problems(content, merging=False) == [caught.value.message]


def test_all_that_does_not_fit_is_said_at_once(no_measuring: None, llama: Family, path: Path, tmp_path: Path) -> None:
    content = recipe(llama, statistics=str(path))
    for change in (change_configuration, change_expert, change_records):
        change(content, llama, tmp_path)
    with pytest.raises(SltaError) as caught:
        measured(content, path)
    assert len(caught.value.message.splitlines()) == 3
    assert problems(content, merging=False) == caught.value.message.splitlines()


def older(path: Path, content: dict[str, Any], **versions: str) -> None:
    """Change what a file says of itself."""
    found = Statistics.load(path)
    info = found.info.model_dump(mode="json")
    info["fingerprint"] |= content
    info["versions"] |= versions
    replace(found, info=Info.model_validate(info)).save(path)


def test_an_entry_that_another_transformers_does_not_know_is_not_compared(
    no_measuring: None, llama: Family, path: Path
) -> None:
    base = Statistics.load(path).info.fingerprint.model_dump()["base"]
    base["config"]["invented_later"] = base["config"].pop("hidden_act")
    older(path, {"base": base}, transformers="99.0")
    measured(recipe(llama), path)
    older(path, {"base": base}, transformers=transformers.__version__)
    with pytest.raises(SltaError, match=r"\(other hidden_act, invented_later\)"):
        measured(recipe(llama), path)


# Levels


def test_a_file_that_lacks_a_level_is_refused_and_not_touched(no_measuring: None, llama: Family, path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(
        SltaError, match=r"lacks the level layer \(it holds attn_mlp\): .*calibrate RECIPE -o FILE --level attn_mlp"
    ):
        measured(recipe(llama), path, "attn_mlp", "layer")
    assert path.read_bytes() == before


# Without a file's name


def cached() -> list[Path]:
    return sorted((Path(os.environ["XDG_CACHE_HOME"]) / "mergekit-slta").glob("*.safetensors"))


def test_each_level_is_kept_in_the_cache_folder_and_measured_once(
    llama: Family, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(recipe(llama), None)
    (file,) = cached()
    assert file.read_bytes() == path.read_bytes()
    both = measured(recipe(llama), tmp_path / "both.safetensors", "layer", "attn_mlp")
    assert both.info.levels == ("layer", "attn_mlp")
    assert cached() == [file]
    measured(recipe(llama), None, "layer")
    assert len(cached()) == 2
    monkeypatch.setattr(measure, "calibrate", None)
    assert same(measured(recipe(llama), None, "attn_mlp", "layer"), both)
    assert same(Statistics.load(tmp_path / "both.safetensors"), both)


def test_a_file_that_is_not_there_is_taken_from_the_cache_which_is_said(
    llama: Family, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for ``calibrate RECIPE -o FILE`` after ``mergekit-yaml``: a copy of the data has the recipe's name."""
    measured(recipe(llama), None)
    (file,) = cached()
    monkeypatch.setattr(measure, "calibrate", None)
    copy = Path(shutil.copy(llama.data[0], tmp_path / "copy.jsonl"))
    content = recipe(replace(llama, data=(copy, *llama.data[1:])))
    taken, found = tmp_path / "taken.safetensors", Statistics.load(path)
    LoaderCache.loaders.clear()
    caplog.set_level("INFO", measure.__name__)
    measured_statistics(families.experiment(content, quiet=False), ["attn_mlp"], taken)
    assert Statistics.load(taken).info.calibration[0].source == "copy.jsonl"
    assert all(torch.equal(gram, found.grams[name]) for name, gram in Statistics.load(taken).grams.items())
    said = [(record.levelname, record.message) for record in caplog.records if str(file) in record.message]
    assert said == [("INFO", measure.REUSED % file)]


def test_an_edit_in_place_has_a_file_of_its_own(family: Family) -> None:
    """Of a row that no sampled byte shows, in a file of the same date."""
    file = family.experts[1] / "model.safetensors"
    before, date = measured(recipe(family), None), file.stat().st_mtime_ns
    edit_tensors(family.experts[1], lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][5].add_(1))
    os.utime(file, ns=(date, date))
    after = measured(recipe(family), None)
    assert before.info.fingerprint == after.info.fingerprint
    assert not torch.equal(before.grams["layer.0.mlp"], after.grams["layer.0.mlp"])


def retrain(family: Family) -> None:
    """Save the second expert again, under the same file name."""
    edit_tensors(family.experts[1], lambda tensors: [tensor.mul_(1.3) for tensor in tensors.values()])


@pytest.mark.parametrize("method", ["slta", "actmat"])
def test_an_expert_that_is_replaced_between_two_merges_of_a_process(
    method: str, family: Family, tmp_path: Path
) -> None:
    content = families.recipe(family, method, calibration=method == "slta")
    first = load_file(families.merge(content, tmp_path / "first") / "model.safetensors")
    retrain(family)
    again = load_file(families.merge(content, tmp_path / "again") / "model.safetensors")
    stored = {file: file.read_bytes() for file in cached()}
    for file in stored:
        file.unlink()
    LoaderCache.loaders.clear()
    expected = load_file(families.merge(content, tmp_path / "expected") / "model.safetensors")
    assert all(torch.allclose(again[name], tensor, atol=1e-6) for name, tensor in expected.items())
    assert not all(torch.allclose(first[name], tensor, atol=1e-3) for name, tensor in expected.items())
    for file in cached():  # what the cache holds of the new expert is what was measured of it anew
        assert file.read_bytes() == stored[file]


def test_an_expert_that_is_replaced_while_it_is_measured_is_refused(family: Family) -> None:
    experiment = families.experiment(recipe(family))
    assert experiment.experts[1].fingerprint()
    retrain(family)
    with pytest.raises(SltaError, match="expert1 have changed while they were read"):
        measured_statistics(experiment, ["attn_mlp"])
    assert cached() == []


def test_every_measurement_has_a_file_of_its_own(family: Family) -> None:
    for arguments in ({}, {"seed": 4}, {}):
        measured(recipe(family, **arguments), None)
    measured(recipe(family), None, "layer")
    edit_config(family.base, rms_norm_eps=1e-3)
    measured(recipe(family), None)
    assert len(cached()) == 4


def test_a_coarser_level_is_written_down_with_the_reason_and_kept(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, path = make_family("lfm2"), tmp_path / "stats.safetensors"
    reason = "it mixes tokens by Lfm2ShortConv, which is not known to have heads"
    fallback = Fallback("head_mlp", "attn_mlp", (0, 2), "Lfm2DecoderLayer", reason)
    sentence = f"Level head_mlp falls back to level attn_mlp in layers 0, 2 (Lfm2DecoderLayer): {reason}."
    assert measured(recipe(family), None, "attn_mlp").info.fallbacks == ()
    assert measured(recipe(family), None, "head_mlp").info.fallbacks == (fallback,)
    found = measured(recipe(family), path, "attn_mlp", "head_mlp", "linear")
    assert found.info.levels == ("attn_mlp", "head_mlp", "linear")
    assert same(found, Statistics.load(path))
    assert found.info.fallbacks == found.select("expert1").info.fallbacks == (fallback,)
    caplog.clear()
    measured(recipe(family, experts=[1], calibration=False), path, "head_mlp")
    assert caplog.messages == [sentence]
    assert [sentence in found.solve(level).text() for level in found.info.levels] == [False, True, False]
    assert report_page(found.solve("head_mlp")).facts["Coarser levels"] == sentence
    assert "Coarser levels" not in report_page(found).facts
