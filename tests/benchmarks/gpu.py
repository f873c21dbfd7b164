"""Calibration, featcal and merging on large shapes, against plain forward passes: made for one GPU, runs without.

    python tests/benchmarks/gpu.py                          # a 7B Llama and a mixture, in less than nine minutes
    python tests/benchmarks/gpu.py --shape tiny --device cpu

Needs nothing but this repository: checkpoints of random bfloat16 numbers are written layer by layer. Times for all
layers of a shape are extrapolated in proportion to the layers. Writes gpu.json and gpu.md after every row, so that a
run that is cut off leaves what it has measured, and prints the table.

The floor is one forward pass of each of the T+1 models over all samples, in float32 with the weights in memory. Merges
run through mergekit, reading and writing included.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from common import CACHE, SHAPES, be_quiet, load, make_recipe, wait_for, write_models, write_samples
from mergekit import merge as mergekit_merge
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from support.memory import PeakMemory

import mergekit_slta.host.patches
from mergekit_slta.engine.streams import Batch, fitting_batch, make_batches
from mergekit_slta.layers.trace import on_device
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.measure import statistics_of

EXPERTS = 3
FORWARD = "plain forward passes"


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice([*SHAPES]), default=["7b", "mixture"])
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--samples", default=10, show_default=True, help="Of each task.")
@click.option("--tokens", default=512, show_default=True, help="Of each sample.")
@click.option("--layers", default=4, show_default=True, help="Of the shape; 0 for all.")
@click.option("--repeats", default=2, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=CACHE, help="For checkpoints, deleted afterwards.")
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), default=Path(), help="For gpu.json and gpu.md.")
def main(shapes: Sequence[str], layers: int, folder: Path, out: Path, **settings: Any) -> None:
    """Measure what a GPU makes of calibration, featcal and merging."""
    be_quiet()
    mergekit_slta.host.patches.install()
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for shape in shapes:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            models = write_models(Path(place), shape, EXPERTS, layers, settings["device"])
            results.append({})
            for result in measure(models, shape, Path(place), **settings):
                results[-1] = result
                (out / "gpu.json").write_text(json.dumps(results, indent=1))
                (out / "gpu.md").write_text("\n".join(map(table, results)))
    click.echo((out / "gpu.md").read_text())


# Measurements


def measure(
    models: list[Path], shape: str, folder: Path, device: str, samples: int, tokens: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Time everything, and watch its memory; yields what is known after every row."""
    recipe = make_recipe(models, "slta", samples, tokens)
    files = write_samples(CACHE, EXPERTS, samples, tokens)
    experiment = Experiment(recipe, quiet=True)
    data, decoder = experiment.load_data(recipe.experts), experiment.decoder
    batches = make_batches([own.token_ids for own in data], fitting_batch(on_device(decoder, device)))
    layers, ready = decoder.model.config.num_hidden_layers, folder / "ready.safetensors"

    def calibrate(level: str, target: Path | None = None) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            opened = Experiment(recipe, device=device, quiet=True)
            statistics_of(opened, [level], target or Path(place) / "statistics.safetensors")

    merge = functools.partial(_merge, models, folder, device)
    prompts = {"samples": samples, "max_tokens": tokens}
    loaded = [load(models[0], device)]  # the models differ in their numbers alone
    rows: dict[str, Callable[[], object]] = {
        FORWARD: lambda: [_forward(loaded[0], batches, device) for _ in models],
        "slta attn_mlp": lambda: calibrate("attn_mlp"),
        "slta layer": lambda: calibrate("layer"),
        "featcal": lambda: merge("featcal", files, **prompts),
        "featcal, ridge 0.03": lambda: merge("featcal", files, ridge=0.03, **prompts),
        "actmat": lambda: merge("actmat"),
        "merge, ready statistics": lambda: merge("slta", statistics=str(ready)),
        "merge, task_arithmetic": lambda: merge("task_arithmetic"),
    }
    all_layers = SHAPES[shape].num_hidden_layers
    result: dict[str, Any] = {
        "shape": shape,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "models": len(models),
        "samples": samples * EXPERTS,
        "tokens": tokens,
        "layers": layers,
        "all_layers": all_layers,
        "rows": [],
    }
    for name, action in rows.items():
        if "ready" in name:
            calibrate("attn_mlp", ready)
        runs = [_run(action, device) for _ in range(repeats)]
        seconds = [run[0] for run in runs]
        row = {
            "name": name,
            "seconds": statistics.mean(seconds),
            "deviation": statistics.pstdev(seconds),
            "extrapolated_s": statistics.mean(seconds) * all_layers / layers,
            "device_bytes": max(run[1] for run in runs),
            "host_bytes": max(run[2] for run in runs),
        }
        result["rows"].append(row)
        row["ratio"] = row["seconds"] / result["rows"][0]["seconds"]
        loaded.clear()
        yield result


@torch.no_grad()
def _forward(model: Any, batches: Sequence[Batch], device: str) -> None:
    for batch in batches:
        model.base_model(batch.token_ids.to(device), use_cache=False)


def _merge(
    models: list[Path], folder: Path, device: str, method: str, data: Sequence[Path] = (), **parameters: Any
) -> None:
    base, *experts = map(str, models)
    own: list[dict[str, Any]] = [{"calibration": str(file)} for file in data] or [{"weight": 0.4}] * EXPERTS
    if method == "slta":
        own = [{}] * EXPERTS
    recipe = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": expert, "parameters": given} for expert, given in zip(experts, own, strict=True)],
        "parameters": parameters,
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory(dir=folder) as place:
        options = MergeOptions(quiet=True, write_model_card=False, cuda=device.startswith("cuda"))
        mergekit_merge.run_merge(MergeConfiguration.model_validate(recipe), f"{place}/merged", options)


def _run(action: Callable[[], object], device: str) -> tuple[float, int, int]:
    """Seconds, bytes on the device, and bytes on the host."""
    LoaderCache.loaders.clear()
    gc.collect()
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with PeakMemory() as host:
        start = time.perf_counter()
        action()
        wait_for(device)
        seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() if cuda else 0, host.bytes


# The table


def table(result: dict[str, Any]) -> str:
    """A Markdown table of one shape, under a sentence that says what it is of."""
    layers = f"{result['layers']} of {result['all_layers']} layers"
    lines = [
        f"{result['shape']} on {result['device']}: {result['models']} models, {layers}, {result['samples']} samples of "
        f"{result['tokens']} tokens; times for all layers are extrapolated in proportion to the layers.",
        "",
        "| | seconds | for all layers | over the forward passes | device GB | host GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row['seconds']:.2f} ± {row['deviation']:.2f}",
            f"{row['extrapolated_s']:.1f}",
            f"{row['ratio']:.2f}",
            *(f"{row[key] / 1e9:.2f}" for key in ("device_bytes", "host_bytes")),
        ]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
