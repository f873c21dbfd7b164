"""What ``import mergekit_slta`` gives: the promised names, to programs and to type checkers, without taking time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.processes import run_python

import mergekit_slta

PACKAGE = Path(str(mergekit_slta.__file__)).parent
PROMISED = [
    *("Recipe", "SltaError", "Solution", "Statistics", "check", "compare", "evaluate", "linearity", "measure", "merge"),
    *("publish", "report", "verify"),
]


def test_the_public_names_are_those_that_are_promised() -> None:
    public = {name for name in dir(mergekit_slta) if not name.startswith("_")}
    assert public - {path.stem for path in PACKAGE.iterdir()} == {*PROMISED, "TYPE_CHECKING"}
    assert all(callable(value) and value.__doc__ for value in (getattr(mergekit_slta, name) for name in PROMISED))
    with pytest.raises(AttributeError, match="no attribute 'evaluation'"):
        mergekit_slta.evaluation  # type: ignore[attr-defined]  # noqa: B018  # mypy says if it finds the attribute


def test_type_checkers_see_what_programs_import() -> None:
    tree = ast.parse(Path(str(mergekit_slta.__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {str(alias.asname): str(node.module) for node in imports for alias in node.names}
    assert sorted(seen) == PROMISED
    for name, module in seen.items():
        assert getattr(mergekit_slta, name).__module__ == module
    assert (PACKAGE / "py.typed").is_file()


def test_no_module_has_a_public_name() -> None:
    """Python makes a submodule an attribute of its package, in place of a public name."""
    assert not {path.stem for path in PACKAGE.iterdir()} & set(PROMISED)


def test_importing_the_package_takes_no_time_and_no_library() -> None:
    code = """
import sys, time, typing
before, start = set(sys.modules), time.process_time()
import mergekit_slta
print(time.process_time() - start, *(set(sys.modules) - before))
"""
    seconds, *modules = run_python("-S", "-c", code).stdout.split()
    assert modules == ["mergekit_slta"] and float(seconds) < 0.01
