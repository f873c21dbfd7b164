"""How much memory this process takes, by Linux's account."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

needs_account = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's account of anonymous memory"
)


def anonymous_memory() -> int:
    """The bytes of this process that no file holds."""
    resident, shared = map(int, Path("/proc/self/statm").read_bytes().split()[1:3])
    return (resident - shared) * resource.getpagesize()


def memory_of_this_process(kind: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"This kernel does not report {kind}.")


def torch_without_memory() -> RuntimeError:
    """What torch raises where the computer has too little memory."""
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("a computer with an exabyte")


class PeakMemory(TorchDispatchMode):
    """The largest memory of this process while the block runs, above that at its start; mapped files do not count.

    It is looked at every 2 ms, and after every operation of torch as well, because a busy machine may not let the
    thread run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0  # the peak
        self._start, self._ended = anonymous_memory(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _look(self) -> None:
        self.bytes = max(self.bytes, anonymous_memory() - self._start)

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._look()

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._ended.set()
        self._thread.join()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **kwargs or {})
        self._look()
        return result


def peak_of(action: Callable[[], object]) -> int:
    """Bytes that the action takes at most, above what the process took before."""
    with PeakMemory() as peak:
        action()
    return peak.bytes
