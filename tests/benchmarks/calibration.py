"""Calibration against its floor: T+1 plain forward passes over the same tokens, and T+1 resident models.

    python tests/benchmarks/calibration.py --size 60m --experts 3 --level attn_mlp

Prints one JSON line. ``time_ratio`` is the wall time of a whole calibration (reading, Gram matrices, the state for
resuming, the file) over that of T+1 forward passes of the models' bodies in float32, weights already in memory.
``memory_ratio`` is the peak anonymous memory over that of T+1 resident float32 models. ``bytes_ratio`` is the tensor
bytes requested over those of the checkpoints' decoder layers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from common import CACHE, PeakMemory, in_subprocess, make_family, timed, write_samples
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from transformers import AutoModelForCausalLM

from mergekit_slta.measure import Experiment
from mergekit_slta.recipe import Expert, Recipe, SltaSettings
from mergekit_slta.streams import fitting_batch, make_batches


@click.command()
@click.option("--size", default="60m", show_default=True)
@click.option("--layers", default=0, help="Another depth than the size's own.")
@click.option("--experts", default=3, show_default=True)
@click.option("--samples", default=10, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--level", "levels", multiple=True, default=["attn_mlp"], show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--memory", type=click.Choice(["calibration", "naive"]), help="Measure only this, in this process.")
def main(
    size: str,
    layers: int,
    experts: int,
    samples: int,
    tokens: int,
    levels: tuple[str, ...],
    device: str,
    repeats: int,
    memory: str | None,
) -> None:
    """Compare calibration with its floor on synthetic Llama-shaped checkpoints."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    CACHE.mkdir(parents=True, exist_ok=True)
    folders = make_family(CACHE, size, experts, layers)
    files = write_samples(CACHE, experts, samples, tokens)
    references = [ModelReference.parse(str(folder)) for folder in folders]
    recipe = Recipe(
        references[0],
        tuple(Expert(reference, str(file)) for reference, file in zip(references[1:], files, strict=True)),
        SltaSettings(samples=samples, max_tokens=tokens),
    )
    if memory:
        with torch.no_grad(), PeakMemory() as peak:
            _calibrate(recipe, levels, device) if memory == "calibration" else _naive(recipe, folders, device)
        print(json.dumps({"bytes": peak.bytes}))
        return
    models = [load(folder, device) for folder in folders]
    results: list[Experiment] = []
    times = timed(
        {
            "floor": lambda: _forward(models, recipe, device),
            "calibration": lambda: results.append(_calibrate(recipe, levels, device)),
        },
        repeats,
    )
    layer_bytes = sum(
        parameter.numel() * 2 for model in models for parameter in model.base_model.layers.parameters()
    )  # the checkpoints are bfloat16
    read = sum(checkpoint.bytes_read for checkpoint in (results[-1].base, *results[-1].experts))
    arguments = [f"--size={size}", f"--layers={layers}", f"--experts={experts}", f"--samples={samples}"]
    arguments += [f"--tokens={tokens}", f"--device={device}", *(f"--level={level}" for level in levels)]
    peaks = {
        name: in_subprocess(__file__, [*arguments, f"--memory={name}"])["bytes"] for name in ("calibration", "naive")
    }
    result = {
        "benchmark": "calibration",
        "size": size,
        "layers": len(models[0].base_model.layers),
        "experts": experts,
        "samples": samples,
        "tokens": tokens,
        "levels": list(levels),
        "device": device,
        "threads": torch.get_num_threads(),
        "floor_s": round(times["floor"], 3),
        "calibration_s": round(times["calibration"], 3),
        "time_ratio": round(times["calibration"] / times["floor"], 3),
        "memory_mb": round(peaks["calibration"] / 2**20, 1),
        "naive_memory_mb": round(peaks["naive"] / 2**20, 1),
        "memory_ratio": round(peaks["calibration"] / peaks["naive"], 3),
        "bytes_ratio": round(read / layer_bytes, 4),
    }
    print(json.dumps(result))


def load(folder: Path, device: str) -> Any:
    """A whole model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device).eval()


def _calibrate(recipe: Recipe, levels: tuple[str, ...], device: str) -> Experiment:
    LoaderCache.loaders.clear()
    experiment = Experiment(recipe, device=device, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        experiment.statistics(list(levels), Path(folder) / "statistics.safetensors")
    return experiment


@torch.no_grad()
def _forward(models: list[Any], recipe: Recipe, device: str) -> None:
    data = Experiment(recipe).load_data(recipe.experts)
    for batch in make_batches([samples.token_ids for samples in data], fitting_batch(torch.device(device))):
        for model in models:
            model.base_model(batch.token_ids.to(device), use_cache=False)
    if device != "cpu":
        torch.cuda.synchronize()


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
    data = Experiment(recipe).load_data(recipe.experts)
    for batch in make_batches([samples.token_ids for samples in data], fitting_batch(torch.device(device))):
        for model in models:
            model.base_model(batch.token_ids.to(device), use_cache=False)
        outputs.clear()


if __name__ == "__main__":
    main()
