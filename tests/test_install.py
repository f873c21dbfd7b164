"""Really built distributions in really fresh environments: what an install does to Python and to mergekit.

Dependencies are not installed anew, nor is hatchling. A fresh environment sees the running one's through a folder of
links to everything in its site-packages except this package, added to the search path by a ``.pth`` file; Python runs
no start-up file that lies in such a folder.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from conftest import WriteRecipe
from support import families
from support.families import Family
from support.processes import linked_packages, run_afresh

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))

WAITS = """
import sys
ours = {name for name in sys.modules if name.startswith("mergekit")}
assert not ours, ours
import _mergekit_slta_startup as startup
assert sum(type(finder).__module__ == startup.__name__ for finder in sys.meta_path) == 1
print(startup.__file__)
"""

REGISTERS = """
import sys, importlib.util
sys.meta_path[:] = [finder for finder in sys.meta_path if "mergekit_slta" not in type(finder).__module__]
import _mergekit_slta_startup as startup

def waiting():
    return sum(type(finder).__module__ == startup.__name__ for finder in sys.meta_path)

startup.install()
assert importlib.util.find_spec("mergekit.merge_methods") is not None
startup.install()
assert waiting() == 1
import mergekit.merge_methods as host
assert host.get("slta").spec.name == "slta"
assert host.get("linear").spec.name == "linear"
from mergekit.merge import run_merge
assert run_merge.__wrapped__
assert waiting() == 0
startup.install()
importlib.reload(host)
from importlib.metadata import entry_points
for point in entry_points(group="mergekit.merge_methods"):
    point.load()()
names = [method.spec.name for method in host.registered_methods()]
assert len(names) == len(set(names)), names
assert not hasattr(run_merge.__wrapped__, "__wrapped__")
assert waiting() == 0
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the folder that its commands run in."""

    root: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        return next(self.root.glob("lib/python*/site-packages"))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python away from the checkout; bytecode is written as usual."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return call(self.python, *arguments, cwd=self.root.parent, env=variables)

    def pip(self, *arguments: str) -> None:
        call(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def install(self, what: str) -> None:
        """Install this package alone, from one of `distributions`, with what is there and no package index."""
        self.pip("install", "--no-deps", "--no-index", "--no-build-isolation", what)

    def files(self) -> set[Path]:
        return {*self.site_packages.rglob("*"), *(self.root / "bin").iterdir()}


def call(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_packages(tmp_path_factory.mktemp("dependencies"))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The paths of a built wheel and sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    call(sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "sdist", "-t", "wheel", cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": str(wheel), "sdist": str(sdist)}


def fresh(folder: Path, dependencies: Path) -> Environment:
    environment = Environment(folder / "environment")
    venv.create(environment.root, symlinks=True)
    (environment.site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return environment


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, dependencies: Path, distributions: dict[str, str]
) -> Environment:
    """An environment with the wheel, shared by tests that do not change it."""
    environment = fresh(tmp_path_factory.mktemp("installed"), dependencies)
    environment.install(distributions["wheel"])
    return environment


@pytest.fixture
def broken(tmp_path: Path, installed: Environment) -> Environment:
    """A copy of the environment with the wheel, for a test to damage."""
    return Environment(Path(shutil.copytree(installed.root, tmp_path / "environment", symlinks=True)))


@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
def test_install_and_uninstall(kind: str, tmp_path: Path, dependencies: Path, distributions: dict[str, str]) -> None:
    environment = fresh(tmp_path, dependencies)
    before = environment.files()
    environment.install(distributions[kind])
    file = Path(environment.run("-W", "error:mergekit-slta:RuntimeWarning", "-c", WAITS).stdout.strip())
    assert file.is_relative_to(environment.site_packages)
    assert (file.parent / "mergekit_slta" / "py.typed").is_file()
    environment.pip("uninstall", "-y", "mergekit-slta")
    assert environment.files() == before


def test_the_methods_are_registered_once_whoever_asks_for_it(forks: ForkServerContext) -> None:
    run_afresh(forks, REGISTERS)


@pytest.fixture(scope="module")
def merged(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights file that an SLTA recipe gives inside this process."""
    folder = families.merge(families.recipe(llama), tmp_path_factory.mktemp("merged") / "out")
    return (folder / "model.safetensors").read_bytes()


def test_mergekits_own_command_merges_by_slta(
    installed: Environment, merged: bytes, llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    result = installed.run(f"{SCRIPTS}/mergekit-yaml", str(write_recipe(llama)), str(tmp_path / "out"))
    assert "RuntimeWarning" not in result.stderr, result.stderr
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == merged


def test_merge_where_startup_files_are_off(
    forks: ForkServerContext, merged: bytes, llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "mergekit_slta" not in type(finder).__module__]
from mergekit_slta.cli.commands import main
main()
"""
    run_afresh(forks, code, "merge", write_recipe(llama), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == merged


def test_a_broken_plugin_costs_nothing_outside_mergekit(broken: Environment) -> None:
    shutil.rmtree(broken.site_packages / "mergekit_slta")
    result = broken.run("-c", "pass")
    assert result.stdout + result.stderr == ""


@pytest.mark.parametrize("damage", ["this is no Python\n", "def install():\n    raise OSError('damaged')\n"])
def test_a_start_up_file_that_fails_says_so_in_one_line_and_python_goes_on(
    broken: Environment, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (broken.site_packages / "_mergekit_slta_startup.py").write_text(damage)
    result = broken.run("-c", "print('goes on')")
    assert result.stdout == "goes on\n"
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("mergekit does not know the merge methods of mergekit-slta")
    assert "install mergekit-slta" in result.stderr
    monkeypatch.setenv("MERGEKIT_SLTA_DISABLE", "1")
    assert broken.run("-c", "pass").stderr == ""


def test_everything_that_the_package_imports_is_declared() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in [*(ROOT / "mergekit_slta").rglob("*.py")]]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {"mergekit_slta", "_mergekit_slta_startup"}
    imported = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - others
    by_module = {module: {canonical(name) for name in names} for module, names in packages_distributions().items()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {canonical(re.split(r"[<>=]", line)[0]) for line in settings["project"]["dependencies"]}
    assert not [module for module in imported if not by_module[module] & declared]
    assert declared <= {name for module in imported for name in by_module[module]}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_wheel_holds_the_package_and_its_startup_file(distributions: dict[str, str]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    held = {str(own.relative_to(ROOT)) for own in (ROOT / "mergekit_slta").rglob("*.*") if own.suffix != ".pyc"}
    assert names == held | {"_mergekit_slta_startup.py", "mergekit_slta.pth"}
