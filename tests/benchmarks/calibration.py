"""Calibration against its floor: T+1 plain forward passes over the same tokens, and T+1 resident models.

    python tests/benchmarks/calibration.py --size 60m --experts 3 --level attn_mlp

Prints one JSON line. ``time_ratio`` is the wall time of a whole calibration (reading, Gram matrices, the state for
resuming, the file) over that of T+1 forward passes of the models' bodies in float32, weights already in memory.
``memory_ratio`` is the peak anonymous memory over that of T+1 resident float32 models. ``bytes_ratio`` is the tensor
bytes requested over those of the checkpoints' decoder layers.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from common import CACHE, SHAPES, be_quiet, load, make_recipe, wait_for, write_models
from mergekit.io.tasks import LoaderCache
from support.memory import PeakMemory

from mergekit_slta.engine.streams import Batch, fitting_batch, make_batches
from mergekit_slta.layers.trace import on_device
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.measure import statistics_of


@click.command()
@click.option("--size", type=click.Choice([*SHAPES]), default="60m", show_default=True)
@click.option("--layers", default=0, help="Another depth than the size's own.")
@click.option("--experts", default=3, show_default=True)
@click.option("--samples", default=10, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option(
    "--level",
    "level_sets",
    multiple=True,
    default=["attn_mlp"],
    help="Several with commas; may be given several times.",
)
@click.option("--memory", type=click.Choice(["calibration", "naive"]), help="Measure only this, in this process.")
def main(repeats: int, level_sets: tuple[str, ...], memory: str | None, **setting: Any) -> None:
    """Compare calibration with its floor on synthetic Llama-shaped checkpoints."""
    be_quiet()
    device = setting["device"]
    depth = setting["layers"] or SHAPES[setting["size"]].num_hidden_layers
    folders = write_models(CACHE / f"{setting['size']}-{depth}", setting["size"], setting["experts"], depth, device)
    recipe = make_recipe(folders, "slta", setting["samples"], setting["tokens"])
    if memory:
        with PeakMemory() as peak:
            _naive(recipe, folders, device) if memory == "naive" else _calibrate(recipe, level_sets[0], device)
        print(peak.bytes)
        return

    def peak_bytes(*options: str) -> int:
        """The peak memory of a fresh process."""
        same = [f"--{name}={value}" for name, value in setting.items()]
        done = subprocess.run([sys.executable, __file__, *same, *options], check=True, capture_output=True, text=True)
        return int(done.stdout.split()[-1])

    models = [load(folder, device) for folder in folders]
    experiment = Experiment(recipe)
    token_ids = [data.token_ids for data in experiment.load_data(recipe.experts)]
    batches = make_batches(token_ids, fitting_batch(on_device(experiment.decoder, device)))
    read: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in ("floor", *level_sets)}
    for _ in range(repeats):  # in turns, so that all see the same machine
        for name, seconds in times.items():
            start = time.perf_counter()
            if name == "floor":
                _forward(models, batches, device)
            else:
                opened = _calibrate(recipe, name, device)
                read[name] = sum(checkpoint.bytes_read for checkpoint in (opened.base, *opened.experts))
            seconds.append(time.perf_counter() - start)
    layer_bytes = sum(
        parameter.numel() * 2 for model in models for parameter in model.base_model.layers.parameters()
    )  # the checkpoints are bfloat16
    models.clear()  # the processes below need the memory
    naive, floor = peak_bytes("--memory=naive"), statistics.median(times["floor"])
    for levels in level_sets:
        taken, own = peak_bytes(f"--level={levels}", "--memory=calibration"), statistics.median(times[levels])
        result = {
            "benchmark": "calibration",
            **setting,
            "layers": depth,
            "threads": torch.get_num_threads(),
            "levels": levels,
            "floor_s": round(floor, 3),
            "calibration_s": round(own, 3),
            "time_ratio": round(own / floor, 3),
            "memory_mb": round(taken / 2**20, 1),
            "naive_memory_mb": round(naive / 2**20, 1),
            "memory_ratio": round(taken / naive, 3),
            "bytes_ratio": round(read[levels] / layer_bytes, 4),
        }
        print(json.dumps(result), flush=True)


def _calibrate(recipe: Recipe, levels: str, device: str) -> Experiment:
    LoaderCache.loaders.clear()
    experiment = Experiment(recipe, device=device, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        statistics_of(experiment, levels.split(","), Path(folder) / "statistics.safetensors")
    return experiment


@torch.no_grad()
def _forward(models: list[Any], batches: list[Batch], device: str) -> None:
    for batch in batches:
        for model in models:
            model.base_model(batch.token_ids.to(device), use_cache=False)
    wait_for(device)


@torch.no_grad()
def _naive(recipe: Recipe, folders: list[Path], device: str) -> None:
    """Every model resident in float32, every submodule's output hooked, one batch after the other."""
    models = [load(folder, device) for folder in folders]
    outputs: list[torch.Tensor] = []
    for model in models:
        for layer in model.base_model.layers:
            for module in (layer.self_attn, layer.mlp):
                module.register_forward_hook(
                    lambda _, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
                )
    experiment = Experiment(recipe)
    data = experiment.load_data(recipe.experts)
    decoder = on_device(experiment.decoder, device)
    for batch in make_batches([samples.token_ids for samples in data], fitting_batch(decoder)):
        for model in models:
            model.base_model(batch.token_ids.to(device), use_cache=False)
        outputs.clear()


if __name__ == "__main__":
    main()
