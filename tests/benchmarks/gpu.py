"""Calibration, featcal and merging on large shapes, against plain forward passes: made for one GPU, runs without.

    python tests/benchmarks/gpu.py                          # a 7B Llama and a mixture, in less than nine minutes
    python tests/benchmarks/gpu.py --shape 70b --layers 1
    python tests/benchmarks/gpu.py --shape tiny --device cpu

Needs nothing but this repository: checkpoints of random bfloat16 numbers are written layer by layer, with at most as
many layers as the disk has room for. Times for all layers of a shape are extrapolated in proportion to the layers,
which the table says. Writes gpu.json and gpu.md after every step, and prints the table. A part that fails leaves the
others alone: the table says why, and the exit status is 1. Every part runs once, then once more with its memory and
its shares of time watched, and then again. After --minutes nothing begins, and no part runs again that would end later.

The floor is one forward pass of each of the T+1 models over all samples, in float32 with the weights in memory; what
featcal cannot do without is as in featcal.py. Tokens/s and TFLOP/s are the tokens and the operations of these passes
over the time of a row, whatever the row does. Ratios are of runs that take turns. The shares of time are of a further
run, in which the device is waited for after each part.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import yaml
from common import CACHE, be_quiet, load, make_recipe, wait_for, write_tokenizer
from featcal import bare_products, bare_solves
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors import safe_open
from safetensors.torch import save_file
from support.memory import PeakMemory, memory_of_this_process
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

import mergekit_slta.host.patches
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.streams import Batch, Streams, fitting_batch, make_batches
from mergekit_slta.errors import first_line
from mergekit_slta.featcal.regression import RidgeRegression
from mergekit_slta.featcal.scratch import solve_model
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.slta.measure import measured_statistics

EXPERTS = 3
LEVELS = ("attn_mlp", "layer")
CHANGE = 0.02  # of a weight's own size, what an expert changes
ROOM = 0.6  # the share of the free disk that is used; the rest is for solved layers and merged models

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

FORWARD, FLOOR, READY = "plain forward passes", "featcal's floor", "statistics for the merge"  # rows
# The calls whose time counts as a part's; what is inside another counted call counts for the outer one.
PARTS: dict[str, Sequence[tuple[type, str]]] = {
    "reading": [(Checkpoint, "read")],
    "copying": [(Streams, "hidden"), (Streams, "set_output")],
    "computing": [(Decoder, "call"), *((RidgeRegression, part) for part in ("add", "finish_task"))],
    "solving": [(RidgeRegression, "solve")],
    "saving": [(Partial, "finish_layer")],
}

Steps = dict[str, Callable[[], None]]


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

    def write(measured: dict[str, Any]) -> None:
        """Write what is known so far, so that a run that is cut off leaves what it has measured."""
        results[-1] |= measured
        (out / "gpu.json").write_text(json.dumps(results, indent=1))
        (out / "gpu.md").write_text("\n".join(map(table, results)))

    begun = time.monotonic()
    for number, shape in enumerate(shapes, 1):
        results.append({"shape": shape})
        end = begun + 60 * minutes * number / len(shapes)
        try:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                models = write_models(Path(place), SHAPES[shape], layers, device)
                for measured in measure(models, Path(place), device, samples, tokens, repeats, end):
                    write(measured)
        except Exception as error:
            write({"error": _told(error)})
    click.echo((out / "gpu.md").read_text())
    if any("error" in part for result in results for part in (result, *result.get("rows", ()))):
        sys.exit(1)


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
    models: list[Path], folder: Path, device: str, samples: int, tokens: int, repeats: int, end: float
) -> Iterator[dict[str, Any]]:
    """Time everything, and watch its memory, until ``end``; yields what is known after every step."""
    recipes = {method: make_recipe(models, method, samples, tokens) for method in ("slta", "featcal")}
    experiment = Experiment(recipes["slta"], quiet=True)
    data, decoder = experiment.load_data(recipes["slta"].experts), experiment.decoder
    batches = make_batches([own.token_ids for own in data], fitting_batch(decoder.to(device)))
    config = decoder.model.config
    whole = next(shape for shape in SHAPES.values() if _same_shape(shape, config)).num_hidden_layers
    statistics_file = folder / "ready.safetensors"

    def calibrate(level: str) -> list[Checkpoint]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            experiment = Experiment(recipes["slta"], device=device, quiet=True)
            measured_statistics(experiment, [level], Path(place) / "statistics.safetensors")
        return [experiment.base, *experiment.experts]

    def featcal(**chosen: Any) -> list[Checkpoint]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            settings = recipes["featcal"].settings_of(FeatcalSettings).model_copy(update={"scratch": place, **chosen})
            experiment = Experiment(recipes["featcal"], device=device, quiet=True)
            solve_model(experiment, settings).remove()
        return [experiment.base, *experiment.experts]

    operations = 0  # of the forward passes

    def forward() -> None:
        nonlocal operations
        found, operations = _forward(models[0], batches, device)
        seconds[FORWARD].append(found)

    def bare() -> None:
        if not seconds[FORWARD]:
            raise RuntimeError("It holds two forward passes, which failed.")
        parts = _timed(functools.partial(_bare, decoder, sizes, device), device)
        seconds[FLOOR].append(seconds[FORWARD][-1] * 2 / len(models) + parts)

    def measure_ready_statistics() -> None:
        measured_statistics(Experiment(recipes["slta"], device=device, quiet=True), ["attn_mlp"], statistics_file)

    actions: dict[str, Callable[[], list[Checkpoint]]] = {
        **{f"slta {level}": lambda level=level: calibrate(level) for level in LEVELS},  # type: ignore[misc]
        "featcal": featcal,
        "featcal, ridge 0.003, anchor base": functools.partial(featcal, ridge=0.003, anchor="base"),
        "merge, ready statistics": lambda: _merge(models, folder, device, "slta", statistics=str(statistics_file)),
        "merge, task_arithmetic": lambda: _merge(models, folder, device, "task_arithmetic"),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    watched: dict[str, dict[str, Any]] = defaultdict(dict)
    sizes = [len(batch.rows) * max(batch.lengths) for batch in batches]
    result = {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "models": EXPERTS + 1,
        "samples": samples * EXPERTS,
        "tokens": tokens,
        "layers": config.num_hidden_layers,
        "all_layers": whole,
    }

    def row(name: str) -> dict[str, Any]:
        if not (own := seconds[name]):
            return {"name": name, **watched[name]}
        mean, ratios = statistics.mean(own), [ours / other for ours, other in zip(own, seconds[FORWARD], strict=False)]
        return {
            "name": name,
            "seconds": mean,
            "deviation": statistics.pstdev(own) if len(own) > 1 else None,
            "ratio": statistics.mean(ratios) if ratios else None,
            "ratio_deviation": statistics.pstdev(ratios) if len(ratios) > 1 else None,
            "tokens_per_s": (EXPERTS + 1) * sum(sizes) / mean,
            "tflops": operations / mean / 1e12,
            "extrapolated_s": mean * whole / config.num_hidden_layers,
            **watched[name],
        }

    def time_it(name: str) -> None:
        seconds[name].append(_timed(actions[name], device))

    def watch(name: str) -> None:
        watched[name] = _watched(actions[name], device)

    timed: Steps = {name: functools.partial(time_it, name) for name in actions}
    timing: Steps = {FORWARD: forward, FLOOR: bare, **timed}
    watching: Steps = {name: functools.partial(watch, name) for name in actions}
    took: dict[str, float] = {}

    def known() -> dict[str, Any]:
        names = [name for name in (READY, *timing) if name != READY or watched[name]]
        return {**result, "rows": [*map(row, names)]}

    yield known()
    for steps in [{READY: measure_ready_statistics, **timing}, watching, *[timing] * (repeats - 1)]:
        for name, step in steps.items():
            start = time.monotonic()
            if "error" in watched[name] or start + took.get(name, 0.0) > end:
                continue
            try:
                step()
            except Exception as error:  # above all, memory may not suffice for this part
                watched[name] = {"error": _told(error)}
            took[name] = time.monotonic() - start
            yield known()


def _told(error: Exception) -> str:
    """What the table says of an error, all of which is printed."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _same_shape(shape: PretrainedConfig, config: PretrainedConfig) -> bool:
    keys = ("model_type", "hidden_size", "intermediate_size")
    return all(getattr(shape, key) == getattr(config, key) for key in keys)


@torch.no_grad()
def _forward(folder: Path, batches: Sequence[Batch], device: str) -> tuple[float, int]:
    """Seconds and floating-point operations of as many plain forward passes of a model's body as there are models."""
    model = load(folder, device)
    _run(model, batches[:1], device)
    start = time.perf_counter()
    for _ in range(EXPERTS + 1):  # the models differ in their numbers alone
        _run(model, batches, device)
    seconds = time.perf_counter() - start
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch does not count the multiplications of the default's kernel
    with FlopCounterMode(display=False) as counter:
        _run(model, batches, device)
    del model
    _forget(device)
    return seconds, (EXPERTS + 1) * counter.get_total_flops()


def _run(model: Any, batches: Sequence[Batch], device: str) -> None:
    for batch in batches:
        model.base_model(batch.token_ids.to(device), use_cache=False)
    wait_for(device)


def _bare(decoder: Decoder, sizes: Sequence[int], device: str) -> None:
    bare_products(decoder, sizes, device)
    bare_solves(decoder, device)


def _merge(models: list[Path], folder: Path, device: str, method: str, **parameters: Any) -> list[Checkpoint]:
    """Merge by mergekit, and return nothing of ours that counts bytes."""
    base, *experts = map(str, models)
    own = {} if parameters else {"parameters": {"weight": 0.4}}
    recipe = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": expert, **own} for expert in experts],
        "parameters": parameters,
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }
    config = MergeConfiguration.model_validate(yaml.safe_load(json.dumps(recipe)))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        options = MergeOptions(quiet=True, write_model_card=False, cuda=device.startswith("cuda"))
        run_merge(config, f"{place}/merged", options)
    return []


def _timed(action: Callable[[], object], device: str) -> float:
    _forget(device)
    start = time.perf_counter()
    action()
    wait_for(device)
    return time.perf_counter() - start


def _watched(action: Callable[[], list[Checkpoint]], device: str) -> dict[str, Any]:
    """Memory, bytes read and shares of time of one more run."""
    _forget(device)
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        memory_of_this_process()
    except RuntimeError:  # a sandbox's kernel may not tell it
        host_memory: contextlib.AbstractContextManager[PeakMemory | None] = contextlib.nullcontext()
    else:
        host_memory = PeakMemory()
    with host_memory as host, _parts(device) as spent:
        start = time.perf_counter()
        models = action()
        whole = time.perf_counter() - start
    return {
        "device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "host_bytes": host.bytes if host else None,
        "bytes_read": sum(model.bytes_read for model in models) or None,
        "shares": {part: spent[part] / whole for part in PARTS} if spent else {},
    }


@contextlib.contextmanager
def _parts(device: str) -> Iterator[dict[str, float]]:
    """The seconds in each of ``PARTS`` while the block runs."""
    spent: dict[str, float] = defaultdict(float)
    here = threading.local()  # what a thread writes or reads meanwhile is counted apart

    def wait() -> None:
        if threading.current_thread() is threading.main_thread():  # another one would wait for what this one computes
            wait_for(device)

    def counting(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            if getattr(here, "inside", False):
                return function(*arguments, **more)
            wait()
            here.inside, start = True, time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                wait()
                here.inside = False
                spent[part] += time.perf_counter() - start

        return run

    before = [(owner, name, getattr(owner, name)) for calls in PARTS.values() for owner, name in calls]
    for part, calls in PARTS.items():
        for owner, name in calls:
            setattr(owner, name, counting(part, getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _forget(device: str) -> None:
    """Close the checkpoints and free the device."""
    LoaderCache.loaders.clear()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


# The table


def table(result: dict[str, Any]) -> str:
    """A Markdown table of one shape, under a sentence that says what it is of."""
    failed = [f"{result['shape']} failed: {result['error']}", ""] if "error" in result else []
    if "rows" not in result:
        return "\n".join(failed)
    layers = f"{result['layers']} of {result['all_layers']} layers"
    lines = [
        f"{result['shape']} on {result['device']}: {result['models']} models, {layers}, {result['samples']} samples of "
        f"{result['tokens']} tokens; times for all layers are extrapolated in proportion to the layers.",
        "",
        "| | seconds | for all layers | over the forward passes | tokens/s | TFLOP/s | device GB | host GB | GB read "
        f"| {' | '.join(PARTS)} |",
        "|---" * (9 + len(PARTS)) + "|",
    ]
    for row in result["rows"]:
        shares = row.get("shares", {})
        times = [row.get("error") or "no time was left", *[""] * 4]
        if "seconds" in row:
            failure = f" ({row['error']})" if "error" in row else ""
            times = [
                f"{_deviating(row['seconds'], row['deviation'])}{failure}",
                f"{row['extrapolated_s']:.1f}",
                _deviating(row["ratio"], row["ratio_deviation"]) if row["ratio"] else "",
                f"{row['tokens_per_s']:.0f}",
                f"{row['tflops']:.2f}" if row["tflops"] else "",
            ]
        cells = [
            row["name"],
            *(cell.replace("|", "/") for cell in times),
            *(f"{row[key] / 1e9:.2f}" if row.get(key) else "" for key in ("device_bytes", "host_bytes", "bytes_read")),
            *(f"{shares[part]:.0%}" if part in shares else "" for part in PARTS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *failed])


def _deviating(mean: float, deviation: float | None) -> str:
    """A mean with its standard deviation, which one run does not have."""
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    main()
