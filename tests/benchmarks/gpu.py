"""Calibration, featcal and merging on large shapes, against plain forward passes: made for one GPU, runs without.

    python tests/benchmarks/gpu.py                          # a 7B Llama and a mixture, in less than nine minutes
    python tests/benchmarks/gpu.py --shape 70b --layers 1
    python tests/benchmarks/gpu.py --shape tiny --device cpu

Needs nothing but this repository: checkpoints of random bfloat16 numbers are written layer by layer, with at most as
many layers as the disk has room for. Times for all layers of a shape are extrapolated in proportion to the layers.
Writes gpu.json and gpu.md after every row, and prints the table. A row that fails leaves the others alone: the table
says why, and the exit status is 1. After --minutes nothing begins.

The floor is one forward pass of each of the T+1 models over all samples, in float32 with the weights in memory. Merges
run through mergekit, reading and writing included.
"""

from __future__ import annotations

import functools
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from common import CACHE, be_quiet, load, make_recipe, wait_for, write_samples, write_tokenizer
from mergekit import merge as mergekit_merge
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from safetensors import safe_open
from safetensors.torch import save_file
from support.memory import PeakMemory
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

import mergekit_slta.host.patches
from mergekit_slta.engine.batches import Batch, fitting_batch, make_batches
from mergekit_slta.errors import first_line
from mergekit_slta.layers.trace import on_device
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.lookup import measured_statistics

EXPERTS = 3
CHANGE = 0.02  # of a weight's own size, what an expert changes
ROOM = 0.6  # the share of the free disk that is used; the rest is for solved layers and merged models
FORWARD = "plain forward passes"

_TINY: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
_LARGE: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}
_LARGER = _LARGE | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
SHAPES: dict[str, PretrainedConfig] = {
    "7b": LlamaConfig(**_LARGE, intermediate_size=11008, num_key_value_heads=32),
    "70b": LlamaConfig(**_LARGER, intermediate_size=28672, num_key_value_heads=8),
    "mixture": MixtralConfig(**_LARGE, intermediate_size=14336, num_key_value_heads=8),
    "tiny": LlamaConfig(**_TINY, intermediate_size=128, vocab_size=2048),
    "tiny-mixture": MixtralConfig(**_TINY, intermediate_size=96, num_local_experts=4, vocab_size=2048),
}


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice([*SHAPES]), default=["7b", "mixture"])
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--samples", default=10, show_default=True, help="Of each task.")
@click.option("--tokens", default=512, show_default=True, help="Of each sample.")
@click.option("--layers", default=4, show_default=True, help="At most so many; 0 for all that the disk has room for.")
@click.option("--repeats", default=2, show_default=True)
@click.option("--minutes", default=9.0, show_default=True, help="Begin nothing later, in all.")
@click.option("--folder", type=click.Path(path_type=Path), default=CACHE, help="For checkpoints, deleted afterwards.")
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), default=Path(), help="For gpu.json and gpu.md.")
def main(
    shapes: Sequence[str],
    device: str,
    samples: int,
    tokens: int,
    layers: int,
    repeats: int,
    minutes: float,
    folder: Path,
    out: Path,
) -> None:
    """Measure what a GPU makes of calibration, featcal and merging."""
    be_quiet()
    mergekit_slta.host.patches.install()
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    begun = time.monotonic()
    for number, shape in enumerate(shapes, 1):
        results.append({"shape": shape, "rows": []})
        end = begun + 60 * minutes * number / len(shapes)
        try:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                models = write_models(Path(place), SHAPES[shape], layers, device)
                for known in measure(models, SHAPES[shape], Path(place), device, samples, tokens, repeats, end):
                    results[-1] |= known
                    _write(results, out)
        except Exception as error:
            results[-1]["error"] = _told(error)
            _write(results, out)
    click.echo((out / "gpu.md").read_text())
    if any("error" in part for result in results for part in (result, *result["rows"])):
        sys.exit(1)


def _write(results: list[dict[str, Any]], out: Path) -> None:
    """Write what is known so far, so that a run that is cut off leaves what it has measured."""
    (out / "gpu.json").write_text(json.dumps(results, indent=1))
    (out / "gpu.md").write_text("\n".join(map(table, results)))


def _told(error: Exception) -> str:
    """What the table says of an error, all of which is printed."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line(error)}"


# Checkpoints


def write_models(folder: Path, config: PretrainedConfig, most_layers: int, device: str) -> list[Path]:
    """Write a base model and experts with random weights, one shard per layer; returns their folders."""
    template = _template(folder / "template", config)
    of_layer = {name: shape for name, shape in template.items() if ".layers.0." in name}
    layer_bytes = 2 * sum(map(torch.Size.numel, of_layer.values()))
    edge_bytes = 2 * sum(map(torch.Size.numel, template.values())) - layer_bytes
    room = int(ROOM * shutil.disk_usage(folder).free / (EXPERTS + 1) - edge_bytes) // layer_bytes
    count = min(config.num_hidden_layers, room, most_layers or room)
    if count < 1:
        raise click.ClickException(f"{folder} has no room for one layer of each model: name another --folder.")
    own = type(config).from_dict({**config.to_dict(), "num_hidden_layers": count, "dtype": "bfloat16"})
    own.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    models = [folder / "base", *(folder / f"expert{number}" for number in range(EXPERTS))]
    for number, target in enumerate(models):
        own.save_pretrained(target)
        write_tokenizer(target)
        edges = {name: shape for name, shape in template.items() if name not in of_layer}
        shards = [edges] + [
            {name.replace(".layers.0.", f".layers.{layer}."): shape for name, shape in of_layer.items()}
            for layer in range(count)
        ]
        places: dict[str, str] = {}
        for index, shard in enumerate(shards):
            file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(_random(shard, index, number, device), target / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return models


def _template(folder: Path, config: PretrainedConfig) -> dict[str, torch.Size]:
    """The checkpoint's names and shapes of a model with one layer, as transformers saves it."""
    with torch.device("meta"):
        shallow = type(config).from_dict({**config.to_dict(), "num_hidden_layers": 1})
        model = AutoModelForCausalLM.from_config(shallow, dtype=torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(folder, max_shard_size="1TB")
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        found = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    shutil.rmtree(folder)
    return found


def _random(shapes: dict[str, torch.Size], shard: int, model: int, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a shard: the base model's, which all models share, and an expert's change."""
    tensors = {}
    for index, (name, shape) in enumerate(shapes.items()):
        if len(shape) < 2:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        generator = torch.Generator(device).manual_seed(1000 * shard + index)
        value = torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5
        if model:
            generator.manual_seed(10**6 * model + 1000 * shard + index)
            value += CHANGE * torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5
        tensors[name] = value.bfloat16().cpu()
    return tensors


# Measurements


def measure(
    models: list[Path],
    shape: PretrainedConfig,
    folder: Path,
    device: str,
    samples: int,
    tokens: int,
    repeats: int,
    end: float,
) -> Iterator[dict[str, Any]]:
    """Time everything, and watch its memory, until ``end``; yields what is known after every row."""
    recipe = make_recipe(models, "slta", samples, tokens)
    files = write_samples(CACHE, EXPERTS, samples, tokens)
    experiment = Experiment(recipe, quiet=True)
    data, decoder = experiment.load_data(recipe.experts), experiment.decoder
    batches = make_batches([own.token_ids for own in data], fitting_batch(on_device(decoder, device)))
    layers, ready = decoder.model.config.num_hidden_layers, folder / "ready.safetensors"

    def calibrate(level: str, target: Path | None = None) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            opened = Experiment(recipe, device=device, quiet=True)
            measured_statistics(opened, [level], target or Path(place) / "statistics.safetensors")

    merge = functools.partial(_merge, models, folder, device)
    prompts = {"samples": samples, "max_tokens": tokens}
    loaded = [load(models[0], device)]  # the models differ in their numbers alone
    rows: dict[str, Callable[[], object]] = {
        FORWARD: lambda: [_forward(loaded[0], batches, device) for _ in models],
        "slta attn_mlp": lambda: calibrate("attn_mlp"),
        "slta layer": lambda: calibrate("layer"),
        "featcal": lambda: merge("featcal", files, **prompts),
        "featcal, ridge 0.03": lambda: merge("featcal", files, ridge=0.03, **prompts),
        "merge, ready statistics": lambda: merge("slta", statistics=str(ready)),
        "merge, task_arithmetic": lambda: merge("task_arithmetic"),
    }
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "models": len(models),
        "samples": samples * EXPERTS,
        "tokens": tokens,
        "layers": layers,
        "all_layers": shape.num_hidden_layers,
        "rows": [],
    }
    floor = None
    for name, action in rows.items():
        row: dict[str, Any] = {"name": name}
        result["rows"].append(row)
        if time.monotonic() < end:
            try:
                if "ready" in name:
                    calibrate("attn_mlp", ready)
                runs = [_run(action, device) for _ in range(repeats)]
                seconds = [run[0] for run in runs]
                floor = floor or statistics.mean(seconds)
                row |= {
                    "seconds": statistics.mean(seconds),
                    "deviation": statistics.pstdev(seconds),
                    "ratio": statistics.mean(seconds) / floor,
                    "extrapolated_s": statistics.mean(seconds) * shape.num_hidden_layers / layers,
                    "device_bytes": max(run[1] for run in runs),
                    "host_bytes": max(run[2] for run in runs),
                }
            except Exception as error:  # above all, memory may not suffice for this row
                row["error"] = _told(error)
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
    failed = [f"{result['shape']} failed: {result['error']}", ""] if "error" in result else []
    if not result["rows"]:
        return "\n".join(failed)
    layers = f"{result['layers']} of {result['all_layers']} layers"
    lines = [
        f"{result['shape']} on {result['device']}: {result['models']} models, {layers}, {result['samples']} samples of "
        f"{result['tokens']} tokens; times for all layers are extrapolated in proportion to the layers.",
        "",
        "| | seconds | for all layers | over the forward passes | device GB | host GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row.get("error") or "no time was left", "", "", "", ""]
        if "seconds" in row:
            cells = [
                f"{row['seconds']:.2f} ± {row['deviation']:.2f}",
                f"{row['extrapolated_s']:.1f}",
                f"{row['ratio']:.2f}",
                *(f"{row[key] / 1e9:.2f}" for key in ("device_bytes", "host_bytes")),
            ]
        lines.append(f"| {row['name']} | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, "", *failed])


if __name__ == "__main__":
    main()
