"""What can happen to the folder that an unfinished calibration or feature merge goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]
Damage = Callable[[Path], None]

STATE = "state.json"
FIRST, LAST, HIDDEN = "layer-0000*", "layer-0002*", "hidden-0002*"  # of three finished layers


def one(folder: Path, pattern: str) -> Path:
    (file,) = folder.glob(pattern)
    return file


def flip(folder: Path, pattern: str) -> None:
    file = one(folder, pattern)
    content = bytearray(file.read_bytes())
    content[-100] ^= 64
    file.write_bytes(content)


def rewrite(change: Callable[[State], State]) -> Callable[[Path, str], None]:
    def damage(folder: Path, pattern: str) -> None:
        file = one(folder, pattern)
        save_file(change(load_file(file)), file)

    return damage


def other_shape(tensors: State) -> State:
    return {name: tensor[:1].clone() for name, tensor in tensors.items()}


def lost_row(tensors: State) -> State:
    return dict(list(tensors.items())[1:])


def odd_name(tensors: State) -> State:
    return {"odd": tensors.pop(next(iter(tensors))), **tensors}


def of_another_layer(folder: Path, pattern: str) -> None:
    one(folder, pattern).write_bytes(one(folder, "layer-0001*").read_bytes())


def folder_instead(folder: Path, pattern: str) -> None:
    file = one(folder, pattern)
    file.unlink()
    file.mkdir()


def cut(folder: Path, pattern: str) -> None:
    file = one(folder, pattern)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def edit_state(folder: Path, **changes: object) -> None:
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps(state | changes))


def put_state(folder: Path, content: str) -> None:
    (folder / STATE).write_text(content)


def unlisted(folder: Path, pattern: str) -> None:
    name = one(folder, pattern).name
    files = json.loads((folder / STATE).read_text())["files"]
    edit_state(folder, files={key: value for key, value in files.items() if key != name})


TO_A_FILE: dict[str, Callable[[Path, str], None]] = {
    "a flipped byte": flip,
    "NaN": rewrite(lambda tensors: {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}),
    "zeros": rewrite(lambda tensors: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}),
    "another shape": rewrite(other_shape),
    "a lost row": rewrite(lost_row),
    "an odd name": rewrite(odd_name),
    "another layer's file": of_another_layer,
    "a folder": folder_instead,
    "cut off": cut,
    "empty": lambda folder, pattern: one(folder, pattern).open("w").close(),
    "missing": lambda folder, pattern: one(folder, pattern).unlink(),
    "not in the state": unlisted,
}
TO_THE_STATE: dict[str, Damage] = {
    "state: cut off": lambda folder: put_state(folder, '{"base": '),
    "state: no object": lambda folder: put_state(folder, "[1]"),
    "state: null": lambda folder: put_state(folder, "null"),
    "state: no text": lambda folder: put_state(folder, "\0\0"),
    "state: empty": lambda folder: put_state(folder, ""),
    "state: nothing in it": lambda folder: put_state(folder, "{}"),
    "state: missing": lambda folder: (folder / STATE).unlink(),
    "state: a list of files": lambda folder: edit_state(folder, files=["layer-0000.safetensors"]),
    "state: no files": lambda folder: edit_state(folder, files=None),
    "state: odd checksums": lambda folder: edit_state(folder, files={one(folder, LAST).name: 7, "": [], "..": None}),
}


def lose_all_files(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def add_odd_files(folder: Path) -> None:
    (folder / "hidden-odd.safetensors").write_bytes(b"")
    (folder / "layer-0003.safetensors").write_bytes(one(folder, LAST).read_bytes())
    (folder / "hidden-0003-0007.safetensors").write_bytes(one(folder, HIDDEN).read_bytes())


def _of_file(damage: Callable[[Path, str], None], pattern: str) -> Damage:
    return lambda folder: damage(folder, pattern)


# All damages; of these, the ones that a line of the log tells, and those that end in a refusal.
NOTICED: dict[str, Damage] = {
    f"{pattern.rstrip('*')}: {name}": _of_file(damage, pattern)
    for name, damage in TO_A_FILE.items()
    for pattern in (FIRST, LAST, HIDDEN)
    if pattern != FIRST or damage in (flip, unlisted)
} | {"all files missing": lose_all_files}
DAMAGES: dict[str, Damage] = {**NOTICED, **TO_THE_STATE, "odd files": add_odd_files}
REFUSED = {"state: cut off", "state: no object", "state: null", "state: no text", "state: empty"}
