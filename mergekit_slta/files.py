"""Files that are whole or not there, and the folder of those that a recipe names no place for."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file beside its place and then move it there, so that nobody ever sees half of it.

    Args:
        path: where it goes; the folder is made.
        content: what it holds.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def digest(content: object) -> str:
    """A short name for what JSON can hold, equal for equal content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where everything goes that a recipe names no place for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergekit-slta"
