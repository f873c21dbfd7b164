"""The finished layers of a calibration or a feature merge, and its head: files in one folder, renamed into place.

A run remembers only which layers' files exist: the next run computes the hidden states again. A file that
cannot be read counts as missing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mergekit_slta import files
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import MachineError, SltaError
from mergekit_slta.words import counted, listed

LOG = logging.getLogger(__name__)

RUN = "run.json"
LOCK = "lock"


class Partial:
    """The folder of one run's finished layers.

    A run locks it (``held``), says which run it is (``begin``), and deletes it when its result is written (``remove``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The system frees the lock when this process ends; filelock's fallback, a file, would outlive a killed one.
        self._lock = filelock.FileLock(folder / LOCK, timeout=0, thread_local=False, fallback_to_soft=False)
        # A merge makes the folder around it, too.
        self._made = [folder, folder.parent] if folder.match(files.PARTIAL_OF_MERGE) else [folder]

    @contextlib.contextmanager
    def held(self, ranks: Ranks) -> Iterator[None]:
        """Create the folder and keep other processes out of it; one in which no run has begun is deleted at the end.

        An SltaError if another process uses the folder, or it holds files of something else.
        """
        with ranks.one_refusal():  # each rank may have a disk of its own
            # In this order: another process may begin between them.
            folder, odd, run = self.folder, _odd_entry(self.folder), run_of(self.folder)
            if run is None and odd:
                raise SltaError(f"{folder} holds {odd}, which no unfinished run writes: name another file or folder.")
            folder.mkdir(parents=True, exist_ok=True)
            if ranks.first:
                try:
                    self._lock.acquire()
                except filelock.Timeout:
                    problem = f"Another process or thread is working in {folder}"
                    raise MachineError(f"{problem}: wait until it has ended.") from None
                except (OSError, NotImplementedError):  # some file systems have no locks
                    LOG.warning("%s cannot be locked on this disk: start one run in it at a time.", self.folder)
        try:
            yield
        finally:
            # Before its file is deleted: network disks keep one that is open, and Windows deletes none. Another process
            # could take the lock between the two and lose it, but only if it starts within that millisecond.
            self._lock.release()
            if ranks.first and not (self.folder / RUN).exists():  # the first process may still be at work
                with contextlib.suppress(OSError):
                    (self.folder / LOCK).unlink(missing_ok=True)
                _remove_empty(self._made)

    def refuse_layers_of_others(self, identity: Mapping[str, Any]) -> bool:
        """Refuse the finished layers of a run with other values, which may have taken hours.

        Returns whether a run with these values has begun here.
        """
        known, done = run_of(self.folder), len([*self.folder.glob("layer-*.safetensors")])
        changed = listed([key for key in identity if known is not None and known.get(key) != identity[key]])
        if changed and done:
            holds = f"{self.folder} holds {counted(done, 'finished layer')} of another run (different {changed})"
            raise SltaError(f"{holds}: finish that run, or delete the folder.")
        return known is not None and not changed

    def begin(self, identity: Mapping[str, Any], ranks: Ranks, quiet: bool = False) -> None:
        """Write which run the folder belongs to, by values that JSON can hold; its finished layers are resumed.

        A run that needs no layers has the method as its value alone, and leaves a killed run's folder what it is.
        """
        identity = json.loads(json.dumps(identity))
        with ranks.one_refusal():
            if ranks.first and not self.refuse_layers_of_others(identity):
                with _written(self.folder / RUN) as beside:
                    beside.write_text(json.dumps(identity, sort_keys=True, indent=1))
        if ranks.first and not quiet and (done := len([*self.folder.glob("layer-*.safetensors")])):
            click.echo(f"The first {counted(done, 'layer')} of this run {'are' if done > 1 else 'is'} done.", err=True)

    def remove(self) -> None:
        """Delete the folder, unless it is a user's, and what a merge made around it."""
        if (self.folder / RUN).is_file() or _odd_entry(self.folder) is None:
            with contextlib.suppress(OSError):
                for file in self.folder.glob("*.safetensors"):
                    file.unlink(missing_ok=True)
                (self.folder / RUN).unlink(missing_ok=True)  # which says whose they are
                shutil.rmtree(self.folder, ignore_errors=True)
        _remove_empty(self._made[1:])

    def finished(self, layers: int) -> set[int]:
        """The layers, of so many, whose files can be read."""
        done = set[int]()
        for layer in range(layers):
            with contextlib.suppress(OSError, SafetensorError), safe_open(self.file(layer), "pt"):
                done.add(layer)
        return done

    def load(self, layer: int) -> dict[str, torch.Tensor]:
        return load_file(self.file(layer))

    def write(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the ``file`` of a layer, which finishes it."""
        with _written(self.file(layer)) as beside:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, beside)

    def file(self, layer: int) -> Path:
        """The file of a layer; the output head counts as the last one, and is empty if it was not solved."""
        return self.folder / f"layer-{layer:04d}.safetensors"


def require_finished(out: Path) -> None:
    """Refuse an output folder that is not there, and that of a merge that was interrupted."""
    if not out.is_dir():
        raise SltaError(f"There is no folder {out}: name the folder of the merge.")
    if (out / files.PARTIAL_OF_MERGE).exists():
        raise SltaError(f"The merge into {out} is not finished: run it again.")


def run_of(folder: Path) -> dict[str, Any] | None:
    """The run that a folder belongs to; None if it does not say, an SltaError if what says it cannot be read."""
    path = folder / RUN
    try:
        run = json.loads(path.read_bytes()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise SltaError(f"{path} cannot be read ({error}): delete the folder {folder}.") from error
    return run if isinstance(run, dict) else None


def _remove_empty(folders: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # one is not empty
        for folder in folders:
            folder.rmdir()


def _odd_entry(folder: Path) -> str | None:
    """The name of something in a folder that no run has begun with; None if there is no such thing."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return next((name for name in names if name != LOCK and not name.startswith(".")), None)


@contextlib.contextmanager
def _written(file: Path) -> Iterator[Path]:
    try:
        with files.replacing(file) as beside:
            yield beside
    except (OSError, SafetensorError) as error:
        fix = "make room and run it again; it resumes after the last finished layer"
        raise MachineError(f"{file} cannot be written ({error}): {fix}.") from error
