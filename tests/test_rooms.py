"""The rooms of the package: imports between folders run down the floors only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mergekit_slta

PACKAGE = Path(mergekit_slta.__file__).parent
# From the top. A module imports from the floors below its own, and from its own room.
FLOORS = (
    ("__init__", "__main__"),
    ("cli",),
    ("host",),
    ("output",),
    ("checks", "reports"),
    ("featcal", "nonlinearity"),
    ("slta",),
    ("evaluation", "asking"),
    ("recipe",),
    ("engine",),
    ("layers", "sftm", "actmat"),
    ("models", "data", "numerics"),
    ("figures", "files", "levels", "tables"),
    ("errors", "words"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    """The folder or the top module that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the room of every import from this package, those inside functions too."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        assert not getattr(node, "level", 0), f"line {node.lineno} is a relative import: write the whole name"
        for alias in node.names:
            top, room, *_ = [*f"{origin}{alias.name}".split("."), ""]
            if top == "mergekit_slta" and room != "__version__":
                yield node.lineno, room if room in FLOOR else "__init__"


def arrows_up(path: Path) -> list[str]:
    """The imports of a file that do not run down; the package itself is the roof, and only its version is for all."""
    room = room_of(path)
    return [
        f"{path.relative_to(PACKAGE)}:{line} imports from {target}/, which is not below {room}/"
        for line, target in imported_rooms(ast.parse(path.read_text(encoding="utf-8")))
        if target != room and FLOOR[target] <= FLOOR[room]
    ]


def test_imports_run_down_the_floors_so_that_no_circle_can_be() -> None:
    without = {room_of(path) for path in PACKAGE.rglob("*.py")} - set(FLOOR)
    assert not without, f"give {sorted(without)} a place in FLOORS here, and in the table of docs/architecture.md"
    assert not [arrow for path in sorted(PACKAGE.rglob("*.py")) for arrow in arrows_up(path)]
