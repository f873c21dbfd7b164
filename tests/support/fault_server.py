"""Runs commands in forks of a process that has imported everything, each with a fault planned for it.

The first argument is the preloaded library. Requests and answers are lines of JSON on the standard streams; see
``support.faults.Commands``, which starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# Imported here, so that a fork is ready at once.
import torch
from mergekit.scripts.run_yaml import main as mergekit_yaml
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401

import mergekit_slta.checks.examine
import mergekit_slta.evaluate
import mergekit_slta.reports.merge
import mergekit_slta.slta.measure  # noqa: F401
from mergekit_slta.cli.commands import main as mergekit_slta_main
from mergekit_slta.host import registry

COMMANDS: dict[str, Callable[..., Any]] = {"mergekit-yaml": mergekit_yaml, "mergekit-slta": mergekit_slta_main}


def run(request: dict[str, Any], library: ctypes.CDLL) -> NoReturn:
    """Run a command in this process, and end the process as Python would."""
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if request["log"] else -1
    if request["user"]:
        os.setgid(request["user"])
        os.setuid(request["user"])
    program, *arguments = request["command"]
    code: Any = 0
    library.faults_arm(request["root"].encode(), ctypes.c_long(request["number"]), request["action"], log)
    try:
        COMMANDS[program](arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    library.faults_arm(b"", ctypes.c_long(0), 0, -1)
    os._exit(code if isinstance(code, int) else int(code is not None))


def ended(process: int) -> dict[str, Any]:
    """Wait until a process stops at its operation, or ends."""
    _, status = os.waitpid(process, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"process": process, "stopped": True}
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {"process": process, "stopped": False, "code": code}


def answer(request: dict[str, Any], library: ctypes.CDLL) -> dict[str, Any]:
    if process := request.get("resume"):
        os.kill(process, request["signal"])
        return ended(process)
    process = os.fork()
    if not process:
        run(request, library)
    if request["signal"]:
        time.sleep(request["delay"])
        os.kill(process, request["signal"])
    return ended(process)


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    registry.watch_planner()  # as the start-up file does where the package is installed
    library = ctypes.CDLL(arguments[0])
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), library)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
