"""Calibration against its floor: T+1 plain forward passes over the same tokens, and T+1 resident models.

    python tests/benchmarks/calibration.py --size 60m --experts 3 --level attn_mlp

Prints one JSON line. ``time_ratio`` is the wall time of a whole calibration (reading, Gram matrices, the state for
resuming, the file) over that of T+1 forward passes of the models' bodies in float32, weights already in memory.
``memory_ratio`` is the peak anonymous memory over that of T+1 resident float32 models. ``bytes_ratio`` is the tensor
bytes requested over those of the checkpoints' decoder layers.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from common import Setting, load, print_peak_memory, timed, wait_for, with_setting
from mergekit.io.tasks import LoaderCache

from mergekit_slta.engine.batches import Batch, fitting_batch, make_batches
from mergekit_slta.layers.trace import on_device
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.measure import measured_statistics


@click.command()
@with_setting(samples=10)
@click.option(
    "--level",
    "level_sets",
    multiple=True,
    default=["attn_mlp"],
    show_default=True,
    help="Measured in one pass; several with commas; may be given several times.",
)
@click.option("--memory", type=click.Choice(["calibration", "naive"]), help="Measure only this, in this process.")
def main(setting: Setting, level_sets: tuple[str, ...], memory: str | None) -> None:
    """Compare calibration with its floor on synthetic Llama-shaped checkpoints."""
    folders, recipe = setting.write("slta")
    device = setting.device
    if memory:
        naively = functools.partial(_naive, recipe, folders, device)
        print_peak_memory(naively if memory == "naive" else lambda: _calibrate(recipe, level_sets[0], device))
        return
    models = [load(folder, device) for folder in folders]
    experiment = Experiment(recipe)
    token_ids = [data.token_ids for data in experiment.load_data(recipe.experts)]
    batches = make_batches(token_ids, fitting_batch(on_device(experiment.decoder, device)))
    read: dict[str, int] = {}
    actions: dict[str, Callable[[], object]] = {"floor": lambda: _forward(models, batches, device)}
    for levels in level_sets:
        actions[levels] = functools.partial(_measure, read, recipe, levels, device)
    times = timed(actions, setting.repeats)
    layer_bytes = sum(
        parameter.numel() * 2 for model in models for parameter in model.base_model.layers.parameters()
    )  # the checkpoints are bfloat16
    models.clear()  # the processes below need the memory
    naive = setting.peak_memory(__file__, "--memory=naive")
    for levels in level_sets:
        peak_bytes = setting.peak_memory(__file__, f"--level={levels}", "--memory=calibration")
        result = {
            "benchmark": "calibration",
            **setting.described(),
            "levels": levels,
            "floor_s": round(times["floor"], 3),
            "calibration_s": round(times[levels], 3),
            "time_ratio": round(times[levels] / times["floor"], 3),
            "memory_mb": round(peak_bytes / 2**20, 1),
            "naive_memory_mb": round(naive / 2**20, 1),
            "memory_ratio": round(peak_bytes / naive, 3),
            "bytes_ratio": round(read[levels] / layer_bytes, 4),
        }
        print(json.dumps(result), flush=True)


def _calibrate(recipe: Recipe, levels: str, device: str) -> Experiment:
    LoaderCache.loaders.clear()
    experiment = Experiment(recipe, device=device, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        measured_statistics(experiment, levels.split(","), Path(folder) / "statistics.safetensors")
    return experiment


def _measure(read: dict[str, int], recipe: Recipe, levels: str, device: str) -> None:
    """Calibrate, and note how many bytes of tensors that reads."""
    experiment = _calibrate(recipe, levels, device)
    read[levels] = sum(checkpoint.bytes_read for checkpoint in (experiment.base, *experiment.experts))


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
