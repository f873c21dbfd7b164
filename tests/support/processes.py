"""Commands of this checkout in processes of their own."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds after which what hangs is ended; none of them takes a tenth of it


def run_python(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run Python with this process's packages and return what it said."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == code, done.stderr
    return done


def linked_packages(folder: Path) -> Path:
    """Fill a folder with links to everything in this Python's site-packages except this package."""
    folder.mkdir(exist_ok=True)
    for library in dict.fromkeys(os.path.realpath(path) for path in sys.path if path.endswith("packages")):
        for entry in Path(library).iterdir():
            if "mergekit_slta" not in entry.name and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


def torchrun(count: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script, or ``-m`` and a module, in as many processes as torchrun starts on this machine."""
    return run_python(
        "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={count}", *arguments
    )


def in_a_process(forks: ForkServerContext, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a module's function returns in a process of its own; what it raises fails the test."""
    receive, answer = forks.Pipe(duplex=False)
    process = forks.Process(target=_answer, args=(answer, function, arguments), daemon=True)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    return receive.recv()


def _answer(answer: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    answer.send(function(*arguments))


def run_afresh(forks: ForkServerContext, code: str, *arguments: object) -> str:
    """Run code in a process that has imported the libraries, but nothing of mergekit or of this package.

    For what depends on the order of their imports, that is as good as a new process, and it starts at once. Returns
    what it says on both streams; what it raises fails the test.
    """
    with tempfile.NamedTemporaryFile("r") as said:
        own = (code, list(map(str, arguments)), said.name, os.environ.copy())
        process = forks.Process(target=_run_afresh, args=own, daemon=True)
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode == 0, said.read()
        return said.read()


def _run_afresh(code: str, arguments: list[str], said: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # what it is forked from has that of the first test
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mergekit", "mergekit_slta")]:
        del sys.modules[name]
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})


def command_together(
    forks: ForkServerContext, count: int, *arguments: object, patch: Callable[[int], None] | None = None
) -> str:
    """Run ``mergekit-slta`` in processes that know of each other as torchrun's do, and end all when one has failed.

    Unlike torchrun's, they have imported everything when they start. ``patch`` is given each process's index before the
    command runs, to have one of them fail. Returns what they say on standard error.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            forks.Process(
                target=_command_of_one, args=(index, count, port, list(map(str, arguments)), patch, folder), daemon=True
            )
            for index in range(count)
        ]
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        while running:
            ended = [running.pop(sentinel) for sentinel in wait(list(running), TIMEOUT) if isinstance(sentinel, int)]
            if not ended or any(process.exitcode for process in ended):
                for process in running.values():
                    process.terminate()
        said = "".join(Path(folder, f"err{index}").read_text() for index in range(count))
    assert any(process.exitcode for process in processes) == (patch is not None), said
    return said


def _command_of_one(
    index: int, count: int, port: int, arguments: list[str], patch: Callable[[int], None] | None, folder: str
) -> None:
    from mergekit_slta.cli.commands import main

    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{stream}{index}", os.O_WRONLY | os.O_CREAT), number)
    known = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in known.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_RUN_ID"] = str(port)
    if patch is not None:
        patch(index)
    main(arguments)
