"""What goes where a recipe names no place has a name of its own for other content."""

from pathlib import Path

import pytest

from mergekit_slta.cache import cache_folder, digest


def test_the_digest_follows_the_content_and_not_its_order() -> None:
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    assert digest({"a": 1, "b": [2, 3]}) != digest({"a": 1, "b": [3, 2]})


def test_the_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "mergekit-slta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "mergekit-slta"
