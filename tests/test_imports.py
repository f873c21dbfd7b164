"""The rooms of the package: imports between folders run down the floors only, and each module has its tests."""

import ast
import re
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
    ("nonlinearity",),
    ("slta", "featcal"),
    ("evaluation", "asking"),
    ("recipe",),
    ("engine",),
    ("sftm", "actmat"),
    ("layers",),
    ("models", "data", "numerics"),
    ("figures", "files", "levels", "tables"),
    ("errors", "words"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    """The folder or the top module that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def arrows_up(path: Path) -> Iterator[str]:
    """The imports of a file that do not run down; the package itself is the roof, and only its version is for all."""
    room = room_of(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            top, name, *_ = [*f"{origin}{alias.name}".split("."), ""]
            target = name if name in FLOOR else "__init__"
            ours = top == "mergekit_slta" and name != "__version__"
            if ours and target != room and FLOOR[target] <= FLOOR[room]:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} imports from {target}/, which is not below {room}/"


def test_imports_run_down_the_floors_so_that_no_circle_can_be() -> None:
    without = {room_of(path) for path in PACKAGE.rglob("*.py")} - set(FLOOR)
    assert not without, f"give {sorted(without)} a place in FLOORS here, and in the table of docs/architecture.md"
    assert not [arrow for path in sorted(PACKAGE.rglob("*.py")) for arrow in arrows_up(path)]


def test_each_module_has_tests_of_its_name_or_stands_in_the_table_of_tests() -> None:
    """The table of docs/contributing.md; and each test in a folder has the name of a module there."""
    tests, page = PACKAGE.parent / "tests", (PACKAGE.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\S+\.py`.*) \| (.+) \|$", page, re.MULTILINE)
    elsewhere = {module: names.split(", ") for modules, names in rows for module in modules.split(", ")}
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    modules = [path for path in modules if path.name != "__init__.py" or path.parent == Path()]
    named = {
        f"`{m}`": {*tests.glob(f"{m.parent}/test_{m.stem}.py"), *tests.glob(f"{m.parent}/test_{m.stem}_*.py")}
        for m in modules
    }
    assert {module for module, own in named.items() if not own} == elsewhere.keys()
    assert all((tests / name.strip("`")).is_file() for names in elsewhere.values() for name in names)
    inside = {path for path in tests.glob("*/test_*.py") if path.parent.name != "benchmarks"}
    assert inside <= {path for own in named.values() for path in own}
