"""What can happen to a file of a finished layer, so that the layer is computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-8])


def no_header(file: Path) -> None:
    file.write_bytes(b"")


def other_shape(file: Path) -> None:
    save_file({name: tensor[:1].clone() for name, tensor in load_file(file).items()}, file)


def lost_tensor(file: Path) -> None:
    save_file(dict(list(load_file(file).items())[1:]), file)


DAMAGES: tuple[Callable[[Path], None], ...] = (cut, no_header, other_shape, lost_tensor, Path.unlink)
