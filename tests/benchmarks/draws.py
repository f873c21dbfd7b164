"""Accuracy on the quickstart's family with several draws of the calibration prompts.

    python tests/benchmarks/draws.py

Merges the family in ``examples/family`` by ``featcal`` and ``slta`` with 3 and with 30 prompts per task, once for each
seed, which draws new prompts; seed 0 draws the quickstart's. Writes results/draws.json: the
average over the three tasks of every merge, in the order of the seeds.
"""

from pathlib import Path

import click
from common import CACHE, be_quiet, write_result
from family import copy_shipped, evaluate, write_calibration
from quickstart import average, merge, recipes

METHODS = ("featcal", "slta attn_mlp")
SAMPLES = (3, 30)


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=list(range(10)), show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "draws")
def main(seeds: tuple[int, ...], out: Path) -> None:
    """Merge the shipped family with each draw of prompts, and write the averages to results/draws.json."""
    be_quiet(threads=1)
    models = copy_shipped(out / "family")
    known = recipes(models, out, ())
    scores: dict[str, list[float]] = {}
    for seed in seeds:
        for task, path in models.calibration.items():
            write_calibration(path, task, seed)
        for method in METHODS:
            recipe = known[method]
            recipe["parameters"].pop("statistics", None)
            for samples in SAMPLES:
                recipe["parameters"]["samples"] = samples
                merged = merge(out, f"{method} {samples}", recipe, 0)
                scores.setdefault(f"{method} {samples}", []).append(round(average(evaluate(merged)), 3))
    write_result("draws", scores, seeds=seeds)


if __name__ == "__main__":
    main()
