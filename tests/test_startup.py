"""The finder that waits for mergekit, tried on small host modules; tests/test_install.py tries it on mergekit."""

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_afresh

import _mergekit_slta_startup as startup


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The hooks that were called, of two hosts that lie in the test's folder.

    The second one imports the first as mergekit.merge imports mergekit.merge_methods.
    """
    (tmp_path / "small_host.py").write_text("runs = globals().get('runs', 0) + 1\n")
    (tmp_path / "other_host.py").write_text("import small_host\n")
    calls: list[str] = []

    def call(hook: str) -> bool:
        calls.append(hook)
        return "fails" not in hook

    monkeypatch.setattr(startup, "HOOKS", {"small_host": "hook", "other_host": "other hook"})
    monkeypatch.setattr(startup, "call", call)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not is_ours(finder)])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield calls
    for name in ("small_host", "other_host"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def is_ours(finder: object) -> bool:
    return type(finder).__module__ == startup.__name__


def waiting() -> int:
    return sum(map(is_ours, sys.meta_path))


def test_a_failed_import_may_be_repeated(calls: list[str], tmp_path: Path) -> None:
    host = tmp_path / "small_host.py"
    source = host.read_text()
    host.write_text("raise OSError('out of memory, say')  # and so on\n")
    startup.install()
    with pytest.raises(OSError, match="out of memory"):
        importlib.import_module("small_host")
    assert calls == []
    host.write_text(source)
    importlib.import_module("small_host")
    assert calls == ["hook"]


@pytest.mark.parametrize("before_install", [[], ["small_host"], ["other_host"]])
@pytest.mark.parametrize(("first", "called"), [("hook", ["hook", "other hook"]), ("fails", ["fails"])])
def test_each_host_has_its_hook_and_a_failed_one_is_the_last(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], first: str, called: list[str], before_install: list[str]
) -> None:
    monkeypatch.setitem(startup.HOOKS, "small_host", first)
    for name in before_install:
        importlib.import_module(name)
    startup.install()
    importlib.import_module("other_host")
    assert calls == called
    assert waiting() == 0


def test_another_finder_that_asks_all_finders(calls: list[str]) -> None:
    class Asking:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            others = (finder for finder in sys.meta_path if finder is not self)
            return next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)

    sys.meta_path.insert(0, Asking())
    startup.install()
    importlib.import_module("other_host")
    assert calls == ["hook", "other hook"]
    assert waiting() == 0


def test_a_hook_that_fails_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match=r"mergekit-slta does not work here.*ModuleNotFoundError"):
        assert not startup.call("mergekit_slta.nowhere.install")


def test_a_module_of_this_package_may_be_imported_first(forks: ForkServerContext) -> None:
    """It imports mergekit, whose import would register, which needs the module that is not complete yet."""
    code = """
import warnings
import _mergekit_slta_startup as startup
startup.install()
warnings.simplefilter("error", RuntimeWarning)
import mergekit_slta.output.verify
import mergekit.merge
from mergekit import merge_methods
assert hasattr(mergekit.merge.run_merge, "__wrapped__")
assert merge_methods.get("slta").spec.name == "slta"
"""
    run_afresh(forks, code)
