"""A file is written whole or not at all."""

from pathlib import Path

import pytest

from mergekit_slta import files


def test_a_file_and_its_folder_are_made(tmp_path: Path) -> None:
    files.write(tmp_path / "new" / "folder" / "file", b"content")
    files.write(tmp_path / "new" / "folder" / "file", b"other")
    assert (tmp_path / "new" / "folder" / "file").read_bytes() == b"other"
    assert [entry.name for entry in (tmp_path / "new" / "folder").iterdir()] == ["file"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write(path, b"new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
