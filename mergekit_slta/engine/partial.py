"""The finished layers of a calibration or a feature merge on disk, so that it can be resumed after a crash."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mergekit_slta import files
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError, logger

LOG = logger(__name__)

STATE = "state.json"
LOCK = "lock"
EDGES = "edges.safetensors"
# The names of what is in the folder: files, temporary ones of killed writers, and what systems put there.
_FILE = r"(state\.json|(edges|layer-\d+|hidden-\d+-\d+)\.safetensors)"
OURS = re.compile(rf"lock|{_FILE}|\.{_FILE}\..+|\.?tmp\w{{6,8}}|\.(nfs|fuse_hidden|smbdelete|cifs)\w*|\.DS_Store")

# By stream and row, hidden states [S, D] without padding; by stream, row and path, other tensors that layers pass to
# later layers.
Hidden = dict[tuple[Any, ...], torch.Tensor]


class Partial:
    """A folder with the tensors of each finished layer, and the hidden states after the last one.

    ``state.json`` identifies the measurement and lists the checksums of all valid files: the finished layers, and the
    hidden states after the last one. If a listed file is missing or has another checksum, everything is computed again.

    Args:
        folder: the folder; ``enter`` creates it.
        fingerprint: identifies the measurement.

    Raises:
        SltaError: the folder holds the state of another measurement, or files of something else.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, object]) -> None:
        self.folder = folder
        self.fingerprint = json.loads(json.dumps(fingerprint))
        # The system frees the lock when this process ends, however that happens.
        self._lock = filelock.FileLock(folder / LOCK, timeout=0, thread_local=False)
        self._damaged: Path | None = None
        _refuse_foreign(folder)
        state = self._state(folder)  # empty where a process was killed before it wrote anything
        changed = [key for key in self.fingerprint if state and state.get(key) != self.fingerprint[key]]
        if changed:
            raise SltaError(
                f"{folder} belongs to another measurement or merge (other {', '.join(changed)}): "
                "finish that one, or delete the folder."
            )
        if not state and (odd := _odd_entry(folder)):
            raise SltaError(f"{folder} holds {odd}, which is no unfinished work: name another file or folder.")

    @staticmethod
    def _state(folder: Path) -> dict[str, Any]:
        """The content of ``state.json``; empty if there is no such file."""
        path = folder / STATE
        try:
            state = json.loads(path.read_bytes()) if path.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise SltaError(f"{path} is damaged ({error}): delete the folder {folder}.") from error
        if not isinstance(state, dict):
            raise SltaError(f"{path} is damaged (it is not a JSON object): delete the folder {folder}.")
        return state

    @staticmethod
    def is_left_over(folder: Path, levels: Iterable[str]) -> bool:
        """Whether a folder holds what is left of a measurement at some of these levels, and nothing of a user's."""
        state = Partial._state(folder)
        own = state.get("levels", [])
        is_ours = ("files" in state or not state) and not _odd_entry(folder)
        return is_ours and not (isinstance(own, list) and set(map(str, own)) - set(levels))

    def enter(self, ranks: Ranks) -> None:
        """Create the folder when all ranks have read it, and lock it until ``release`` or the end of this process.

        Raises:
            SltaError: another process uses the folder; see ``Ranks.refuse_together`` for several ranks.
        """
        ranks.wait()
        refusal = None
        if ranks.first:
            self.begin()
            try:
                self._lock.acquire()
            except filelock.Timeout:
                refusal = SltaError(f"Another process is at work in {self.folder}: wait until it has ended.")
            except (OSError, NotImplementedError):  # some file systems have no locks
                LOG.debug("%s cannot be locked", self.folder, exc_info=True)
        ranks.refuse_together(refusal)
        self.begin()  # for a rank with a disk of its own

    def release(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def begin(self) -> None:
        """Create the folder and its ``state.json``."""
        files.make_folder(self.folder)
        if not (self.folder / STATE).exists():
            self._write_state({})

    def _write_state(self, checksums: Mapping[str, str]) -> None:
        content = self.fingerprint | {"files": checksums}
        with _written(self.folder / STATE) as beside:
            beside.write_text(json.dumps(content, sort_keys=True, indent=1))

    @functools.cached_property
    def _checksums(self) -> dict[str, str]:
        """The checksums of the valid files, by their names; empty if one of the files is missing or has changed."""
        listed = self._state(self.folder).get("files")
        if not isinstance(listed, dict):
            return {}
        for name, checksum in listed.items():
            file = self.folder / Path(name).name
            if file.name != name or file.is_symlink() or not file.is_file() or files.block_checksum(file) != checksum:
                self._damaged = file
                return {}
        return listed

    def finished_layers(self) -> int:
        """How many layers are finished; 0 if the hidden states after them are lost."""
        layer = 0
        while self.layer_file(layer).name in self._checksums:
            layer += 1
        return layer if layer and self._hidden_files(layer - 1) else 0

    def _hidden_files(self, layer: int) -> list[Path]:
        return [self.folder / name for name in sorted(self._checksums) if name.startswith(f"hidden-{layer:04d}-")]

    def take_up(self, ranks: Ranks) -> tuple[int, Hidden | None]:
        """Resume: return how many layers are finished, and the hidden states after the last one.

        All other files are deleted.

        Raises:
            SltaError: the ranks see different files.
        """
        layers = self.finished_layers()
        ranks.require_equal(layers, self.folder)
        if not layers and (self._damaged or self._checksums) and ranks.first:
            name = self._damaged.name if self._damaged else STATE
            LOG.warning("%s is damaged or missing, so everything in %s is computed again.", name, self.folder)
        if not layers:
            self._checksums = {}
        if ranks.first:
            for file in list(self.folder.iterdir()):
                if file.name not in {STATE, LOCK, *self._checksums}:
                    shutil.rmtree(file) if file.is_dir() else file.unlink()
        ranks.wait()
        return layers, self.hidden(layers - 1) if layers else None

    def tensors(self, layers: int) -> dict[str, torch.Tensor]:
        """The tensors of the first ``layers`` layers."""
        return {name: tensor for layer in range(layers) for name, tensor in load_file(self.layer_file(layer)).items()}

    def hidden(self, layer: int) -> Hidden:
        """The hidden states after a layer, of all ranks' samples, by stream and row."""
        found: Hidden = {}
        for file in self._hidden_files(layer):
            for name, tensor in load_file(file).items():
                stream, row, *path = name.split(".", 2)
                key = int(stream), int(row), *(json.loads(path[0]) if path else ())
                found[key] = tensor
        return found

    def save_hidden(self, layer: int, rank: int, hidden: Hidden) -> None:
        """Write one rank's hidden states after a layer."""
        named = {}
        for (stream, row, *path), tensor in hidden.items():
            named[f"{stream}.{row}" + (f".{json.dumps(path)}" if path else "")] = tensor.cpu()
        with _written(self.folder / f"hidden-{layer:04d}-{rank:04d}.safetensors") as beside:
            save_file(named, beside)

    def finish_layer(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a layer's tensors, mark the layer as finished, and delete the hidden states before it."""
        self._finish(self.layer_file(layer), tensors, self.folder.glob(f"hidden-{layer:04d}-*.safetensors"))

    def finish(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors outside the layers, mark everything as complete, and delete the hidden states."""
        self._finish(self.edges_file, tensors, ())

    def _finish(self, path: Path, tensors: Mapping[str, torch.Tensor], hidden: Iterable[Path]) -> None:
        with _written(path) as beside:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, beside)
        before = self._checksums
        self._checksums = {name: checksum for name, checksum in before.items() if name.startswith("layer-")}
        self._checksums |= {file.name: files.block_checksum(file) for file in (path, *hidden)}
        self._write_state(self._checksums)
        for name in set(before) - set(self._checksums):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def complete(self) -> bool:
        """Whether ``finish`` has been called."""
        return EDGES in self._checksums

    @property
    def edges_file(self) -> Path:
        return self.folder / EDGES

    def layer_file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder whose content somebody else may have chosen.

    Raises:
        SltaError: it is a link, or belongs to another user.
    """
    if folder.is_symlink():
        raise SltaError(f"{folder} is a link: delete it, its place is for a folder of unfinished work.")
    if os.name == "posix" and folder.exists() and os.geteuid() not in (0, folder.stat().st_uid):
        raise SltaError(f"{folder} belongs to another user: name another file or folder.")


def _odd_entry(folder: Path) -> str | None:
    """The name of something in a folder that ``Partial`` does not write; None if there is no such thing."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((entry.name for entry in entries if entry.is_dir() or not OURS.fullmatch(entry.name)), None)


def remove(folder: Path) -> None:
    """Delete a folder, ``state.json`` first, so that a rest that a killed process leaves is not resumed."""
    with contextlib.suppress(OSError):
        (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        LOG.warning("%s cannot be deleted, and nothing needs it any more: delete it yourself.", folder)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Path]:
    try:
        with files.replacing(path) as beside:
            yield beside
    except (OSError, SafetensorError) as error:
        raise SltaError(
            f"{path} cannot be written ({error}): make room and run it again, it resumes after the last finished layer."
        ) from error
