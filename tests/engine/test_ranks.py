"""Processes that share a calibration measure what one alone measures, and fail together."""

import json
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import MakeFamily, WriteRecipe
from safetensors.torch import load_file
from support import families
from support.adapters import write_adapter
from support.command import run
from support.families import Family
from support.html_elements import Elements
from support.merging import worst_error
from support.processes import command_together, torchrun
from support.reference import largest_difference
from support.rounding import distance_rounding, gram_rounding, regression_rounding

from mergekit_slta.checks import examine
from mergekit_slta.engine.ranks import Ranks, joined
from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.regression import RIDGES
from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.nonlinearity.studies import STEPS
from mergekit_slta.slta.grams import Calibration
from mergekit_slta.slta.measure import statistics_of
from mergekit_slta.slta.statistics import Statistics


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_processes_that_compute_on_the_cpu_take_no_gpu(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    join = mock.Mock(side_effect=KeyError)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(KeyError), joined(device):
        pass
    assert join.call_args.args == (backend,)
    monkeypatch.delenv("RANK")  # scripts of clusters set the number of processes for other commands
    with joined(device) as ranks:
        assert ranks == Ranks()


def test_processes_together_merge_to_the_same_tensors(
    make_family: MakeFamily, forks: ForkServerContext, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    """Also where one process alone has begun, and several finish, more than there are batches."""
    family, page = make_family("mixtral", experts=1), tmp_path / "report" / "report.html"
    settings: dict[str, Any] = {"keep": {}, "samples": 6, "report": str(page.parent)}  # with the expert's prompts
    content = families.recipe(family, "featcal", **settings)
    alone = load_file(families.merge(content, tmp_path / "alone") / "model.safetensors")
    said = Elements(page.read_text()).text
    with pytest.raises(families.Interrupted), families.after_layer(1):
        families.merge(content, tmp_path / "together")
    partial = tmp_path / "together" / PARTIAL_OF_MERGE
    assert len(list(partial.glob("layer-*"))) == 2
    recipe = write_recipe(family, "featcal", **settings)
    notes = command_together(forks, 3, "merge", recipe, tmp_path / "together", "--no-write-model-card")
    assert notes.count("have the same prompts, on which the merge cannot keep") == 1
    together = load_file(tmp_path / "together" / "model.safetensors")
    assert worst_error(together, alone) < regression_rounding(RIDGES[0])  # sums over tokens in another order
    assert Elements(page.read_text()).text == said
    assert not partial.exists()


def test_processes_together_merge_adapters_once(
    llama: Family, forks: ForkServerContext, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    adapters = [write_adapter(llama.base, tmp_path / f"adapter{index}", seed=index) for index in range(2)]
    family = Family(llama.base, tuple(Path(f"{llama.base}+{folder}") for folder in adapters), llama.data, llama.config)
    recipe = write_recipe(family, samples=6)
    cache: list[str | Path] = ["--lora-merge-cache", tmp_path / "cache"]
    command_together(forks, 2, "merge", recipe, tmp_path / "out", "--no-write-model-card", *cache)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert sum(path.is_dir() for path in (tmp_path / "cache").iterdir()) == 2


def test_processes_that_see_different_files_refuse_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda ranks, number: [3, number])
    said = f"^The processes see different files in {tmp_path}: name a folder that all of them share.$"
    Ranks(1, 2).require_equal(3, tmp_path)
    with pytest.raises(SltaError, match=said):
        Ranks(1, 2).require_equal(2, tmp_path)


def test_every_process_ends_up_with_the_linearity_that_one_alone_measures(
    llama: Family, forks: ForkServerContext, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    """Also those without a sample of a study."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    recipe = write_recipe(llama, experts=(0, 2))
    options = ["--level", "model", "--level", "layer", "--level", "linear", "--samples", "2", "--quiet"]
    run("linearity", recipe, "-o", alone, *options)
    command_together(forks, 2, "linearity", recipe, "-o", together, *options)
    expected, found = ((folder / "linearity.json").read_text() for folder in (alone, together))
    nearly = json.loads(expected, parse_float=lambda n: pytest.approx(float(n), abs=distance_rounding(1 / STEPS)))
    assert json.loads(found) == nearly


def test_torchrun_calibrate_writes_the_same_file(llama: Family, tmp_path: Path) -> None:
    """Of two experts and the base model, whose task is the third one."""
    content = families.recipe(llama, experts=(0, 1), keep={}, samples=6)
    recipe = families.write_recipe(tmp_path / "recipe.yml", content)
    alone, together, levels = tmp_path / "alone.safetensors", tmp_path / "together.safetensors", ["model", "linear"]
    statistics_of(families.experiment(content), levels, alone)
    asked = [word for level in levels for word in ("--level", level)]
    done = torchrun(2, "-m", "mergekit_slta", "calibrate", recipe, "-o", together, *asked)
    assert done.stdout.count(str(together)) == 1
    one, other = Statistics.load(alone), Statistics.load(together)
    assert largest_difference(other.grams, one.grams) < gram_rounding()
    assert other.info == one.info
    assert torch.equal(other.task, one.task)
    assert torch.equal(other.tokens, one.tokens)
    assert [path.name for path in tmp_path.iterdir() if "together" in path.name] == [together.name]


def fail_on_the_second(index: int) -> None:
    measure = Calibration.take_layer

    def failing(own: Calibration, layer: int, *rest: Any) -> Any:
        if layer == 1 and index == 1:
            setattr(dist, "destroy_process_group", lambda: os._exit(1))  # noqa: B010 - nccl's would wait for the other
            raise SltaError("the disk of rank 1 is gone")
        return measure(own, layer, *rest)

    setattr(Calibration, "take_layer", failing)  # noqa: B010, because mypy refuses to assign to a method


def test_an_error_on_one_rank_ends_all_of_them(
    llama: Family, forks: ForkServerContext, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    stats = tmp_path / "stats.safetensors"
    recipe = write_recipe(llama, samples=6)
    said = command_together(forks, 2, "calibrate", recipe, "-o", stats, patch=fail_on_the_second)
    assert "Error: the disk of rank 1 is gone" in said
    assert not stats.exists()
    went_on = statistics_of(families.experiment(families.recipe(llama, samples=6)), ["attn_mlp"], stats)
    assert largest_difference(went_on.grams, families.measure(llama, "attn_mlp")) < gram_rounding()


def refuse_on_the_second(index: int) -> None:
    original = examine.examine

    def full(*arguments: Any, **purpose: Any) -> Any:
        original(*arguments, **purpose)
        raise SltaError("the disk of rank 1 is full")

    if index == 1:
        examine.examine = full


def test_what_one_process_finds_wrong_ends_all_before_anything_is_written(
    llama: Family, forks: ForkServerContext, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = command_together(forks, 2, "merge", write_recipe(llama, samples=4), out, patch=refuse_on_the_second)
    assert said.count("Error: the disk of rank 1 is full") == 1
    assert not out.exists()
