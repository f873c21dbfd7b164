"""Cases that are decided by their seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def failures(check: Callable[[int], str | None], seeds: Iterable[int]) -> dict[int, str]:
    """What a check says is wrong with the cases of seeds, by the seeds of those in which something is."""
    return {seed: wrong for seed in seeds if (wrong := check(seed))}
