"""Real commands with a fault at any of their operations on files.

``faults.c`` counts the operations of a process below a folder and lets one of them go wrong. A clean run of a command
tells how many there are, and of which kind; then each of them can fail in each way that its kind can fail in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from support import families
from support.processes import ROOT

SOURCE = Path(__file__).with_name("faults.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")

# As in faults.c. A full disk and a read-only one stay so; the other faults happen once.
ACTIONS = {
    name: number
    for number, name in enumerate(
        ["", "kill before", "kill after", "SIGTERM", "half a write", "ENOSPC", "EACCES", "EIO", "EROFS", "pause"]
    )
}
KILLS = ("kill before", "kill after", "SIGTERM", "half a write")
# Kinds of operations, and what can go wrong with each.
WAYS = {
    "r": ("EACCES", "EIO"),  # open to read
    "g": ("EIO",),  # read
    "c": ("kill before", "kill after", "SIGTERM", "ENOSPC", "EACCES", "EIO", "EROFS"),  # create, or open to write
    "w": ("kill before", "kill after", "half a write", "ENOSPC", "EIO"),
    "m": ("kill before", "kill after", "ENOSPC", "EACCES", "EROFS"),  # make a folder
    "n": ("kill before", "kill after", "SIGTERM", "EACCES", "EIO", "EROFS"),  # rename
    "u": ("kill before", "kill after", "EACCES", "EIO", "EROFS"),  # unlink
    "t": ("kill before", "kill after", "ENOSPC", "EIO"),  # truncate, or reserve
    "s": ("kill before", "EIO"),  # sync
}


@dataclass(frozen=True)
class Operation:
    number: int
    kind: str
    path: str


@dataclass(frozen=True)
class Fault:
    """What goes wrong at which operation of a command."""

    action: str = ""
    number: int = 0


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or minus the signal; and all that it said.

    ``stopped`` says that it did not end, but waits at its operation.
    """

    code: int
    said: str
    process: int
    stopped: bool = False


class Commands:
    """Runs commands in forks of one process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        library = folder / "faults.so"
        subprocess.run([COMPILER or "cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT), *sys.path]),
            "LD_PRELOAD": str(library),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.fault_server", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "server.log").open("w"),
            text=True,
            env=environment,
        )
        self._runs = 0

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(60)

    def run(
        self,
        command: Sequence[object],
        root: Path,
        fault: Fault = Fault(),
        *,
        log: Path | None = None,
        signal: int = 0,
        delay: float = 0.0,
        user: int = 0,
    ) -> Ended:
        """Run a command whose operations below a folder are counted.

        Args:
            command: the program and its arguments.
            root: the folder; it is the working directory too, and its ``cache`` and ``tmp`` are the user's.
            fault: what goes wrong.
            log: a file for the list of operations.
            signal: sent to the process after ``delay`` seconds.
            user: another user to run it as.
        """
        self._runs += 1
        request: dict[str, Any] = {
            "command": list(map(str, command)),
            "root": str(root),
            "folder": str(root),
            "environment": {"XDG_CACHE_HOME": str(root / "cache"), "TMPDIR": str(root / "tmp"), "HOME": str(root)},
            "said": str(self.folder / f"said-{self._runs}"),
            "log": str(log) if log else "",
            "number": fault.number,
            "action": ACTIONS[fault.action],
            "signal": int(signal),
            "delay": delay,
            "user": user,
        }
        return self._ask(request, Path(request["said"]))

    def resume(self, stopped: Ended, signal: int = signal.SIGCONT) -> Ended:
        """Let a stopped process go on, or end it."""
        return self._ask({"resume": stopped.process, "signal": int(signal)}, Path(stopped.said))

    def _ask(self, request: Mapping[str, Any], said: Path) -> Ended:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, (self.folder / "server.log").read_text()
        answer = json.loads(line)
        if answer["stopped"]:
            return Ended(0, str(said), answer["process"], stopped=True)
        text = said.read_text(errors="replace")
        said.unlink()
        return Ended(answer["code"], text, answer["process"])


@contextmanager
def started(folder: Path) -> Iterator[Commands]:
    commands = Commands(folder)
    try:
        yield commands
    finally:
        commands.close()


# What is run, and what it has to leave behind


@dataclass(frozen=True)
class Scenario:
    """A command in a folder of its own.

    Attributes:
        command: the program and its arguments.
        before: the folder as it is before the command.
        whole: patterns of the files that must never be seen half-written.
        operations: those of a clean run.
        clean: what is in the folder after a clean run.
    """

    command: tuple[str, ...]
    before: Path
    whole: tuple[str, ...]
    operations: tuple[Operation, ...]
    clean: Mapping[str, bytes]

    def faults(self) -> list[Fault]:
        """Every fault that can happen at every operation."""
        return [Fault(action, operation.number) for operation in self.operations for action in WAYS[operation.kind]]

    def changes(self, fault: Fault) -> bool:
        """Whether the fault is at an operation that changes something."""
        return self.operations[fault.number - 1].kind not in "rg"

    def is_whole(self, name: str) -> bool:
        """Whether a file must never be seen half-written."""
        return any(fnmatch(name, pattern) for pattern in self.whole) and not Path(name).name.startswith(".")

    def describe(self, fault: Fault) -> str:
        operation = self.operations[fault.number - 1]
        return f"{fault.action} at {fault.number} ({operation.kind} {operation.path}) of {' '.join(self.command)}"


# mergekit reads the recipe and the configurations before it plans a merge, when no merge method is asked yet.
PREPARATION = (
    "in main\n    config_source",
    "open(config_file",
    "get_architecture_info(",
    "_model_out_config(",
    "loader_cache.get(model)",
)
# What says that something beside the result is missing or was left behind.
TOLD = ("cannot be deleted", "The model card says only", "No plain recipe", "Failed to copy tokenizer", "yourself")

STATISTICS = "stats.safetensors"
SOLVE = ("solve", STATISTICS, "--json", "solution.json", "--recipe", "plain.yml", "--model", "./base=base")
# By name: the command, the patterns of files that must never be half-written, and the commands that are run before it.
CALIBRATE = ("mergekit-slta", "calibrate", "recipe.yml", "-o", STATISTICS, "--quiet")
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "calibrate": (CALIBRATE, (STATISTICS,), ()),
    "add a level": ((*CALIBRATE, "--level", "layer"), (STATISTICS,), (CALIBRATE,)),
    "solve": (
        ("mergekit-slta", *SOLVE, "--quiet", "--ridge", "0.1"),
        ("solution.json", "plain.yml"),
        (CALIBRATE, ("mergekit-slta", *SOLVE)),
    ),
    "report": (("mergekit-slta", "report", STATISTICS, "-o", "report"), ("report/*",), (CALIBRATE,)),
    "slta": (("mergekit-yaml", "measured.yml", "merged"), ("merged/model*.safetensors",), (CALIBRATE,)),
    "featcal": (("mergekit-yaml", "featcal.yml", "merged"), ("merged/model*.safetensors",), ()),
    "actmat": (("mergekit-yaml", "actmat.yml", "merged"), ("merged/model*.safetensors",), ()),
    "merge": (("mergekit-slta", "merge", "recipe.yml", "merged"), ("merged/model*.safetensors",), ()),
}


def write_models(folder: Path) -> None:
    """A tiny family of two experts, and recipes for them with relative paths."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    family = families.make_family(folder, families.config_of("llama", **sizes), records=3, longest=8)
    slta = families.recipe(family, samples=2, max_tokens=8) | {"base_model": "./base"}
    for index, entry in enumerate(slta["models"]):
        entry |= {"model": f"./expert{index}", "parameters": {"calibration": f"task{index}.jsonl"}}
    settings = slta["parameters"]
    families.write_recipe(folder / "recipe.yml", slta)
    families.write_recipe(folder / "measured.yml", slta | {"parameters": settings | {"statistics": STATISTICS}})
    feature = slta | {"merge_method": "featcal", "parameters": settings | {"scratch": "scratch", "report": "report"}}
    families.write_recipe(folder / "featcal.yml", feature)
    models = [{"model": entry["model"]} for entry in slta["models"]]
    families.write_recipe(folder / "actmat.yml", slta | {"merge_method": "actmat", "parameters": {}, "models": models})
    (folder / "tmp").mkdir()


def set_scenario(name: str, commands: Commands, models: Path, folder: Path) -> Scenario:
    """Prepare a command's folder, and run the command cleanly."""
    command, whole, earlier = COMMANDS[name]
    before, root = folder / "before", folder / "run"
    shutil.copytree(models, before)
    for other in earlier:
        done = commands.run(other, before)
        assert done.code == 0, done.said
    shutil.copytree(before, root)
    log = folder / "operations"
    done = commands.run(command, root, log=log)
    assert done.code == 0, done.said
    return scenario_of(command, whole, before, root, log)


def scenario_of(command: tuple[str, ...], whole: tuple[str, ...], before: Path, root: Path, log: Path) -> Scenario:
    """The scenario of a command that has just run cleanly in a folder, with the list of its operations."""
    entries = [line.split(" ", 2) for line in log.read_text(errors="replace").splitlines()]
    operations = [Operation(int(number), kind, path) for number, kind, path in entries]
    return Scenario(command, before, whole, tuple(operations), content(root))


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and every empty folder with a slash at its end."""
    found: dict[str, bytes] = {}
    for parent, folders, files in os.walk(folder):
        found |= {str(Path(parent, name).relative_to(folder)): Path(parent, name).read_bytes() for name in files}
        if not folders and not files:
            found[f"{Path(parent).relative_to(folder)}/"] = b""
    return found


def failure(commands: Commands, scenario: Scenario, fault: Fault, folder: Path) -> str | None:
    """Run a command with a fault, and again without it; returns what was wrong with how it took the fault."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scenario.before, folder)
    ended = commands.run(scenario.command, folder, fault)
    return wrong_after(commands, scenario, ended, folder)


def wrong_after(commands: Commands, scenario: Scenario, ended: Ended, folder: Path) -> str | None:
    """What is wrong with a command that met a fault, with what it left, or with its next run."""
    if ended.code > 0 and (wrong := not_a_sentence(ended.said)):
        return f"{wrong}: {ended.said[-1500:]}"
    before, left = content(scenario.before), content(folder)
    for name in filter(scenario.is_whole, left.keys() | before.keys()):
        # mergekit renames a file of tensors when it knows that it is the only one.
        if left.get(name) not in (before.get(name), *scenario.clean.values(), scenario.clean.get(name)):
            return f"{name} is neither as before nor as after the command"
    if ended.code == 0 and (wrong := difference(scenario.clean, left)):
        lacks = any(left.get(name) != scenario.clean[name] for name in filter(scenario.is_whole, scenario.clean))
        if lacks or not any(told in ended.said for told in TOLD):
            return f"ended well, but {wrong}: {ended.said[-1500:]}"
    again = commands.run(scenario.command, folder)
    if again.code != 0:
        return f"the next run fails: {again.said[-1500:]}"
    wrong = difference(scenario.clean, content(folder))
    return f"after the next run, {wrong}" if wrong else None


def not_a_sentence(said: str) -> str | None:
    """What is wrong with the way in which a command refused: it ends in a line for each thing that is wrong."""
    if "Traceback" in said:
        return None if any(step in said for step in PREPARATION) else "ended in a traceback"
    _, *refusals = re.split(r"^Error: ", said, flags=re.MULTILINE)
    sound = len(refusals) == 1 and all(line.endswith((".", "?")) for line in refusals[0].rstrip().splitlines())
    return None if sound else "did not end in sentences"


def difference(expected: Mapping[str, bytes], found: Mapping[str, bytes]) -> str | None:
    """How the content of two folders differs."""
    lost, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    parts = {"missing": lost, "left over": more, "different": other}
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names) or None
