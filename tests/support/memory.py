"""How much memory this process takes, by Linux's account."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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


class PeakMemory:
    """The largest memory of this process while the block runs, above that at its start; looked at every 2 ms.

    Mapped checkpoint files do not count.
    """

    def __init__(self) -> None:
        self.bytes = 0  # the peak

    def __enter__(self) -> PeakMemory:
        self._start = anonymous_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def look(self) -> None:
        """Look now."""
        self.bytes = max(self.bytes, anonymous_memory() - self._start)

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.look()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


class _LookAfterOperations(TorchDispatchMode):
    def __init__(self, peak: PeakMemory) -> None:
        super().__init__()
        self.peak = peak

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **kwargs or {})
        self.peak.look()
        return result


def peak_of(action: Callable[[], object]) -> int:
    """Bytes that the action takes at most, above what the process took before.

    The process is looked at after every operation of torch as well, because a busy machine may not let the thread that
    looks every 2 ms run.
    """
    with PeakMemory() as peak, _LookAfterOperations(peak):
        action()
    return peak.bytes
