"""What a merge is said to take, and folders and disks that have no room for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import families
from support.examining import feature_recipe, grow, look, only, problems
from support.families import Family
from torch.overrides import TorchFunctionMode

from mergekit_slta.checks import space
from mergekit_slta.checks.space import solving_needs
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.trace import trace


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with 50 GB free."""
    usage = shutil.disk_usage("/")._replace(free=50 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(device: str, family: Family) -> None:
    problem = only(families.recipe(family, experts=[0]), options={"device": device})
    assert problem.startswith(f"PyTorch cannot compute on the device '{device}' (")


class WithoutFloat64(TorchFunctionMode):
    """Refuses float64 as torch does on Apple's GPUs."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("dtype") is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return function(*args, **(kwargs or {}))


def test_a_device_without_float64() -> None:
    space.device("cpu")
    with (
        WithoutFloat64(),
        pytest.raises(SltaError, match="device 'cpu' \\(Cannot convert a MPS Tensor to float64 dtype"),
    ):
        space.device("cpu")


def test_a_report_needs_a_folder(family: Family, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for recipe in (feature_recipe, families.recipe):
        assert f"'report: {tmp_path}/file'" in only(recipe(family, samples=6, report=str(tmp_path / "file")))


def test_layers_may_be_solved_into_a_new_folder_but_not_into_a_file(family: Family, tmp_path: Path) -> None:
    assert problems(feature_recipe(family, scratch=str(tmp_path / "new" / "scratch"))) == []
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file" in only(feature_recipe(family, scratch=str(tmp_path / "file" / "scratch")))


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


# Feature merges


@pytest.mark.usefixtures("disk")
def test_what_a_feature_merge_takes_is_said(family: Family, tmp_path: Path) -> None:
    default = Path(os.environ["XDG_CACHE_HOME"]) / "mergekit-slta"
    for folder, parameters in ((default, {}), (tmp_path / "scratch", {"scratch": str(tmp_path / "scratch")})):
        (note,) = look(feature_recipe(family, **parameters)).notes
        assert note.startswith("'featcal' takes up to ") and f"on the disk with {folder} until the output is" in note
        assert not folder.exists()
    assert look(feature_recipe(family), merging=False).notes == []


def test_the_needs_of_a_model_of_known_size() -> None:
    """Two layers of 12.6 million parameters each, with maps that read up to 2752 values."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, architectures=["LlamaForCausalLM"])
    memory, disk = solving_needs(trace(config), experts=3)
    assert memory == pytest.approx(5 * 4 * 12.65e6 + 4 * 8 * 2752**2, rel=0.01)
    assert disk == pytest.approx(2 * 4 * 12.65e6, rel=0.01)


@pytest.mark.usefixtures("disk")
def test_the_layers_and_the_output_share_a_disk(family: Family, tmp_path: Path) -> None:
    grow(family.base, 60 * 10**9)
    recipe = feature_recipe(family, experts=[0], scratch=str(tmp_path / "scratch"))
    problem = only(recipe, out_path=tmp_path / "out")
    assert "too little for the merged model (about 60 GB) and the solved layers (about " in problem
    assert problems(recipe) == []
