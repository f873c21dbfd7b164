"""What ``import mergekit_slta`` gives: every public name, in any order of imports, and nothing that takes time."""

from __future__ import annotations

import ast
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from support.processes import run_afresh, run_python

import mergekit_slta

NAMES = sorted(mergekit_slta._EXPORTS)
# The names of the Python API, and those of the modules that other programs may build on.
PROMISED = {
    *("Recipe", "check", "measure", "Statistics", "Solution", "merge", "evaluate", "linearity", "report", "SltaError"),
    *("Decoder", "Experiment", "TensorWeights", "calibrate", "load", "measured_statistics", "plan_linearity", "save"),
    *("solve", "solve_model", "verify", "compare", "publish", "new_recipe", "write_comparison"),
    *("write_linearity", "write_report"),
}

PRELUDE = """
import importlib, pkgutil
from types import ModuleType
import mergekit_slta

def import_submodules():
    for module in pkgutil.walk_packages(mergekit_slta.__path__, "mergekit_slta."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

def public():
    found = {name: getattr(mergekit_slta, name) for name in NAMES}
    assert not [name for name, value in found.items() if isinstance(value, ModuleType)], found
    return found
"""


def run(forks: ForkServerContext, code: str) -> None:
    """Run code in a process that has imported nothing of this package."""
    run_afresh(forks, f"NAMES = {sorted(NAMES)}\n{PRELUDE}\n{code}")


def test_the_public_names_are_those_that_are_promised() -> None:
    assert set(NAMES) == PROMISED
    assert set(NAMES) | {"__version__"} <= set(dir(mergekit_slta))
    with pytest.raises(AttributeError, match="no attribute 'evaluation'"):
        mergekit_slta.evaluation  # noqa: B018


def test_names_stay_when_submodules_are_imported_after_them(forks: ForkServerContext) -> None:
    """Python makes a submodule an attribute of its package, so none may have a public name."""
    run(forks, "before = public()\nimport_submodules()\nassert public() == before")


def test_names_are_there_when_submodules_are_imported_before_them(forks: ForkServerContext) -> None:
    run(forks, "import_submodules()\npublic()")


def test_no_folder_has_a_public_name(forks: ForkServerContext) -> None:
    """``import mergekit_slta.FOLDER.module as name`` reads FOLDER as an attribute of the package."""
    folders = {path.parent.name for path in Path(str(mergekit_slta.__file__)).parent.glob("*/__init__.py")}
    assert not folders & set(NAMES)
    run(forks, "import mergekit_slta.nonlinearity.scores as s\nassert mergekit_slta.linearity is s.linearity")


def test_a_test_may_still_replace_a_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mergekit_slta, "report", len)
    assert mergekit_slta.report is len


def test_importing_the_package_takes_less_than_a_millisecond_and_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = """
import sys, time
before, start = set(sys.modules), time.process_time()
import mergekit_slta
print(time.process_time() - start, *(set(sys.modules) - before))
"""
    times = []
    for _ in range(5):  # the first one compiles
        done = run_python("-S", "-c", code)
        seconds, *modules = done.stdout.split()
        assert modules == ["mergekit_slta"]
        times.append(float(seconds))
    assert min(times) < 1e-3, times


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(Path(str(mergekit_slta.__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen: dict[str, str] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            seen |= {str(alias.asname): f"{node.module}:{alias.name}" for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Name)]
            seen |= {target.id: mergekit_slta._EXPORTS[target.id] for target in targets}
    assert seen == mergekit_slta._EXPORTS
    assert (Path(str(mergekit_slta.__file__)).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_explained(name: str) -> None:
    assert getattr(mergekit_slta, name).__doc__


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_there(name: str) -> None:
    assert callable(getattr(mergekit_slta, name))
