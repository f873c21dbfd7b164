"""What a calibration or a feature merge has finished, on disk after every layer, so that it can go on after a crash."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mergekit_slta import files
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STATE = "state.json"
EDGES = "edges.safetensors"

# Hidden states [S, D] on the host, without padding, by stream and row; and by stream, row and a path what else layers
# hand to later ones.
Hidden = dict[tuple[Any, ...], torch.Tensor]


class Partial:
    """A folder with what each finished layer has come to, and the hidden states after the last one.

    A layer counts as finished once its file exists, which is written after every rank's hidden states.

    Args:
        folder: where the state lives; ``enter`` makes it.
        fingerprint: identifies what is being measured.

    Raises:
        SltaError: the folder holds the state of another measurement.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, object]) -> None:
        self.folder = folder
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self._release: Callable[[], object] = lambda: None
        if self.folder.exists():
            self._refuse_foreign_state()

    def _refuse_foreign_state(self) -> None:
        path = self.folder / STATE
        if not path.exists():  # killed before anything was written
            return
        state = self._state(self.folder)
        changed = [key for key in self.fingerprint if state.get(key) != self.fingerprint[key]]
        if changed:
            raise SltaError(
                f"{self.folder} holds an unfinished calibration of something else (other {', '.join(changed)}): "
                "finish that one, or delete the folder."
            )

    @staticmethod
    def _state(folder: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((folder / STATE).read_text())
        except ValueError as error:
            raise SltaError(f"{folder / STATE} is damaged ({error}): delete the folder {folder}.") from error
        return state

    def enter(self, ranks: Ranks) -> None:
        """Make the folder when all ranks have looked at what is there, and keep other processes out of it.

        Until ``release``, or until this process ends.

        Raises:
            SltaError: another process is at work in it; see ``Ranks.refuse_together`` for several ranks.
        """
        ranks.wait()
        refusal = None
        if ranks.first:
            self.begin()
            refusal = self._claim()
        ranks.refuse_together(refusal)
        self.begin()  # for a rank with a disk of its own

    def begin(self) -> None:
        """Make the folder, and write what it belongs to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STATE
        if not path.exists():
            files.write(path, json.dumps(self.fingerprint, sort_keys=True, indent=1).encode())

    def _claim(self) -> SltaError | None:
        """Keep other processes out of the folder, unless one is at work in it."""
        if fcntl is None:
            return None
        descriptor = os.open(self.folder, os.O_RDONLY)
        self._release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return SltaError(f"Another process is at work in {self.folder}: wait until it has ended.")
        except OSError:  # not every file system has locks
            self.release()
        return None

    def release(self) -> None:
        """Let other processes into the folder again."""
        self._release()

    @staticmethod
    def levels(folder: Path) -> set[str]:
        """The levels that the state in a folder is about; none if there is no state."""
        return set(Partial._state(folder)["levels"]) if (folder / STATE).exists() else set()

    def finished_layers(self) -> int:
        """How many layers, from the first one on, are finished."""
        layer = 0
        while self.layer_file(layer).exists():
            layer += 1
        return layer if not layer or list(self.folder.glob(f"hidden-{layer - 1:04d}-*")) else 0

    def take_up(self, ranks: Ranks) -> tuple[int, Hidden | None]:
        """How many layers are finished, and the hidden states after the last of them, if there is one.

        Raises:
            SltaError: the ranks see different files.
        """
        layers = self.finished_layers()
        ranks.require_equal(layers, self.folder)
        return layers, self.hidden(layers - 1) if layers else None

    def tensors(self, layers: int) -> dict[str, torch.Tensor]:
        """What the first ``layers`` layers have come to."""
        return {name: gram for layer in range(layers) for name, gram in self._read(self.layer_file(layer)).items()}

    def hidden(self, layer: int) -> Hidden:
        """The hidden states after a layer, of all ranks' samples, by stream and row."""
        found: Hidden = {}
        for file in self.folder.glob(f"hidden-{layer:04d}-*"):
            for name, tensor in self._read(file).items():
                stream, row, *path = name.split(".", 2)
                key = int(stream), int(row), *(json.loads(path[0]) if path else ())
                found[key] = tensor
        return found

    def _read(self, file: Path) -> dict[str, torch.Tensor]:
        try:
            return load_file(file)
        except SafetensorError as error:
            raise SltaError(f"{file} is damaged ({error}): delete the folder {self.folder}.") from error

    def save_hidden(self, layer: int, rank: int, hidden: Hidden) -> None:
        """Write one rank's hidden states after a layer."""
        path = self.folder / f"hidden-{layer:04d}-{rank:04d}.safetensors"
        names = {key: ".".join([*map(str, key[:2]), *([json.dumps(key[2:])] if key[2:] else [])]) for key in hidden}
        _write({names[key]: tensor for key, tensor in hidden.items()}, path)

    def finish_layer(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what a layer has come to, which makes it count, and drop the hidden states before it."""
        _write(tensors, self.layer_file(layer))
        for file in self.folder.glob("hidden-*"):
            if int(file.name.split("-")[1]) < layer:  # a faster rank may have written later ones
                file.unlink()

    def finish(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what lies outside the layers, which makes the whole complete, and drop all hidden states."""
        _write(tensors, self.edges_file)
        for file in self.folder.glob("hidden-*"):
            file.unlink()

    @property
    def complete(self) -> bool:
        """Whether ``finish`` has been called."""
        return self.edges_file.exists()

    @property
    def edges_file(self) -> Path:
        return self.folder / EDGES

    def layer_file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"


def _write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    beside = path.with_name(f".{path.name}")
    try:
        save_file(dict(tensors), beside)
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise SltaError(
            f"{path} cannot be written ({error}): make room and run it again, it goes on from the last finished layer."
        ) from error
