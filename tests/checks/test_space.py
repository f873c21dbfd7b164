"""What a merge is said to take, and folders and disks that have no room for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import families
from support.examining import feature_recipe, grow, only, problems
from support.families import Family

from mergekit_slta.checks.data import content_of
from mergekit_slta.checks.needs import needs
from mergekit_slta.featcal.solved import FORMAT
from mergekit_slta.files import PARTIAL_OF_MERGE


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with 50 GB free."""
    usage = shutil.disk_usage("/")._replace(free=50 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(device: str, family: Family) -> None:
    problem = only(families.recipe(family, experts=[0]), options={"device": device})
    assert problem.startswith(f"PyTorch cannot compute on the device '{device}' (")


def test_a_report_needs_a_folder(family: Family, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for recipe in (feature_recipe, families.recipe):
        assert f"'report: {tmp_path}/file'" in only(recipe(family, samples=6, report=str(tmp_path / "file")))


def test_the_output_is_a_folder_that_can_be_made(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    recipe = families.recipe(family, experts=[0])
    assert only(recipe, out_path=file / "out").startswith(f"{file}/out cannot be created: {file} is not")


@pytest.mark.usefixtures("disk")
def test_a_disk_that_is_too_small_for_the_output(family: Family, tmp_path: Path) -> None:
    grow(family.base, 100 * 10**9)
    recipe = families.recipe(family, experts=[0], dtype="float32")
    assert problems(recipe) == []
    assert only(recipe, out_path=tmp_path / "a" / "b").startswith(f"The disk with {tmp_path}/a/b has ")
    assert "too little for the merged model (about" in only(recipe, out_path=tmp_path)
    assert problems(recipe, out_path=tmp_path, merging=False) == []


@pytest.mark.usefixtures("disk")
def test_the_layers_and_the_output_share_a_disk(family: Family, tmp_path: Path) -> None:
    grow(family.base, 60 * 10**9)
    recipe = feature_recipe(family, experts=[0])
    problem = only(recipe, out_path=tmp_path / "out")
    assert "too little for the merged model (about 60 GB) and the solved layers (about " in problem
    assert problems(recipe) == []


def test_the_layers_of_a_killed_merge_need_no_second_room(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = feature_recipe(family, experts=[0])
    found = needs(families.experiment(recipe))
    usage = shutil.disk_usage("/")._replace(free=found.merged + found.solved // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert "too little for" in only(recipe, out_path=tmp_path / "out")
    experiment, folder = families.experiment(recipe), tmp_path / "out" / PARTIAL_OF_MERGE
    folder.mkdir(parents=True)
    with (folder / "layer-0000.safetensors").open("wb") as file:
        file.truncate(found.solved // 2 + 1)
    own = {"format": FORMAT, "experts": [content_of(experiment, task.reference) for task in experiment.recipe.experts]}
    for run, fits in [(own | {"experts": ["another"]}, False), (own | {"format": 0}, False), (own, True)]:
        (folder / "run.json").write_text(json.dumps(run))
        assert (problems(recipe, out_path=tmp_path / "out") == []) == fits
