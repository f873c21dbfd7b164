"""A file is written whole or not at all, and what a recipe names no place for goes where its content says."""

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


def test_the_digest_follows_the_content_and_not_its_order() -> None:
    assert files.digest({"a": 1, "b": [2, 3]}) == files.digest({"b": [2, 3], "a": 1})
    assert files.digest({"a": 1, "b": [2, 3]}) != files.digest({"a": 1, "b": [3, 2]})


def test_the_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert files.cache_folder() == tmp_path / "cache" / "mergekit-slta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "mergekit-slta"
