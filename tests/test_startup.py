"""The finder that waits for mergekit, tried on small host modules; tests/test_install.py tries it on mergekit."""

import importlib
import importlib.util
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
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The one host is a module named `small_host`; every call of its hook is added to this list."""
    calls: list[str] = []

    def call(hook: str) -> bool:
        calls.append(hook)
        return True

    monkeypatch.setattr(startup, "HOOKS", {"small_host": "hook"})
    monkeypatch.setattr(startup, "call", call)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not is_ours(finder)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield calls
    for name in ("small_host", "other_host"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture
def host(calls: list[str], tmp_path: Path) -> Path:
    """The host's source file, on the module search path."""
    file = tmp_path / "small_host.py"
    file.write_text("runs = globals().get('runs', 0) + 1\n")
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    return file


def is_ours(finder: object) -> bool:
    return type(finder).__module__ == startup.__name__


def waiting() -> int:
    return sum(map(is_ours, sys.meta_path))


def test_calls_the_hook_once_the_host_has_executed(host: Path, calls: list[str]) -> None:
    startup.install()
    assert calls == []
    module = importlib.import_module("small_host")
    assert module.runs == 1
    assert calls == ["hook"]
    assert waiting() == 0


def test_a_probe_does_not_use_the_finder_up(host: Path, calls: list[str]) -> None:
    startup.install()
    for _ in range(2):
        spec = importlib.util.find_spec("small_host")
        assert spec is not None
        assert spec.origin == str(host)
    assert calls == []
    importlib.import_module("small_host")
    assert calls == ["hook"]


def test_a_failed_import_may_be_repeated(host: Path, calls: list[str]) -> None:
    source = host.read_text()
    host.write_text("raise OSError('out of memory, say')  # and so on\n")
    startup.install()
    with pytest.raises(OSError, match="out of memory"):
        importlib.import_module("small_host")
    assert calls == []
    host.write_text(source)
    importlib.import_module("small_host")
    assert calls == ["hook"]


def test_install_twice_waits_once(host: Path, calls: list[str]) -> None:
    startup.install()
    startup.install()
    assert waiting() == 1
    importlib.import_module("small_host")
    assert calls == ["hook"]


def test_calls_the_hook_at_once_when_the_host_is_imported(host: Path, calls: list[str]) -> None:
    importlib.import_module("small_host")
    startup.install()
    assert calls == ["hook"]
    assert waiting() == 0


def test_the_host_keeps_its_own_loader(host: Path, calls: list[str]) -> None:
    plain = importlib.import_module("small_host")
    loader = type(plain.__loader__)
    del sys.modules["small_host"]
    startup.install()
    module = importlib.import_module("small_host")
    assert type(module.__loader__) is loader
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert importlib.reload(module).runs == 2
    assert calls == ["hook"]


@pytest.fixture
def other_host(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    """A second host, which imports the first one as mergekit.merge imports mergekit.merge_methods."""
    host.with_name("other_host.py").write_text("import small_host\n")
    monkeypatch.setattr(startup, "HOOKS", {"small_host": "hook", "other_host": "other hook"})


@pytest.mark.usefixtures("other_host")
@pytest.mark.parametrize("before_install", [[], ["small_host"], ["other_host"]])
@pytest.mark.parametrize("after_install", [["small_host", "other_host"], ["other_host"]])
def test_each_host_has_its_hook(calls: list[str], before_install: list[str], after_install: list[str]) -> None:
    for name in before_install:
        importlib.import_module(name)
    startup.install()
    for name in after_install:
        importlib.import_module(name)
    assert calls == ["hook", "other hook"]
    assert waiting() == 0


@pytest.mark.usefixtures("other_host")
@pytest.mark.parametrize("before_install", [[], ["small_host"]])
def test_a_failed_hook_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], before_install: list[str]
) -> None:
    def fail(hook: str) -> bool:
        calls.append(hook)
        return False

    monkeypatch.setattr(startup, "call", fail)
    for name in before_install:
        importlib.import_module(name)
    startup.install()
    importlib.import_module("other_host")
    assert calls == ["hook"]
    assert waiting() == 0


def test_a_missing_host_stays_missing(calls: list[str]) -> None:
    startup.install()
    with pytest.raises(ModuleNotFoundError, match="small_host"):
        importlib.import_module("small_host")
    assert calls == []


@pytest.mark.parametrize("first", [True, False])
def test_another_finder_that_asks_all_finders(host: Path, calls: list[str], first: bool) -> None:
    class Asking:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            others = (finder for finder in sys.meta_path if finder is not self)
            return next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)

    sys.meta_path.insert(0, Asking())
    startup.install()
    if first:
        sys.meta_path.insert(0, sys.meta_path.pop(1))
    importlib.import_module("small_host")
    assert calls == ["hook"]
    assert waiting() == 0


@pytest.mark.parametrize("module", ["slta.measure", "output.verify"])
def test_a_module_of_this_package_may_be_imported_first(module: str, forks: ForkServerContext) -> None:
    """It imports mergekit, whose import would register, which needs the module that is not complete yet."""
    code = f"""
import warnings
import _mergekit_slta_startup as startup
startup.install()
warnings.simplefilter("error", RuntimeWarning)
import mergekit_slta.{module}
import mergekit.merge
from mergekit import merge_methods
assert hasattr(mergekit.merge.run_merge, "__wrapped__")
assert merge_methods.get("slta").spec.name == "slta"
"""
    run_afresh(forks, code)
