"""What ``import mergekit_slta`` gives: the promised names, to programs and to type checkers, without taking time."""

from pathlib import Path
from typing import assert_type

import pytest
from support.processes import run_python

import mergekit_slta as slta

REFERENCE = Path(__file__).parents[1] / "docs" / "reference.md"
PROMISED = sorted(REFERENCE.read_text().partition("members: [")[2].partition("]")[0].split(", "))


def test_the_public_names_are_those_that_are_promised() -> None:
    assert [name for name in dir(slta) if not name.startswith("_")] == vars(slta)["__all__"] == PROMISED
    with pytest.raises(AttributeError, match="no attribute 'compare'"):
        slta.compare  # type: ignore[attr-defined]  # noqa: B018  # mypy says if it finds the attribute


def for_mypy(recipe: slta.Recipe) -> list[object]:
    """Never run: mypy knows every public name and finds a user's mistakes, or reports a comment that ignores none."""
    assert_type(slta.measure(recipe, device="cuda").solve("layer", ridge=0.1), slta.Solution)
    slta.mesure(recipe)  # type: ignore[attr-defined]
    slta.merge(recipe, "out", devise="cuda")  # type: ignore[call-arg]
    slta.evaluate(recipe, "out", samples="3")  # type: ignore[arg-type]
    slta.check(recipe, quite=True)  # type: ignore[call-arg]
    functions = [slta.ask, slta.linearity, slta.publish, slta.report, slta.verify]
    return [slta.SltaError, slta.Statistics, *functions]


def test_no_module_has_a_public_name() -> None:
    """Python makes a submodule an attribute of its package, in place of a public name."""
    assert not {path.stem for path in Path(str(slta.__file__)).parent.iterdir()} & set(PROMISED)


def test_importing_the_package_takes_no_time_and_no_library() -> None:
    code = """
import sys, time, typing
before, start = set(sys.modules), time.process_time()
import mergekit_slta
print(time.process_time() - start, *(set(sys.modules) - before))
"""
    seconds, *modules = run_python("-S", "-c", code).stdout.split()
    assert modules == ["mergekit_slta"] and float(seconds) < 0.01
