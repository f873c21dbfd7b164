"""How much memory this process takes, by Linux's account."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path


def anonymous_memory() -> int:
    """Bytes that belong to this process alone; what is mapped from files is not counted."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) * 1024


def peak_of(action: Callable[[], object]) -> int:
    """Bytes that the action takes at most, above what the process took before."""
    before, peak, ended = anonymous_memory(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous_memory())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        action()
    finally:
        ended.set()
        sampler.join()
    return peak - before
