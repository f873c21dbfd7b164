"""Would one product for several models' maps be faster than one product for each?

    python tests/benchmarks/batched.py                  # on the processor, in processor seconds
    python tests/benchmarks/batched.py --device cuda

Prints one JSON line per width and number of tokens, for the maps of a base model and three experts: the time of one
product with the maps below each other, where all models have the same input, and of one batched product, where each
has its own, over the time of a product for each model. Below 1 is faster. The copies that bring the maps of several
files together are not counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import click
import torch
from common import timed, wait_for

MODELS = 4
SIZES = ((576, 512), (1024, 512), (2048, 64), (2048, 512), (4096, 64), (4096, 512), (4096, 2048))


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--repeats", default=5, show_default=True)
def main(device: str, repeats: int) -> None:
    """Compare products of each size."""
    torch.manual_seed(0)
    for width, tokens in SIZES:
        found = compare(width, tokens, device, repeats)
        print(json.dumps({"benchmark": "batched", "width": width, "tokens": tokens, **found}), flush=True)


def compare(width: int, tokens: int, device: str, repeats: int) -> dict[str, float]:
    """The two ratios for square maps, from medians of times that take turns."""
    maps = torch.randn(MODELS, width, width, device=device)
    same = torch.randn(tokens, width, device=device)
    own = torch.randn(MODELS, tokens, width, device=device)
    ways: dict[str, Callable[[], object]] = {
        "apart": lambda: [same @ matrix.T for matrix in maps],
        "below_each_other": lambda: same @ maps.flatten(0, 1).T,
        "own_apart": lambda: [given @ matrix.T for given, matrix in zip(own, maps, strict=True)],
        "batched": lambda: torch.bmm(own, maps.mT),
    }

    def clock() -> float:
        wait_for(device)
        return time.process_time() if device == "cpu" else time.perf_counter()

    timed(ways, 1, clock)  # the first products warm up
    times = timed(ways, repeats, clock)
    return {
        "below_each_other_over_apart": round(times["below_each_other"] / times["apart"], 2),
        "batched_over_apart": round(times["batched"] / times["own_apart"], 2),
    }


if __name__ == "__main__":
    main()
