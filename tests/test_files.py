"""A file is written whole or not at all."""

import re
from pathlib import Path

import pytest

from mergekit_slta import files


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=re.escape(f"'{tmp_path / 'folder'}'")):
        files.write(tmp_path / "folder", b"")
