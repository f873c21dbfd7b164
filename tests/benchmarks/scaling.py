"""How calibration's time and memory grow with samples, tokens, experts, layers and ranks.

    python tests/benchmarks/scaling.py --size 20m

Prints one JSON line per quantity: the values, calibration's seconds and peak anonymous memory (reading and writing
included), and the exponents of the power laws fitted to them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import yaml
from common import CACHE, be_quiet, in_subprocess, make_family, make_recipe, write_samples
from support.memory import PeakMemory

from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.measure import measured_statistics

DEFAULTS = {"samples": 8, "tokens": 128, "experts": 3, "layers": 4}
GRIDS = {"samples": (4, 8, 16, 32), "tokens": (64, 128, 256, 512), "experts": (1, 2, 3, 4), "layers": (2, 4, 8, 16)}
RANKS = (1, 2)


@click.command()
@click.option("--size", default="20m", show_default=True)
@click.option("--level", default="attn_mlp", show_default=True)
@click.option("--only", type=click.Choice([*GRIDS, "ranks"]), help="Only this quantity.")
@click.option("--one", help="Run one calibration with these values, as JSON, in this process.")
def main(size: str, level: str, only: str | None, one: str | None) -> None:
    """Fit how calibration scales."""
    be_quiet()
    if one:
        print(json.dumps(_run(size, level, json.loads(one))))
        return
    for quantity, grid in GRIDS.items():
        if only in (None, quantity):
            runs = []
            for value in grid:
                values = DEFAULTS | {quantity: value}
                make_family(CACHE, size, values["experts"], values["layers"])
                runs.append(
                    in_subprocess(__file__, [f"--size={size}", f"--level={level}", f"--one={json.dumps(values)}"])
                )
            report(quantity, list(grid), runs)
    if only in (None, "ranks"):
        report("ranks", list(RANKS), [{"seconds": _torchrun(size, level, ranks)} for ranks in RANKS])


def report(quantity: str, values: list[int], runs: list[dict[str, float]]) -> None:
    """Print one quantity's measurements with the exponent of each fitted power law."""
    measured = {key: [round(run[key], 3) for run in runs] for key in runs[0]}
    exponents = {
        f"{key}_exponent": round(float(np.polyfit(np.log(values), [math.log(v) for v in series], 1)[0]), 2)
        for key, series in measured.items()
    }
    print(
        json.dumps({"benchmark": "scaling", "quantity": quantity, "values": values} | measured | exponents), flush=True
    )


def _run(size: str, level: str, values: dict[str, Any]) -> dict[str, float]:
    folders = make_family(CACHE, size, values["experts"], values["layers"])
    recipe = make_recipe(folders, "slta", values["samples"], values["tokens"])
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as peak:
        start = time.perf_counter()
        measured_statistics(Experiment(recipe, quiet=True), [level], Path(folder) / "statistics.safetensors")
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "anonymous_mb": peak.bytes / 2**20}


def _torchrun(size: str, level: str, ranks: int) -> float:
    """Seconds of a whole calibration by that many processes (one thread each if several), their start included."""
    folders = make_family(CACHE, size, DEFAULTS["experts"], DEFAULTS["layers"])
    files = write_samples(CACHE, DEFAULTS["experts"], DEFAULTS["samples"], DEFAULTS["tokens"])
    recipe = {
        "merge_method": "slta",
        "base_model": str(folders[0]),
        "models": [
            {"model": str(folder), "parameters": {"calibration": str(file)}}
            for folder, file in zip(folders[1:], files, strict=True)
        ],
        "parameters": {"level": level, "samples": DEFAULTS["samples"], "max_tokens": DEFAULTS["tokens"]},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yml"
        file.write_text(yaml.safe_dump(recipe))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "mergekit_slta"]
        start = time.perf_counter()
        subprocess.run(
            [*command, "calibrate", str(file), "-o", f"{folder}/statistics.safetensors", "--quiet"],
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - start


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
