"""A calibration that is interrupted goes on after its finished layers and ends in the same file, byte for byte."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import families
from support.families import Family, Interrupted, after_layer
from support.merging import same_tensors

from mergekit_slta.engine.partial import LOCK, RUN, Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.slta.measure import statistics_of

LEVELS = ("layer", "attn_mlp")
DEEP = 6


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def begun(folder: Path, run: str = "") -> Partial:
    partial = Partial(folder)
    with partial.held(Ranks()):
        partial.begin({"base": run}, Ranks())
    return partial


@pytest.mark.parametrize(
    ("architecture", "levels", "finished"),
    [
        ("llama", ("model", "linear"), 2),
        ("gemma4", ("model", "layer"), 3),  # its layers pass more than hidden states to later ones
    ],
    ids=str,
)
def test_finished_layers_are_not_measured_again(
    architecture: str, levels: tuple[str, ...], finished: int, tmp_path: Path
) -> None:
    family = families.make_family(tmp_path / "models", families.config_of(architecture, num_hidden_layers=4))
    expected = families.measure(family, *levels, batch_tokens=1)
    partial = begun(tmp_path / "partial")
    with pytest.raises(Interrupted), after_layer(finished - 1):
        families.measure(family, *levels, batch_tokens=1, partial=partial)
    written = {file: file.stat().st_mtime_ns for file in partial.folder.glob("layer-*")}
    grams = families.measure(family, *levels, batch_tokens=1, partial=begun(partial.folder))
    assert len(written) == finished and written == {file: file.stat().st_mtime_ns for file in written}
    assert same_tensors(grams, expected)


@pytest.mark.parametrize("content", ["notes.txt", "layer-0000.safetensors"])
def test_a_folder_of_the_user_is_neither_taken_nor_removed(content: str, tmp_path: Path) -> None:
    (tmp_path / content).write_text('{"my own": 1}')
    with pytest.raises(SltaError, match=f"holds {content}, which no unfinished run writes"):
        begun(tmp_path)
    assert (tmp_path / content).read_text() == '{"my own": 1}'


def test_a_folder_that_a_killed_process_had_only_made_is_taken(tmp_path: Path) -> None:
    for rest in (LOCK, ".run.json.my.host.12", ".nfs0001"):
        (tmp_path / rest).touch()
    begun(tmp_path, "a")
    assert json.loads((tmp_path / RUN).read_text()) == {"base": "a"}


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    first, second = Partial(tmp_path), Partial(tmp_path)
    said = "Another process or thread is working in"
    with first.held(Ranks()), pytest.raises(SltaError, match=said), second.held(Ranks()):
        pass


def test_a_run_that_ends_before_it_has_begun_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Interrupted), Partial(tmp_path / "partial").held(Ranks()):
        raise Interrupted
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_released_before_its_file_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network disks keep a deleted file while it is open, so that its folder would stay; Windows deletes none."""
    partial, unlink = Partial(tmp_path / "partial"), Path.unlink

    def closed(path: Path, **options: bool) -> None:
        assert not partial._lock.is_locked
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", closed)
    with partial.held(Ranks()):
        assert (partial.folder / LOCK).exists()
    assert not partial.folder.exists()


def test_another_rank_that_is_done_leaves_the_lock_of_the_first(tmp_path: Path) -> None:
    with Partial(tmp_path / "partial").held(Ranks()):
        rank = Partial(tmp_path / "partial")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "gather", lambda ranks, number: [number])
            with rank.held(Ranks(1, 2)):
                pass
        assert (tmp_path / "partial" / LOCK).exists()


def test_a_kill_while_the_folder_is_removed_leaves_an_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = begun(tmp_path / "partial", "a")
    partial.write(0, {"layer.0": torch.zeros(1)})
    partial.write(1, {"edge": torch.zeros(1)})
    monkeypatch.setattr(shutil, "rmtree", mock.Mock(side_effect=Interrupted))
    with pytest.raises(Interrupted):
        partial.remove()
    assert not begun(partial.folder, "a").finished(1)


# Left by an interruption


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    config = families.config_of("llama", num_hidden_layers=DEEP)
    return families.make_family(tmp_path_factory.mktemp("deep"), config, records=8)


def recipe(family: Family, **changes: Any) -> dict[str, Any]:
    return families.recipe(family, samples=8, **changes)


def measure(content: dict[str, Any], path: Path, levels: tuple[str, ...] = LEVELS) -> None:
    statistics_of(families.experiment(content), levels, path)


@pytest.fixture(scope="module")
def left(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that an interrupted calibration leaves."""
    path = tmp_path_factory.mktemp("interrupted") / "stats.safetensors"
    with pytest.raises(Interrupted), after_layer(DEEP - 2):
        measure(recipe(family), path)
    return partial_of(path)


@pytest.fixture
def interrupted(left: Path, tmp_path: Path) -> Path:
    """The path of a statistics file whose calibration was interrupted; a test may change what that left."""
    path = tmp_path / "stats.safetensors"
    shutil.copytree(left, partial_of(path))
    return path


DAMAGES: list[Callable[[Path], object]] = [
    lambda file: file.write_bytes(file.read_bytes()[:-8]),
    lambda file: file.write_bytes(b""),
    Path.unlink,
]


def test_layers_whose_files_are_damaged_are_computed_again(family: Family, interrupted: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    measure(recipe(family), whole)
    for layer, damage in enumerate(DAMAGES):
        damage(partial_of(interrupted) / f"layer-{layer:04d}.safetensors")
    measure(recipe(family), interrupted)
    assert interrupted.read_bytes() == whole.read_bytes()
    assert not partial_of(interrupted).exists()


@pytest.mark.parametrize(
    ("changes", "levels", "word"), [({"experts": [1, 0]}, LEVELS, "models"), ({}, ("layer",), "levels")], ids=str
)
def test_the_folder_of_another_calibration_is_refused_and_left_alone(
    changes: dict[str, Any], levels: tuple[str, ...], word: str, family: Family, interrupted: Path
) -> None:
    before = {file: file.read_bytes() for file in partial_of(interrupted).iterdir()}
    with pytest.raises(SltaError, match=f"holds . finished layers of another run .*different .*{word}"):
        measure(recipe(family, **changes), interrupted, levels)
    assert {file: file.read_bytes() for file in partial_of(interrupted).iterdir()} == before
    assert not interrupted.exists()


def test_a_folder_that_does_not_say_whose_it_is_any_more_is_named(family: Family, interrupted: Path) -> None:
    (partial_of(interrupted) / RUN).write_text("{")
    with pytest.raises(SltaError, match=f"{RUN} cannot be read .*: delete .*{re.escape(str(partial_of(interrupted)))}"):
        measure(recipe(family), interrupted)
