"""No fault at any operation on a file makes a wrong model, half a file or a traceback.

``support/faults.py`` says what is checked after each fault. A fault is decided by the command, the number of the
operation and what goes wrong, so each can be repeated alone. The quick share is drawn by ``SEED``; the long run
(``-m slow``) draws many more; with ``FAULT_CASES=10`` it injects every fault of every operation that changes something,
and a share of those that read.

docs/robustness.md says what the user sees of each fault, and which test holds it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from support import faults
from support.faults import COMMANDS, Commands, Ended, Fault, Scenario
from support.processes import command_together
from support.seeds import failures
from support.slow import slow_but

from mergekit_slta.engine.partial import Hidden, Partial

pytestmark = pytest.mark.skipif(not faults.COMPILER, reason="faults.c needs a C compiler")

SEED = 0
# How many faults of each command the suite and the long run inject, by how long the command takes. The commands of LONG
# alone read and write in the ways of the others. Of the operations that only read, the long run takes a share, because
# there are many and they fail in the same way.
QUICK = {
    "solve": 4,
    "actmat": 4,
    "calibrate": 4,
    "featcal": 3,
    "merge": 2,
}
LONG = {
    "solve": 60,
    "actmat": 170,
    "calibrate": 200,
    "featcal": 150,
    "add a level": 110,
    "slta": 50,
    "merge": 140,
    "report": 30,
}
TIMES = float(os.environ.get("FAULT_CASES", "1"))
READS = 0.15


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with faults.started(tmp_path_factory.mktemp("commands")) as server:
        yield server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "models"
    faults.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def scenario(
    commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Scenario, Path]]:
    """A command's scenario, and a folder to run it in."""
    made: dict[str, tuple[Scenario, Path]] = {}

    def get(name: str) -> tuple[Scenario, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("scenario")
            made[name] = faults.set_scenario(name, commands, models, folder), folder / "run"
        return made[name]

    return get


Get = Callable[[str], tuple[Scenario, Path]]


def wrong(commands: Commands, scenario: Scenario, folder: Path, chosen: list[Fault]) -> dict[str, str]:
    found = {scenario.describe(fault): faults.failure(commands, scenario, fault, folder) for fault in chosen}
    return {fault: failure for fault, failure in found.items() if failure}


@pytest.mark.parametrize("name", QUICK)
def test_any_fault(name: str, commands: Commands, scenario: Get) -> None:
    found, folder = scenario(name)
    chosen = random.Random(f"{SEED} {name}").sample(found.faults(), QUICK[name])
    assert wrong(commands, found, folder, chosen) == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("name", LONG)
def test_very_many_faults(name: str, part: int, commands: Commands, scenario: Get) -> None:
    found, folder = scenario(name)
    drawn = random.Random(f"{SEED} {name} many")
    all_faults = [fault for fault in found.faults() if found.changes(fault) or drawn.random() < READS]
    chosen = drawn.sample(all_faults, min(len(all_faults), round(TIMES * LONG[name])))[part::10]
    print(f"{len(chosen)} faults of {len(all_faults)}", end=" ", flush=True)
    assert wrong(commands, found, folder, chosen) == {}


# Moments


def ended_at_random(commands: Commands, scenario: Scenario, folder: Path, seed: int) -> str | None:
    """SIGTERM or SIGKILL at a moment of the first second of a command."""
    drawn = random.Random(seed)
    fresh(scenario, folder)
    kind = drawn.choice([signal.SIGTERM, signal.SIGKILL])
    ended = commands.run(scenario.command, folder, signal=kind, delay=drawn.random())
    return faults.wrong_after(commands, scenario, ended, folder)


def fresh(scenario: Scenario, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scenario.before, folder)


def test_ended_at_any_moment(commands: Commands, scenario: Get) -> None:
    assert failures(partial(ended_at_random, commands, *scenario("featcal")), range(3)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calibrate", "featcal", "merge"])
def test_ended_at_very_many_moments(name: str, commands: Commands, scenario: Get) -> None:
    assert failures(partial(ended_at_random, commands, *scenario(name)), range(3, 25)) == {}


# Disks


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A disk of its own, in memory."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("name", ["calibrate", "featcal", "merge"])
def test_a_full_disk(name: str, commands: Commands, scenario: Get, tmp_path: Path) -> None:
    """Room for the models and some of the result; then enough for all of it."""
    found, _ = scenario(name)
    used = sum(len(file) for file in faults.content(found.before).values())
    disk = tmp_path / "disk"
    with small_disk(disk, used + 2**18):
        shutil.copytree(found.before, disk / "run")
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        ended = commands.run(found.command, disk / "run")
        assert ended.code == 1
        assert "Traceback" not in ended.said
        assert "full" in ended.said or "No space left" in ended.said or "make room" in ended.said
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        assert faults.wrong_after(commands, found, Ended(-1, "", 0), disk / "run") is None


@pytest.mark.parametrize("name", slow_but(QUICK, COMMANDS))
def test_a_read_only_folder(name: str, commands: Commands, scenario: Get) -> None:
    found, folder = scenario(name)
    fresh(found, folder)
    ended = commands.run(found.command, folder, Fault("EROFS", 1))
    assert ended.code == 1
    assert faults.wrong_after(commands, found, ended, folder) is None


# While it runs


def cut(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, other: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 64]))


def delete(path: Path, other: Path) -> None:
    path.unlink()


def replace(path: Path, other: Path) -> None:
    shutil.copyfile(other, path.with_name("new"))
    os.replace(path.with_name("new"), path)


CHANGES = {change.__name__: change for change in (cut, flip, delete, replace)}


def changed_while_read(commands: Commands, scenario: Scenario, folder: Path, seed: int) -> str | None:
    """Stop a command, change one of its files, let it go on, put the file back, and run it again."""
    drawn = random.Random(seed)
    fresh(scenario, folder)
    operation = drawn.choice(scenario.operations)
    path, other = (folder / f"expert{index}" / "model.safetensors" for index in drawn.sample([0, 1], 2))
    sound = path.read_bytes()
    stopped = commands.run(scenario.command, folder, Fault("pause", operation.number))
    change = drawn.choice(list(CHANGES))
    CHANGES[change](path, other)
    ended = commands.resume(stopped)
    where = f"{change} {path.parent.name} at {operation}"
    if ended.code > 0 and "Error: " not in ended.said:
        return f"{where}: {ended.said[-1000:]}"
    (folder / "new").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(sound)
    # What the changed file gave is told apart from what the sound one gives, and refused.
    again = commands.run(scenario.command, folder)
    if again.code == 0:
        left = faults.content(folder)
        for name in {name for name in left if name.startswith("cache/")} - scenario.clean.keys():
            del left[name]  # the measurement of the changed file, under that file's own fingerprint
        wrong = faults.difference(scenario.clean, left)
        return f"{where}: {wrong}; {ended}" if wrong else None
    told = ("other content", "another measurement", "is not one of the models")
    return None if any(said in again.said for said in told) else f"{where}: {again.said[-1000:]}"


@pytest.mark.parametrize("name", ["calibrate", pytest.param("featcal", marks=pytest.mark.slow)])
def test_a_file_that_changes_while_it_is_read(name: str, commands: Commands, scenario: Get) -> None:
    assert failures(partial(changed_while_read, commands, *scenario(name)), range(3)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calibrate", "featcal", "merge"])
def test_a_file_that_changes_at_any_moment(name: str, commands: Commands, scenario: Get) -> None:
    assert failures(partial(changed_while_read, commands, *scenario(name)), range(3, 30)) == {}


def two_at_once(commands: Commands, scenario: Scenario, folder: Path, seed: int) -> str | None:
    """Stop a run, let another one run to its end, and then the first."""
    fresh(scenario, folder)
    operation = random.Random(seed).choice(scenario.operations)
    stopped = commands.run(scenario.command, folder, Fault("pause", operation.number))
    second = commands.run(scenario.command, folder)
    if second.code and "Another process is at work" not in second.said:
        return f"at {operation} the second says: {second.said[-1000:]}"
    first = commands.resume(stopped)
    if first.code and ("Traceback" in first.said or "Error: " not in first.said):
        return f"at {operation} the first says: {first.said[-1000:]}"
    return faults.wrong_after(commands, scenario, Ended(-1, "", 0), folder)


@pytest.mark.parametrize("name", ["calibrate", pytest.param("featcal", marks=pytest.mark.slow)])
def test_two_runs_at_once(name: str, commands: Commands, scenario: Get) -> None:
    assert failures(partial(two_at_once, commands, *scenario(name)), range(2)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_two_runs_at_any_moment(name: str, commands: Commands, scenario: Get) -> None:
    assert failures(partial(two_at_once, commands, *scenario(name)), range(2, 12)) == {}


def die_in_the_second_layer(folder: Path, index: int) -> None:
    """Work in a folder, and let the second process end there."""
    os.chdir(folder)
    save_hidden = Partial.save_hidden

    def die(partial: Partial, layer: int, rank: int, hidden: Hidden) -> None:
        save_hidden(partial, layer, rank, hidden)
        if layer == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Partial.save_hidden = die  # type: ignore[method-assign,assignment]


def test_a_process_that_dies(commands: Commands, forks: ForkServerContext, scenario: Get) -> None:
    found, folder = scenario("calibrate")
    fresh(found, folder)
    done = command_together(forks, 2, *found.command[1:], patch=partial(die_in_the_second_layer, folder))
    assert done.returncode != 0
    assert (folder / f"{faults.STATISTICS}.partial").is_dir()
    assert not (folder / faults.STATISTICS).exists()
    assert faults.wrong_after(commands, found, Ended(-1, "", 0), folder) is None
