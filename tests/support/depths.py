"""The peak memory of the same work on a small and on a large mixture, whose layers outweigh all else that it takes."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from support import families, memory
from support.families import Family
from support.processes import TIMEOUT

MIXTURE_WIDTH = 256
STACK = 2**24  # bytes in float32
TASKS = [[[3 + (i * j) % 50 for i in range(16)] for j in range(4 * task + 1, 4 * task + 5)] for task in range(2)]

# Takes a family and a new folder, and works on ``TASKS``.
Work = Callable[[Family, Path], object]

needs_account = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's account of anonymous memory"
)


def peaks_of_mixtures(forks: ForkServerContext, work: Work, folder: Path) -> list[int]:
    """The peaks of the work on a mixture of few experts, and of one of as many as make a stack of ``STACK`` bytes."""
    peaks = []
    for experts in (4, STACK // (4 * 3 * MIXTURE_WIDTH**2)):
        sizes = {"hidden_size": MIXTURE_WIDTH, "intermediate_size": MIXTURE_WIDTH, "num_local_experts": experts}
        config = families.config_of("mixtral", **sizes, num_hidden_layers=1)
        own = folder / str(experts)
        family = families.make_family(own, config, dtype=torch.bfloat16)
        peaks.append(peak_in_a_process(forks, work, family, own))
    print(f"peaks {[peak / 2**20 for peak in peaks]} MiB, {STACK / 2**20} MiB for the experts of one model's layer")
    return peaks


def peak_in_a_process(forks: ForkServerContext, work: Work, family: Family, folder: Path) -> int:
    """Bytes that the work takes at most in a process of its own, above what a little such work leaves."""
    receive, answer = forks.Pipe(duplex=False)
    process = forks.Process(target=_report, args=(work, family, folder, answer), daemon=True)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    peak: int = receive.recv()
    return peak


def _report(work: Work, family: Family, folder: Path, answer: Connection) -> None:
    work(families.make_family(folder / "little"), folder / "little" / "work")
    answer.send(memory.peak_of(lambda: work(family, folder / "work")))
