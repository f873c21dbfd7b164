"""What ``import mergekit_slta`` gives: the promised names, to programs and to type checkers, without taking time."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from support.processes import run_python

import mergekit_slta

PACKAGE = Path(str(mergekit_slta.__file__)).parent
PROMISED = [
    *("Recipe", "SltaError", "Solution", "Statistics", "ask", "check", "evaluate", "linearity", "measure"),
    *("merge", "publish", "report", "verify"),
]


def test_the_public_names_are_those_that_are_promised() -> None:
    assert [name for name in dir(mergekit_slta) if not name.startswith("_")] == mergekit_slta.__all__ == PROMISED
    with pytest.raises(AttributeError, match="no attribute 'compare'"):
        mergekit_slta.compare  # type: ignore[attr-defined]  # noqa: B018  # mypy says if it finds the attribute


def test_type_checkers_see_what_programs_import() -> None:
    tree = ast.parse(Path(str(mergekit_slta.__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: str(node.module) for node in imports for alias in node.names}
    assert sorted(seen) == PROMISED
    for name, module in seen.items():
        assert getattr(mergekit_slta, name).__module__ == module
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", PROMISED)
def test_help_describes_every_argument_and_every_result(name: str) -> None:
    value = getattr(mergekit_slta, name)
    if inspect.isfunction(value):
        described = set(re.findall(r"^    (\w+):", str(inspect.getdoc(value)), re.MULTILINE))
        assert set(inspect.signature(value).parameters) == described - {"SltaError", "OSError"}
        assert "\nReturns:\n" in str(inspect.getdoc(value))
    else:
        members = [member for own, member in vars(value).items() if not own.startswith("_")]
        functions = [member for member in members if inspect.isfunction(member)]
        assert all(member.__doc__ for member in [value, *functions])
        assert all("Returns:" in str(own.__doc__) for own in functions if "Raises:" in str(own.__doc__)), value


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


def test_mypy_finds_what_a_user_misspells(tmp_path: Path) -> None:
    """As a user of the installed package, whose own file this is; libraries are skipped, which takes half a minute."""
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,transformers.*,mergekit.*,matplotlib.*,numpy.*,pydantic.*]\nfollow_imports = skip\n"
    )
    (tmp_path / "own.py").write_text("""\
import mergekit_slta as slta
recipe = slta.Recipe({"base_model": "base", "merge_method": "slta"})
solution = slta.measure(recipe, device="cuda").solve("layer", ridge=0.1)
reveal_type(solution)
slta.mesure(recipe)
slta.merge(recipe, "out", devise="cuda")
slta.evaluate(recipe, "out", samples="3")
slta.check(recipe, quite=True)
""")
    said = run_python("-m", "mypy", "own.py", cwd=tmp_path).stdout.splitlines()
    assert said[0] == 'own.py:4: note: Revealed type is "mergekit_slta.slta.statistics.Solution"'
    errors = [re.sub(r"own.py:(\d+): error: .*\[(.*)\]", r"\1 \2", line) for line in said if ": error: " in line]
    assert errors == ["5 attr-defined", "6 call-arg", "7 arg-type", "8 call-arg"], said
