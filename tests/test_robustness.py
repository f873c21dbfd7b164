"""A run that is killed or finds the disk full does no harm, and damaged input ends in a sentence.

The quick suite takes a few cases of each kind; ``pytest -m slow -n 0 tests/test_robustness.py`` takes hundreds. Each
case is decided by its seed.
"""

import contextlib
import copy
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from support import families
from support.adapters import write_adapter
from support.copies import pickled, sharded
from support.families import Family
from support.memory import memory_of_this_process
from support.processes import run_afresh
from support.slow import slow_but

from mergekit_slta.cli.commands import main
from mergekit_slta.recipe.settings import SETTINGS, parameter_specs

# Faults

COMMANDS = {
    "calibrate": ("calibrate", "recipe.yml", "-o", "stats.safetensors", "--quiet"),
    "slta": ("merge", "recipe.yml", "merged", "--quiet"),
    "featcal": ("merge", "featcal.yml", "merged", "--quiet"),
    "actmat": ("merge", "actmat.yml", "merged", "--quiet"),
}


class Ended(NamedTuple):
    """How a command ended: its exit code or minus the signal, what it said, and how often it changed the disk."""

    code: int
    said: str
    changes: int


@dataclass(frozen=True)
class Commands:
    """Runs commands in processes of their own."""

    forks: ForkServerContext
    models: Path  # with data, and recipes for them with relative paths
    folder: Path  # for results

    def run(self, name: str, folder: Path, kill_at: int = 0) -> Ended:
        """Run a command in a folder, and kill it right before it changes the disk there for the given time."""
        said, changes = self.folder / "said", self.folder / "changes"
        said.write_bytes(b"")
        changes.write_bytes(b"")
        arguments = (COMMANDS[name], folder, said, changes, kill_at)
        process = self.forks.Process(target=run_command, args=arguments, daemon=True)
        process.start()
        process.join(300)
        assert process.exitcode is not None, "the command hangs"
        return Ended(process.exitcode, said.read_text(), changes.stat().st_size)

    @functools.cache  # noqa: B019, because a module has one
    def undisturbed(self, name: str) -> tuple[dict[str, bytes], int]:
        """What a command leaves that nothing disturbs, and how often it changes the disk."""
        ended = self.run(name, self.fresh(self.folder / "run"))
        assert ended.code == 0, ended.said
        return results(self.folder / "run"), ended.changes

    def fresh(self, folder: Path) -> Path:
        """A folder with links to the models, whose files are the same each time, and copies of all else."""
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "cache").mkdir(parents=True)
        for entry in self.models.iterdir():
            (folder / entry.name).symlink_to(entry) if entry.is_dir() else shutil.copy(entry, folder)
        return folder


def run_command(command: tuple[str, ...], folder: Path, said: Path, changes: Path, kill_at: int) -> None:
    os.chdir(folder)
    os.environ["TMPDIR"] = str(folder / "cache")
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream)
    log = os.open(changes, os.O_WRONLY | os.O_APPEND)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] & os.O_ACCMODE != os.O_RDONLY
        if not writes and event not in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        if not isinstance(arguments[0], int) and folder in Path(os.fsdecode(arguments[0])).absolute().parents:
            os.write(log, b"x")
            if os.fstat(log).st_size == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    main(command)


def results(folder: Path) -> dict[str, bytes]:
    """All that a command leaves, but for temporary files."""
    files = [path for path in folder.rglob("*") if path.is_file() and "cache" not in path.relative_to(folder).parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def commands(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    models = tmp_path_factory.mktemp("robust") / "models"
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    family = families.make_family(models, families.config_of("llama", **sizes), records=3, longest=8)
    content = families.recipe(family, samples=2, max_tokens=8) | {"base_model": "./base"}
    for index, entry in enumerate(content["models"]):
        entry |= {"model": f"./expert{index}", "parameters": {"calibration": f"task{index}.jsonl"}}
    families.write_recipe(models / "recipe.yml", content)
    families.write_recipe(models / "featcal.yml", content | {"merge_method": "featcal"})
    plain = {"parameters": {}, "models": [{"model": entry["model"]} for entry in content["models"]]}
    families.write_recipe(models / "actmat.yml", content | {"merge_method": "actmat"} | plain)
    return Commands(forks, models, tmp_path_factory.mktemp("commands"))


def check_next_run(commands: Commands, name: str, folder: Path, expected: dict[str, bytes]) -> None:
    """What was left is whole or plainly unfinished, and the next run ends as if nothing had happened."""
    left = results(folder)
    for file in ("stats.safetensors", "merged/model.safetensors"):
        assert left.get(file) in (None, expected.get(file)), file
    again = commands.run(name, folder)
    assert again.code == 0, again.said
    found = results(folder)
    assert sorted(found) == sorted(expected)
    assert [file for file in found if found[file] != expected[file]] == []


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["half-way", "anywhere"])
@pytest.mark.parametrize("name", slow_but(("calibrate", "slta", "featcal"), COMMANDS))
def test_killed_before_a_change(name: str, every: bool, commands: Commands) -> None:
    expected, changes = commands.undisturbed(name)
    for number in range(1, changes + 1) if every else [changes // 2]:
        folder = commands.fresh(commands.folder / "run")
        assert commands.run(name, folder, kill_at=number).code == -signal.SIGKILL
        check_next_run(commands, name, folder, expected)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A disk of its own, in memory."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(("name", "room"), [("slta", 0), ("featcal", 2**14)])
def test_a_full_disk(name: str, room: int, commands: Commands, tmp_path: Path) -> None:
    expected, _ = commands.undisturbed(name)
    disk = tmp_path / "disk"
    with small_disk(disk, 2**23):
        folder = commands.fresh(disk / "run")
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        os.truncate(disk / "filler", max(0, (disk / "filler").stat().st_size - room))
        ended = commands.run(name, folder)
        if ended.code or not room:  # the smallest results have room
            assert ended.code == 3 and "Traceback" not in ended.said and "Error: " in ended.said, ended.said
            assert any(words in ended.said for words in ("full", "No space left", "room")), ended.said
        (disk / "filler").unlink()
        check_next_run(commands, name, folder, expected)


# Damaged files

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 7, 2**64, -(10**30), 0.5, float("nan"), float("inf"), "", "é\u2028\x85", "\x00", "1e5"),
    *("../..", "x" * 5000, [], {}, [[]], [None], {"": None}, [1, "a"]),
)


def damage_bytes(content: bytes, rng: random.Random, within: int) -> bytes:
    """Flip, cut, zero or insert bytes, most of them among the first ``within``."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        spot = rng.randrange(max(1, min(len(data), within) if rng.random() < 0.8 else len(data)))
        length, how = rng.choice([1, 4, 64, 1000]), rng.randrange(5)
        if how < 2 and data:
            data[spot % len(data)] ^= 1 << rng.randrange(8)
        elif how == 2:
            del data[spot:]
        else:
            data[spot : spot + length * (how == 3)] = bytes(length) if how == 3 else rng.randbytes(length)
    return bytes(data)


def damage_value(content: Any, rng: random.Random) -> Any:
    """Take values out of a tree of dictionaries and lists, rename their keys, or put odd values in their places."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = list(places_in(content))
        if not places:
            return rng.choice(ODD)
        holder, key = rng.choice(places)
        how = rng.randrange(4)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[f"{key}s"] = holder.pop(key)
        elif how == 2 and isinstance(holder[key], (int, float)):
            holder[key] *= rng.choice([0, -1, 2, 1.5, 10**9])
        else:
            holder[key] = copy.deepcopy(rng.choice([*ODD, [holder[key]]]))
    return content


def places_in(content: Any) -> Iterator[tuple[Any, Any]]:
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        yield content, key
        yield from places_in(value)


def damaged(name: str, content: bytes, rng: random.Random) -> bytes:
    """The content of a file of a name with damaged bytes, most of them in a header, or with damaged values."""
    end = 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else len(content)
    if name.endswith(".bin") or rng.random() < 0.4:
        return damage_bytes(content, rng, end)
    if name.endswith(".safetensors"):
        values = json.loads(content[8:end])
        if info := values.get("__metadata__", {}).get("mergekit_slta"):
            values["__metadata__"]["mergekit_slta"] = json.dumps(damage_value(json.loads(info), rng))
        header = json.dumps(values if info and rng.random() < 0.5 else damage_value(values, rng)).encode()
        length = len(header) if rng.random() < 0.9 else rng.choice([0, 2**31, 2**63, len(content)])
        return length.to_bytes(8, "little") + header + content[end:]
    if name.endswith(".jsonl"):
        *lines, _ = content.split(b"\n")
        spot = rng.randrange(len(lines))
        lines[spot] = json.dumps(damage_value(json.loads(lines[spot]), rng)).encode()
        return b"\n".join(lines).decode().encode(rng.choice(["utf-8", "utf-16"]))
    if rng.random() < 0.1:  # deeper than a parser can go
        return content.replace(b":", b":" + b"[" * 100_000, 1)
    return json.dumps(damage_value(json.loads(content), rng)).encode()


FILES = (
    *("base/config.json", "pickled/config.json", "base/tokenizer.json", "base/tokenizer_config.json"),
    *("base/model.safetensors", "sharded/model-00001-of-00006.safetensors", "sharded/model.safetensors.index.json"),
    *("pickled/pytorch_model.bin", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"),
    *("base/generation_config.json", "task0.jsonl", "stats.safetensors"),
)
MEMORY = 4 * 10**9  # bytes of address space that a command may take above what this process had before
SEEDS = [pytest.param(range(2), id="few"), pytest.param(range(2, 300), id="many", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def scene(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a base model, an expert in shards, a pickled one, and one that is an adapter; and its statistics."""
    folder = tmp_path_factory.mktemp("scene")
    shutil.copytree(llama.base, folder / "base")
    sharded(llama.experts[0], folder / "sharded")
    pickled(llama.experts[1], folder / "pickled")
    write_adapter(llama.base, folder / "adapter")
    experts = [folder / "sharded", folder / "pickled", f"{folder / 'base'}+{folder / 'adapter'}"]
    content = families.recipe(llama, samples=3, max_tokens=8) | {"base_model": str(folder / "base")}
    for entry, expert, data in zip(content["models"], experts, llama.data, strict=True):
        shutil.copy(data, folder)
        entry |= {"model": str(expert), "parameters": {"calibration": str(folder / data.name)}}
    families.write_recipe(folder / "recipe.yml", content)
    assert refusal("calibrate", folder / "recipe.yml", "-o", folder / "stats.safetensors", cache=folder / "cache") == ""
    shutil.rmtree(folder / "cache")
    assert refusal("check", folder / "recipe.yml", cache=folder / "cache") == ""
    return folder


def refusal(*arguments: object, cache: Path | None = None) -> str:
    """Run a command in this process; returns what it says when it refuses, nothing when it does not."""
    options = ["--lora-merge-cache", cache] if cache else []
    usual, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_of_this_process("VmSize") + MEMORY, most))
    try:
        result = CliRunner().invoke(main, list(map(str, [*arguments, *options, "--quiet"])))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (usual, most))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    return result.output if result.exit_code else ""


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_said_in_a_sentence(name: str, seeds: range, scene: Path, tmp_path: Path) -> None:
    """A refusal names the damaged file, or the model that it belongs to."""
    path, recipe = scene / name, scene / "recipe.yml"
    sound = path.read_bytes()
    try:
        for seed in seeds:
            path.write_bytes(damaged(name, sound, random.Random(f"{name} {seed}")))
            if name == "stats.safetensors":
                said = refusal("solve", path)
            else:
                cache, made = tmp_path / f"merged{seed}", tmp_path / f"stats{seed}.safetensors"
                said = refusal("check", recipe, cache=cache) or refusal("calibrate", recipe, "-o", made, cache=cache)
            assert not said or said.rstrip().endswith((".", "?")), f"seed {seed}: {said}"
            named = not said or path.name in said or f"/{path.parent.name}" in said
            assert named, f"seed {seed} does not name {name}: {said}"
    finally:
        path.write_bytes(sound)


# Any value at all

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
PARAMETERS = [(method, spec) for method, kind in SETTINGS.items() for spec in parameter_specs(kind)]


@settings(
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "60")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(place=st.sampled_from(PARAMETERS), value=VALUES)
def test_any_value_of_a_parameter(place: tuple[str, ParameterSpec], value: Any, scene: Path, tmp_path: Path) -> None:
    method, spec = place
    content = yaml.safe_load((scene / "recipe.yml").read_text()) | {"merge_method": method}
    content["models"] = content["models"][:2]
    if "calibration" not in SETTINGS[method].expert.model_fields:
        content["models"] = [{"model": entry["model"], "parameters": {}} for entry in content["models"]]
    own = {} if spec.scope is ParameterScope.SHARED else content["models"][0]["parameters"]
    own[spec.name] = value
    content["parameters"] = own if spec.scope is ParameterScope.SHARED else {}
    said = refusal("check", families.write_recipe(tmp_path / "recipe.yml", content))
    assert not said or spec.name in said or "recipe.yml" in said, said


# Neighbours

METHODS: dict[str, dict[str, Any]] = {
    "linear": {"weight": 0.5},
    "task_arithmetic": {"weight": 0.5},
    "dare_ties": {"weight": 0.5, "density": 0.5},
}
MERGE_ALL = """
import sys, pathlib
sys.meta_path[:] = [finder for finder in sys.meta_path if "mergekit_slta" not in type(finder).__module__]
if sys.argv[1] == "with":
    import _mergekit_slta_startup as startup
    startup.install()
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import registered_methods
from mergekit.options import MergeOptions
assert any(method.spec.name == "slta" for method in registered_methods()) == (sys.argv[1] == "with")
for recipe in sorted(pathlib.Path(sys.argv[2]).glob("*.yml")):
    config = MergeConfiguration.model_validate(yaml.safe_load(recipe.read_text()))
    run_merge(config, str(pathlib.Path(sys.argv[3]) / recipe.stem), MergeOptions(quiet=True, random_seed=1))
"""


def test_mergekits_other_methods_write_the_same_bytes(llama: Family, forks: ForkServerContext, tmp_path: Path) -> None:
    for method, own in METHODS.items():
        content = families.recipe(llama, method, experts=[0, 1], calibration=False, per_expert=own)
        if method == "linear":
            del content["base_model"]
        families.write_recipe(tmp_path / f"{method}.yml", content)
    written = {}
    for which in ("with", "without"):
        run_afresh(forks, MERGE_ALL, which, tmp_path, tmp_path / which)
        written[which] = results(tmp_path / which)
        for method in METHODS:
            del written[which][f"{method}/README.md"]
    assert written["with"].keys() == written["without"].keys()
    assert [file for file, content in written["with"].items() if content != written["without"][file]] == []
    assert sum(file.endswith("model.safetensors") for file in written["with"]) == len(METHODS)
