"""The folder for what a recipe names no place for, and names in it that tell by content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


def digest(content: object) -> str:
    """A short name for what JSON can hold, equal for equal content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where everything goes that a recipe names no place for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergekit-slta"
