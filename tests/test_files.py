"""A file is written whole or not at all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mergekit_slta import files


def test_a_file_and_its_folder_are_made(tmp_path: Path) -> None:
    files.write(tmp_path / "new" / "folder" / "file", b"content")
    files.write(tmp_path / "new" / "folder" / "file", b"other")
    assert (tmp_path / "new" / "folder" / "file").read_bytes() == b"other"
    assert [entry.name for entry in (tmp_path / "new" / "folder").iterdir()] == ["file"]


def test_what_killed_writers_left_is_removed_and_what_others_are_writing_is_not(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    with files.replacing(tmp_path / "file") as beside:
        beside.write_text("half")
        mine = f".{os.getpid()}"
        for process in (killed.pid, os.getppid(), "odd"):
            shutil.copy(beside, tmp_path / beside.name.replace(mine, f".{process}"))
        shutil.copy(beside, tmp_path / f".file.another-machine{mine}")
    others = {entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(f".{killed.pid}")}
    files.write(tmp_path / "file", b"whole")
    assert {entry.name for entry in tmp_path.iterdir()} == others


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=re.escape(f"'{tmp_path / 'folder'}'")):
        files.write(tmp_path / "folder", b"")
