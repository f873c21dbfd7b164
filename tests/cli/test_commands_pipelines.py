"""What scripts and continuous integration rely on: exit codes, JSON, and what is said without a terminal."""

import errno
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import WriteRecipe
from huggingface_hub.errors import HfHubHTTPError
from mergekit.common import ModelPath
from support import families
from support.calibration_samples import source_of
from support.command import run
from support.families import Family

from mergekit_slta.cli import commands
from mergekit_slta.errors import MachineError, SltaError, all_of, files_named, reading
from mergekit_slta.evaluation.evaluate import Comparison, TaskComparison, TaskScore
from mergekit_slta.models.hub import asking


def test_a_fault_of_the_recipe_outweighs_one_of_the_machine() -> None:
    machine, recipe = (mock.Mock(side_effect=kind("Something is wrong.")) for kind in (MachineError, SltaError))
    for calls, kind in (([machine, machine], MachineError), ([machine, recipe], SltaError)):
        with pytest.raises(SltaError) as caught:
            all_of(calls)
        assert type(caught.value) is kind and caught.value.exit_code == {MachineError: 3, SltaError: 1}[kind]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_check_reports_a_missing_device_as_the_machines(family: Family, write_recipe: WriteRecipe) -> None:
    said = run("check", write_recipe(family), "--device", "cuda", "--json", "-", code=3)
    content = json.loads(said.stdout)
    assert content["exit_code"] == 3 and "cannot compute on the device 'cuda'" in content["problems"][0]
    run("check", write_recipe(family, sampels=3), "--device", "cuda", code=1)


def test_a_hub_that_does_not_answer_may_answer_later() -> None:
    """The tests have no network."""
    assert "the Hub cannot be reached" in run("solve", "hf:org/none/s.safetensors", code=3).output


@pytest.mark.parametrize(
    "block", [asking(ModelPath(path="org/model")), reading("The model")], ids=["asking", "reading"]
)
def test_a_disk_that_a_download_fills_is_no_fault_of_the_model(block: AbstractContextManager[None]) -> None:
    with pytest.raises(MachineError, match="No space left"), block:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError("Not enough disk space. Needed: 1"), 3), (MemoryError(), 3), (ValueError("No such column"), 1)],
    ids=["disk", "memory", "dataset"],
)
def test_a_lack_of_room_for_a_dataset_is_no_fault_of_the_dataset(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", mock.Mock(side_effect=error))
    with pytest.raises(SltaError) as caught, files_named():
        _ = source_of(f"hf:{tmp_path}", mock.Mock()).records
    assert caught.value.exit_code == code


@pytest.mark.parametrize(("status", "code"), [(429, 3), (503, 3), (403, 1)])
def test_a_hub_that_is_overloaded_may_answer_later(status: int, code: int) -> None:
    with pytest.raises(SltaError) as caught, asking(ModelPath(path="org/model")):
        raise HfHubHTTPError("The Hub refuses.", response=mock.Mock(status_code=status, headers={}))
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("arguments", "place", "said"),
    [
        (["ask", "m", "-o", "a.jsonl"], "mergekit_slta.asking.ask.ask", "resumes after the finished answers"),
        (["evaluate", "RECIPE", "OUT"], "mergekit_slta.evaluation.evaluate.evaluate", "starts over"),
        (["linearity", "RECIPE", "-o", "L"], "mergekit_slta.nonlinearity.studies.linearity", "starts over"),
        (["calibrate", "RECIPE", "-o", "S"], "mergekit_slta.slta.measure.statistics_of", "resumes after the finished"),
        (["merge", "RECIPE", "OUT"], "mergekit_slta.host.run.set_aside", "resumes after the finished layers"),
        (["merge", "SFTM", "OUT"], "mergekit_slta.host.run.set_aside", "starts over"),
    ],
)
def test_after_an_interruption_the_user_knows_what_the_same_command_does(
    arguments: list[str],
    place: str,
    said: str,
    llama: Family,
    write_recipe: WriteRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("OUT").mkdir()
    names = {"RECIPE": write_recipe(llama), "SFTM": write_recipe(llama, "sftm", calibration=False, name="sftm.yml")}
    monkeypatch.setattr(place, mock.Mock(side_effect=KeyboardInterrupt))
    found = run(*(names.get(argument, argument) for argument in arguments), code=commands.INTERRUPTED).stderr
    assert f"Interrupted: the same command {said}" in found


def test_a_resumed_merge_says_how_much_is_done_and_prints_no_bars(llama: Family, tmp_path: Path) -> None:
    recipe, out = families.recipe(llama, level="layer", samples=2), tmp_path / "out"
    with pytest.raises(families.Interrupted), families.after_layer(1):
        families.merge(recipe, out)
    said = run("merge", families.write_recipe(tmp_path / "recipe.yml", recipe), out).stderr
    assert "The first 2 layers of this run are done." in said and "it/s" not in said and "%|" not in said


def test_every_result_has_one_frame_as_json(family: Family, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    recipe, out, file = write_recipe(family, samples=2, level="model"), tmp_path / "out", tmp_path / "r.json"

    def found(*words: object, code: int = 0) -> dict[str, Any]:
        content = json.loads(run(*words, "--json", "-", *["--quiet"] * (words[0] != "auto"), code=code).stdout)
        run(*words, "--json", file, code=code)
        again = json.loads(file.read_text())
        assert again == content or words[0] == "check"  # the room on the disk may change
        assert [*content][:3] == ["command", "exit_code", "problems"]
        assert content.pop("command") == words[0] and content.pop("exit_code") == code
        assert bool(content.pop("problems")) == bool(code)
        return content

    assert found("check", recipe)["needs"]["merged"] > 0
    assert found("merge", recipe, out)["manifest"]["method"] == "slta"
    assert found("verify", recipe, out)["tensors"] > 0
    assert found("evaluate", recipe, out).keys() == {"tasks", "unscored", "ranking"}
    assert "config.json" in dict(found("publish", out, "org/name", "--dry-run")["files"])
    models = [family.base, *family.experts[:2]]
    for task, data in enumerate(family.data[:2]):
        families.write_records(data, task, records=33)  # 30 of them calibrate
    prompts = [word for data in family.data[:2] for word in ("--calibration", data)]
    options = ["-o", tmp_path / "auto", "--no-keep-base", *prompts]
    assert found("auto", *models, *options).keys() == {"lines", "best"}

    (out / "model.safetensors").unlink()
    missing = tmp_path / "none"
    for words in (
        *(["check", missing], ["merge", missing, out], ["verify", recipe, missing], ["verify", recipe, out]),
        *(["evaluate", recipe, missing], ["publish", missing, "org/name"], ["auto", missing, *models[1:], *options]),
    ):
        assert found(*words, code=1) == {}
    assert "Missing argument" in run("check", "--json", file, code=2).stderr
    assert json.loads(file.read_text())["exit_code"] == 2


def test_evaluate_fails_where_a_task_is_not_scored(
    llama: Family, write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unscored in [(), ("code",)]:
        names = ("base model", "expert math", "out")
        scores = dict.fromkeys(names, TaskScore(None, None, None, 0, 0, None, 0.0, None, 1.0))
        comparison = Comparison({"math": TaskComparison("math", 9, 9, 0, 0, 9, scores, {})}, unscored)
        monkeypatch.setattr("mergekit_slta.evaluation.evaluate.evaluate", lambda *arguments, it=comparison: it)
        run("evaluate", write_recipe(llama), tmp_path, code=len(unscored))
