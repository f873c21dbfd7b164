"""A calibration that is interrupted goes on where it was and ends in the same file, byte for byte."""

import functools
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from mergekit.io.tasks import LoaderCache
from safetensors import SafetensorError
from safetensors.torch import save_file
from support import damaged_state, families
from support.families import Family

from mergekit_slta.engine.partial import LOCK, STATE, Hidden, Partial, remove
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.slta.measure import measured_statistics

LEVELS = ("layer", "attn_mlp")
DEEP = 8


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


# In this process

Measured = tuple[Family, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], Measured]:
    """A family of four layers of an architecture, and its Gram matrices measured without an interruption."""

    @functools.cache
    def family_of(architecture: str) -> Family:
        config = families.config_of(architecture, num_hidden_layers=4)
        return families.make_family(tmp_path_factory.mktemp(architecture), config)

    @functools.cache
    def get(architecture: str, levels: tuple[str, ...]) -> Measured:
        family = family_of(architecture)
        return family, families.measure(family, *levels, batch_tokens=1)

    return get


@pytest.mark.parametrize(
    ("architecture", "levels", "steps"),
    [
        *(("llama", LEVELS, steps) for steps in (1, 8, 20, 30, 48)),
        *(("llama", ("model",), steps) for steps in (1, 30)),
        *(("llama", ("model", "linear"), steps) for steps in (20, 48)),
        *(("gemma4", ("model", "layer"), steps) for steps in (8, 30)),
    ],
    ids=str,
)
def test_goes_on_from_the_last_finished_layer(
    architecture: str,
    levels: tuple[str, ...],
    steps: int,
    measured: Callable[[str, tuple[str, ...]], Measured],
    tmp_path: Path,
) -> None:
    family, expected = measured(architecture, levels)
    seen: list[int] = []

    def interrupt(samples: int) -> None:
        seen.append(samples)
        if len(seen) == steps:
            raise Interrupted

    def partial() -> Partial:
        opened = Partial(tmp_path / "state", {"what": "this"})
        opened.begin()
        return opened

    with pytest.raises(Interrupted):
        families.measure(family, *levels, batch_tokens=1, partial=partial(), progress=interrupt)
    finished = partial().finished_layers()
    assert finished == max(0, sum(seen) - 1) // 12  # the last sample's layer is measured, but not yet written
    again: list[int] = []
    LoaderCache.loaders.clear()
    grams = families.measure(family, *levels, batch_tokens=1, partial=partial(), progress=again.append)
    assert again[0] == finished * 12
    assert sum(again) == 4 * 12
    assert set(grams) == set(expected)
    assert all(torch.equal(grams[name], expected[name]) for name in expected)


def test_a_gpu_that_is_not_asked_for_is_left_alone(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have filled it, and a forked process cannot use it."""

    def refuse() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    partial = Partial(tmp_path / "state", {})
    partial.begin()
    assert families.measure(family, "layer", partial=partial)


def states(*keys: tuple[int, int]) -> Hidden:
    return {key: torch.randn(3, 4) for key in keys}


def test_a_layer_counts_once_its_grams_are_written(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "state", {})
    partial.begin()
    hidden = states((0, 0), (0, 1), (1, 0))
    partial.save_hidden(0, 0, hidden)
    assert partial.finished_layers() == 0
    grams = {"layer.0": torch.randn(2, 3, 3, dtype=torch.float64)}
    partial.finish_layer(0, grams)
    reopened = Partial(tmp_path / "state", {})
    assert reopened.finished_layers() == 1
    assert torch.equal(reopened.tensors(1)["layer.0"], grams["layer.0"])
    assert set(reopened.hidden(0)) == set(hidden)
    assert all(torch.equal(reopened.hidden(0)[key], tensor) for key, tensor in hidden.items())


def test_only_the_last_hidden_states_are_kept(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "state", {})
    partial.begin()
    sizes = []
    for layer in range(4):
        partial.save_hidden(layer, 0, states((0, 0)))
        partial.finish_layer(layer, {f"layer.{layer}": torch.zeros(1, 1, 1, dtype=torch.float64)})
        sizes.append(len(list(partial.folder.glob("hidden-*"))))
    assert sizes == [1, 1, 1, 1]


def test_finishing_a_layer_keeps_what_a_faster_rank_has_written_after_it(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "state", {})
    partial.begin()
    for rank in (0, 1):
        partial.save_hidden(0, rank, states((0, rank)))
    partial.save_hidden(1, 1, states((0, 1)))
    partial.finish_layer(0, {"layer.0": torch.zeros(2, 1, 1, dtype=torch.float64)})
    partial.save_hidden(1, 0, states((0, 0)))
    partial.finish_layer(1, {"layer.1": torch.zeros(2, 1, 1, dtype=torch.float64)})
    assert set(partial.hidden(1)) == {(0, 0), (0, 1)}


def test_lost_hidden_states_start_it_over(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "state", {})
    partial.begin()
    partial.save_hidden(0, 0, states((0, 0)))
    partial.finish_layer(0, {"layer.0": torch.zeros(1, 1, 1, dtype=torch.float64)})
    next(partial.folder.glob("hidden-*")).unlink()
    assert Partial(tmp_path / "state", {}).finished_layers() == 0


def test_a_folder_without_a_state_is_taken(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    partial = Partial(tmp_path / "state", {"base": "a"})
    partial.begin()
    assert partial.finished_layers() == 0


@pytest.mark.parametrize("name", ["notes.txt", STATE])
def test_a_folder_of_the_user_is_neither_taken_nor_removed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"my own": 1}')
    with pytest.raises(SltaError, match="holds notes.txt, which is no unfinished work|belongs to another measurement"):
        Partial(tmp_path, {"base": "a"})
    assert not Partial.is_left_over(tmp_path, LEVELS)


@pytest.mark.parametrize("name", ["layer-1.md", "tmpfolder/notes", "notes.txt"])
def test_a_rest_beside_files_of_the_user_is_not_removed(name: str, tmp_path: Path) -> None:
    Partial(tmp_path, {}).begin()
    for rest in ("layer-0000.safetensors", ".hidden-0000-0000.safetensors.my.host.12", ".tmpa1B2c3", ".DS_Store"):
        (tmp_path / rest).touch()
    assert Partial.is_left_over(tmp_path, LEVELS)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert not Partial.is_left_over(tmp_path, LEVELS)


def test_only_the_first_rank_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever comes second hears it from its own first rank."""
    monkeypatch.setattr(Ranks, "wait", lambda self: None)
    monkeypatch.setattr(Ranks, "gather", lambda self, number: [number, 0.0])
    first, second = (Partial(tmp_path / "state", {}) for _ in range(2))
    first.enter(Ranks(0, 2))
    second.enter(Ranks(1, 2))
    with pytest.raises(click.exceptions.Exit):
        Partial(tmp_path / "state", {}).enter(Ranks(0, 2))
    assert "Error: Another process is at work in" in capsys.readouterr().err
    first.release()
    Partial(tmp_path / "own", {}).enter(Ranks(1, 2))
    assert {file.name for file in (tmp_path / "own").iterdir()} == {STATE}


# Killed


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    config = families.config_of("llama", num_hidden_layers=DEEP)
    return families.make_family(tmp_path_factory.mktemp("deep"), config, records=30)


@pytest.fixture(scope="module")
def uninterrupted(family: Family, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "stats.safetensors"
    LoaderCache.loaders.clear()
    measured_statistics(families.experiment(recipe(family)), LEVELS, path)
    return path.read_bytes()


def recipe(family: Family, **changes: Any) -> dict[str, Any]:
    return families.recipe(family, samples=30, batch_tokens=40, **changes)


def measure(content: dict[str, Any], path: Path) -> None:
    measured_statistics(families.experiment(content), LEVELS, path)


@pytest.fixture
def finish(forks: ForkServerContext, family: Family) -> Callable[[Path], bytes]:
    def run(path: Path) -> bytes:
        process = families.started(forks, measure, recipe(family), path)
        process.join(120)
        assert process.exitcode == 0
        return path.read_bytes()

    return run


def test_killed_between_layers(
    forks: ForkServerContext,
    family: Family,
    finish: Callable[[Path], bytes],
    uninterrupted: bytes,
    tmp_path: Path,
) -> None:
    path = tmp_path / "stats.safetensors"
    process = families.started(forks, measure, recipe(family), path, stop_after=2)
    process.kill()
    process.join()
    assert not path.exists()
    assert Partial(partial_of(path), {}).finished_layers() == 3
    assert finish(path) == uninterrupted
    assert not partial_of(path).exists()


def test_another_process_is_kept_out_until_the_first_has_ended(
    forks: ForkServerContext, family: Family, uninterrupted: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "stats.safetensors"
    process = families.started(forks, measure, recipe(family), path, stop_after=2)
    before = {file: file.read_bytes() for file in partial_of(path).iterdir()}
    with pytest.raises(SltaError, match="Another process is at work in .*partial: wait until it has ended"):
        measured_statistics(families.experiment(recipe(family)), LEVELS, path)
    assert {file: file.read_bytes() for file in partial_of(path).iterdir()} == before
    process.kill()
    process.join()
    measured_statistics(families.experiment(recipe(family)), LEVELS, path)
    assert path.read_bytes() == uninterrupted


def kill_at_random(
    moments: random.Random, forks: ForkServerContext, family: Family, path: Path, duration: float
) -> None:
    process = families.started(forks, measure, recipe(family), path)
    process.join(moments.uniform(0, duration))
    process.kill()
    process.join()


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)], ids=lambda kills: f"{kills} kills")
def test_killed_at_any_moment(
    kills: int,
    forks: ForkServerContext,
    family: Family,
    finish: Callable[[Path], bytes],
    uninterrupted: bytes,
    tmp_path: Path,
) -> None:
    process = families.started(forks, measure, recipe(family), tmp_path / "timed.safetensors")
    begin = time.perf_counter()
    process.join()
    duration = time.perf_counter() - begin
    moments = random.Random(0)
    for kill in range(kills):
        path = tmp_path / f"stats{kill}.safetensors"
        for _ in range(1 + kill % 3):  # some are killed again while they go on
            kill_at_random(moments, forks, family, path, duration)
        assert finish(path) == uninterrupted
        assert not partial_of(path).exists()


# Foreign states


def interrupt_after(last: int) -> Callable[..., None]:
    """A ``Partial.finish_layer`` that ends the process, as it were, after a layer."""
    finish_layer = Partial.finish_layer

    def interrupt(self: Partial, layer: int, grams: dict[str, torch.Tensor]) -> None:
        finish_layer(self, layer, grams)
        if layer == last:
            raise Interrupted

    return interrupt


@pytest.fixture(scope="module")
def left_by_an_interruption(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that an interrupted calibration leaves."""
    path = tmp_path_factory.mktemp("interrupted") / "stats.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "finish_layer", interrupt_after(2))
        with pytest.raises(Interrupted):
            measured_statistics(families.experiment(recipe(family)), LEVELS, path)
    return partial_of(path)


@pytest.fixture
def interrupted(left_by_an_interruption: Path, tmp_path: Path) -> Path:
    """The path of a statistics file whose calibration was interrupted; a test may change what that left."""
    path = tmp_path / "stats.safetensors"
    shutil.copytree(left_by_an_interruption, partial_of(path))
    return path


def test_another_configuration_of_the_base_model_is_refused(family: Family, interrupted: Path, tmp_path: Path) -> None:
    base = shutil.copytree(family.base, tmp_path / "other base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    other = Family(base, family.experts, family.data, family.config)
    with pytest.raises(SltaError, match="other base"):
        measured_statistics(families.experiment(recipe(other)), LEVELS, interrupted)


def test_a_damaged_state_is_named(family: Family, interrupted: Path) -> None:
    (partial_of(interrupted) / "state.json").write_text("{")
    with pytest.raises(
        SltaError, match=f"state.json is damaged .*: delete the folder {re.escape(str(partial_of(interrupted)))}"
    ):
        measured_statistics(families.experiment(recipe(family)), LEVELS, interrupted)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Path, bytes]:
    """A family of four layers, a statistics file whose calibration ended after three, and its content when finished."""
    family = families.make_family(tmp_path_factory.mktemp("shallow"), families.config_of("llama", num_hidden_layers=4))
    path = tmp_path_factory.mktemp("cut") / "stats.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "finish_layer", interrupt_after(2))
        with pytest.raises(Interrupted):
            measured_statistics(families.experiment(shallow_recipe(family)), LEVELS, path)
    LoaderCache.loaders.clear()
    whole = path.with_name("whole.safetensors")
    measured_statistics(families.experiment(shallow_recipe(family)), LEVELS, whole)
    return family, path, whole.read_bytes()


def shallow_recipe(family: Family) -> dict[str, Any]:
    return families.recipe(family, samples=3, batch_tokens=40)


@pytest.mark.parametrize("name", damaged_state.DAMAGES)
def test_a_damaged_folder_changes_nothing_or_is_refused(
    name: str, shallow: tuple[Family, Path, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, cut, whole = shallow
    path = tmp_path / cut.name
    folder = shutil.copytree(partial_of(cut), partial_of(path))
    damaged_state.DAMAGES[name](folder)
    if name in damaged_state.REFUSED:
        with pytest.raises(SltaError, match=f"state.json is damaged .*: delete the folder {re.escape(str(folder))}"):
            measured_statistics(families.experiment(shallow_recipe(family)), LEVELS, path)
        return
    measured_statistics(families.experiment(shallow_recipe(family)), LEVELS, path)
    assert path.read_bytes() == whole
    assert not folder.exists()
    if name in damaged_state.NOTICED:
        said = [record.message for record in caplog.records if "computed again" in record.message]
        assert len(said) == 1 and str(folder) in said[0]


def test_a_full_disk_loses_nothing(
    family: Family, uninterrupted: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stats.safetensors"
    save = save_file

    def save_until_full(tensors: dict[str, torch.Tensor], file: Path) -> None:
        if "layer-0003" in file.name:
            raise SafetensorError("No space left on device")
        save(tensors, file)

    with monkeypatch.context() as patch:
        patch.setattr("mergekit_slta.engine.partial.save_file", save_until_full)
        with pytest.raises(SltaError, match="layer-0003.safetensors cannot be written .*No space left.*: make room"):
            measured_statistics(families.experiment(recipe(family)), LEVELS, path)
    assert len(list(partial_of(path).glob("layer-*"))) == 3
    LoaderCache.loaders.clear()
    measured_statistics(families.experiment(recipe(family)), LEVELS, path)
    assert path.read_bytes() == uninterrupted


@pytest.mark.parametrize(
    ("changes", "levels", "words"),
    [
        ({"seed": 1}, LEVELS, "settings"),
        ({"max_tokens": 5}, LEVELS, "tokens"),
        ({"experts": [1, 0]}, LEVELS, "experts"),
        ({}, ("layer",), "levels"),
    ],
    ids=lambda value: str(value),
)
def test_the_state_of_another_calibration_is_refused_and_left_alone(
    changes: dict[str, Any], levels: tuple[str, ...], words: str, family: Family, interrupted: Path
) -> None:
    before = {file: file.read_bytes() for file in partial_of(interrupted).iterdir()}
    with pytest.raises(SltaError, match=f"belongs to another measurement or merge .*{words}"):
        measured_statistics(families.experiment(recipe(family, **changes)), levels, interrupted)
    assert {file: file.read_bytes() for file in partial_of(interrupted).iterdir()} == before
    assert not interrupted.exists()


def test_another_base_model_is_refused(family: Family, interrupted: Path) -> None:
    other = Family(family.experts[0], (family.base, family.experts[1]), family.data, family.config)
    with pytest.raises(SltaError, match="other base"):
        measured_statistics(families.experiment(recipe(other)), LEVELS, interrupted)


def test_the_same_calibration_goes_on(family: Family, interrupted: Path, uninterrupted: bytes) -> None:
    measured_statistics(families.experiment(recipe(family)), LEVELS, interrupted)
    assert interrupted.read_bytes() == uninterrupted
    assert not partial_of(interrupted).exists()


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_kill_while_the_folder_is_removed_leaves_nothing_that_counts(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = Partial(tmp_path / "state", {"base": "a"})
    partial.begin()
    partial.save_hidden(0, 0, states((0, 0)))
    for layer in range(2):
        partial.finish_layer(layer, {f"layer.{layer}": torch.zeros(1)})
    partial.finish({"edge": torch.zeros(1)})

    def killed(folder: Path, ignore_errors: bool) -> None:
        for file in sorted(folder.iterdir())[kept:]:
            file.unlink()
        raise Interrupted

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Interrupted):
        remove(partial.folder)
    again = Partial(tmp_path / "state", {"base": "a"})
    again.enter(Ranks())
    assert not again.complete
    assert again.take_up(Ranks()) == (0, None)
    assert {file.name for file in again.folder.iterdir()} == {STATE, LOCK}
