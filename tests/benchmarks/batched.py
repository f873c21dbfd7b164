"""Would one product for several models' maps be faster than one product for each?

    python tests/benchmarks/batched.py                  # on the processor
    python tests/benchmarks/batched.py --device cuda

Prints one JSON line per width and number of tokens, for the maps of a base model and three experts: the time of one
product with the maps below each other, where all models have the same input, and of one batched product, where each
has its own, over the time of a product for each model. Below 1 is faster. The copies that bring the maps of several
files together are not counted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import click
import torch

MODELS = 4
SIZES = ((576, 512), (1024, 512), (2048, 64), (2048, 512), (4096, 64), (4096, 512), (4096, 2048))


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--repeats", default=5, show_default=True)
def main(device: str, repeats: int) -> None:
    """Compare products, alternating."""
    torch.manual_seed(0)
    for width, tokens in SIZES:
        maps = torch.randn(MODELS, width, width, device=device)
        same = torch.randn(tokens, width, device=device)
        own = torch.randn(MODELS, tokens, width, device=device)
        ways: dict[str, Callable[[], object]] = {
            "apart": lambda: [same @ matrix.T for matrix in maps],  # noqa: B023
            "below each other": lambda: same @ maps.flatten(0, 1).T,  # noqa: B023
            "apart, own inputs": lambda: [given @ matrix.T for given, matrix in zip(own, maps, strict=True)],  # noqa: B023
            "batched": lambda: torch.bmm(own, maps.mT),  # noqa: B023
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(1 + repeats):
            for name, way in ways.items():
                times[name].append(seconds(way, device))
        middle = {name: statistics.median(found[1:]) for name, found in times.items()}  # the first one warms up
        result = {
            "benchmark": "batched",
            "width": width,
            "tokens": tokens,
            "below_each_other_over_apart": round(middle["below each other"] / middle["apart"], 2),
            "batched_over_apart": round(middle["batched"] / middle["apart, own inputs"], 2),
        }
        print(json.dumps(result), flush=True)


def seconds(way: Callable[[], object], device: str) -> float:
    """The time of a computation; processor time where that computes."""
    if device == "cpu":
        begin = time.process_time()
        way()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    way()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
