"""A file is written whole or not at all, and what a recipe names no place for goes where its content says."""

import os
import shutil
from pathlib import Path

import pytest
from support.processes import run_python

from mergekit_slta import files


def test_a_file_and_its_folder_are_made(tmp_path: Path) -> None:
    files.write(tmp_path / "new" / "folder" / "file", b"content")
    files.write(tmp_path / "new" / "folder" / "file", b"other")
    assert (tmp_path / "new" / "folder" / "file").read_bytes() == b"other"
    assert [entry.name for entry in (tmp_path / "new" / "folder").iterdir()] == ["file"]


def test_what_killed_writers_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = "import os, pathlib, sys; from mergekit_slta import files; os.replace = lambda *a: os.kill(os.getpid(), 9)"
    for name in ("file", "file", "file.other"):
        done = run_python("-c", f"{script}; files.write(pathlib.Path(sys.argv[1]), b'half')", tmp_path / name)
        assert done.returncode == -9, done.stderr
    left = [entry.name for entry in tmp_path.iterdir()]
    assert len(left) == 2
    files.write(tmp_path / "file", b"whole")
    assert [name for name in left if name.startswith(".file.other")] == [
        entry.name for entry in tmp_path.iterdir() if entry.name != "file"
    ]


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "file") as beside:
        beside.write_text("half")
        mine = f".{os.getpid()}"
        for process in (f".{os.getppid()}", ".odd", f".{10**30}"):
            shutil.copy(beside, tmp_path / beside.name.replace(mine, process))
        shutil.copy(beside, tmp_path / f".file.another-machine{mine}")
        before = {entry.name for entry in tmp_path.iterdir()} - {beside.name}
    files.write(tmp_path / "file", b"whole")
    assert {entry.name for entry in tmp_path.iterdir()} == {*before, "file"}


def test_the_digest_follows_the_content_and_not_its_order() -> None:
    assert files.digest({"a": 1, "b": [2, 3]}) == files.digest({"b": [2, 3], "a": 1})
    assert files.digest({"a": 1, "b": [2, 3]}) != files.digest({"a": 1, "b": [3, 2]})


def test_the_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert files.cache_folder() == tmp_path / "cache" / "mergekit-slta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "mergekit-slta"
