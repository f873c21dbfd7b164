"""Write files whole or not at all, set them aside, hash them; a merge's own files, and the names that it publishes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mergekit_slta import __version__
from mergekit_slta.errors import SltaError

# What a merge makes beside its weights lies in a folder of its output, because some programs load every .safetensors
# file that lies beside the weights.
RECIPE_OF_MERGE = "mergekit_config.yml"  # mergekit writes it with its card
STATISTICS_OF_MERGE = "mergekit-slta/statistics.safetensors"
MANIFEST_OF_MERGE = "mergekit-slta/merge.json"
PARTIAL_OF_MERGE = "mergekit-slta/partial"  # the finished layers of a merge that is not done; deleted at its end


def write(path: Path, content: bytes) -> None:
    """Write a file through ``replacing``; its folder is created. An OSError leaves an earlier file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as beside:
            beside.write_bytes(content)
    except OSError as error:  # which names the file beside it, or none
        raise OSError(error.errno, error.strerror, str(path)) from error


def new_file(path: str | os.PathLike[str], extension: str) -> Path:
    """A file to write: it must not exist yet, and must have this extension."""
    file = Path(path).expanduser()
    if file.suffix != extension or file.exists():
        problem = "already exists and is unchanged" if file.exists() else f"does not end in {extension}"
        raise SltaError(f"{file} {problem}: name another file.")
    return file


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to, and move it there afterwards, so that no reader sees half a file."""
    beside = path.with_name(f".{path.name}.{platform.node()}")  # what a killed process has left is written over
    try:
        yield beside
        try:
            with beside.open("r+b") as file:
                os.fsync(file.fileno())  # or a loss of power might leave an empty file of the final name
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # it is no more than the file system can
                raise
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def set_aside(file: Path) -> Path:
    """Add ``.old`` to a file's name, and a number if that name is taken; the new path."""
    olds = (file.with_name(f"{file.name}.old{number}") for number in ("", *range(2, 1000)))
    return file.replace(next(old for old in olds if not old.exists()))


def digest(content: object) -> str:
    """A short hash of content that JSON can hold, equal for equal content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def is_private(path: str) -> bool:
    """Whether a path names folders of this machine, which belong in no published file."""
    return os.path.isabs(path) or path.startswith("~")


def published_path(path: str) -> str:
    """A path for published files: only the last part of a private one."""
    return os.path.basename(os.path.normpath(path)) if is_private(path) else path


def is_hub_name(name: str) -> bool:
    """Whether a name has the form of a model's on the Hub, and is no folder here."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not os.path.exists(name)


def local_name(name: str) -> str:
    """A model's name; a relative path to an existing folder begins with a dot, so that it is no Hub id."""
    bare = {part for part in name.split("+") if not (part[:1] == "." or is_private(part)) and os.path.isdir(part)}
    return "+".join(f"./{part}" if part in bare else part for part in name.split("+"))


def versions() -> dict[str, str]:
    """The versions of what a measurement depends on; of this package also the commit, for many have one version."""
    installed = {name: importlib.metadata.version(name) for name in ("mergekit", "torch", "transformers")}
    return {"mergekit-slta": __version__, **installed, "commit": commit()}


@functools.cache
def commit() -> str:
    """The commit that pip has installed this package from, or "clone" and what tells its states apart; else empty."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
        distribution = importlib.metadata.distribution("mergekit-slta")
        installed = json.loads(distribution.read_text("direct_url.json") or "{}")
        if installed.get("dir_info", {}).get("editable"):
            words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty"]
            return f"clone {subprocess.run([*words, '--exclude=*'], capture_output=True, text=True).stdout.strip()}"
        copied = f"clone {digest(distribution.read_text('RECORD'))}" if installed else ""  # from a folder: all hashes
        return str(installed.get("vcs_info", {}).get("commit_id", copied))
    return ""
