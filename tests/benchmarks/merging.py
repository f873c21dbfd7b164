"""Merging with ready statistics against mergekit's own methods, on the same checkpoints.

    python tests/benchmarks/merging.py --size 150m --experts 3

Prints one JSON line: wall time of ``run_merge``, peak anonymous memory and peak resident memory of each method, each
measured in a process of its own above what the imports take, as medians over repeats in turns, and their ratios.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import click
import torch
from common import CACHE, be_quiet, in_subprocess, make_family, make_recipe
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from support.memory import PeakMemory

import mergekit_slta.host.patches
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.measure import measured_statistics

METHODS = ("slta", "task_arithmetic", "linear")
LEVEL = "attn_mlp"


@click.command()
@click.option("--size", default="60m", show_default=True)
@click.option("--experts", default=3, show_default=True)
@click.option("--threads", default=0, help="Threads for torch; 0 for its own choice.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--method", type=click.Choice(METHODS), help="Run only this one, in this process.")
def main(size: str, experts: int, threads: int, repeats: int, method: str | None) -> None:
    """Compare merging by slta with task_arithmetic and linear."""
    be_quiet()
    if threads:
        torch.set_num_threads(threads)
    folders = make_family(CACHE, size, experts)
    file = folders[0].parent / f"{experts}-experts.slta.safetensors"
    if method:
        mergekit_slta.host.patches.install()
        print(json.dumps(_merge(method, folders, file)))
        return
    _measure(folders, file)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    arguments = [f"--size={size}", f"--experts={experts}", f"--threads={threads}"]
    for _ in range(repeats):
        for name, results in runs.items():
            results.append(in_subprocess(__file__, [*arguments, f"--method={name}"]))
    medians = {
        name: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for name, results in runs.items()
    }
    ratios = {
        f"over_{name}": {key: round(medians["slta"][key] / medians[name][key], 3) for key in medians[name]}
        for name in METHODS[1:]
    }
    rounded = {name: {key: round(value, 3) for key, value in values.items()} for name, values in medians.items()}
    print(json.dumps({"benchmark": "merging", "size": size, "experts": experts, "repeats": repeats} | rounded | ratios))


def _measure(folders: list[Path], file: Path) -> None:
    """Make the statistics, once."""
    recipe = make_recipe(folders, "slta", samples=2, max_tokens=16)
    measured_statistics(Experiment(recipe, quiet=True), [LEVEL], file)


def _merge(method: str, folders: list[Path], file: Path) -> dict[str, float]:
    base, *experts = map(str, folders)
    parameters = {"statistics": str(file), "level": LEVEL} if method == "slta" else {}
    weights = {} if method == "slta" else {"parameters": {"weight": 0.4}}
    recipe = {
        "merge_method": method,
        "models": [{"model": expert, **weights} for expert in experts],
        "parameters": parameters,
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }
    if method != "linear":
        recipe["base_model"] = base
    config = MergeConfiguration.model_validate(recipe)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as anonymous, PeakMemory("VmRSS") as resident:
        start = time.perf_counter()
        run_merge(config, f"{folder}/merged", MergeOptions(quiet=True, write_model_card=False))
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "anonymous_mb": anonymous.bytes / 2**20, "resident_mb": resident.bytes / 2**20}


if __name__ == "__main__":
    main()
