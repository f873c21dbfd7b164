"""How time and memory grow with samples, tokens, experts, layers and ranks, and those of a layer with its width.

    python tests/benchmarks/scaling.py --size 20m
    python tests/benchmarks/scaling.py --only widths --check 7b

Prints one JSON line per quantity: the values, calibration's seconds and peak anonymous memory (reading and writing
included), and the exponents of the power laws fitted to them.

``widths`` measures one layer of Llama 7B's proportions, with three experts, by calibration and by featcal:
processor seconds of one thread, less those of a layer of almost no width, and anonymous memory. Powers of the
width mislead, because what grows with the width, its square and its cube has comparable shares. So the seconds are
fitted to counts of values, of multiplications by tokens, and of those of featcal's matrices by matrices; the bytes to
those that are planned and those of the tokens. This gives what all layers of a 7B and a 70B model take, without their
output heads. With ``--check`` one layer of that model is measured too: one of 70B takes 7 GB of disk, and 16 GB of
memory by calibration.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
import yaml
from common import CACHE, VOCABULARY, be_quiet, in_subprocess, make_family, make_recipe, write_samples
from gpu import EXPERTS, SHAPES, write_models
from scipy.optimize import nnls
from support.memory import PeakMemory
from transformers import PretrainedConfig

from mergekit_slta.checks.space import solving_needs
from mergekit_slta.featcal import regression
from mergekit_slta.featcal.regression import PREDICTED, lowest_ridge
from mergekit_slta.featcal.scratch import solve_model
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.slta.measure import measured_statistics

DEFAULTS = {"samples": 8, "tokens": 128, "experts": 3, "layers": 4}
GRIDS = {"samples": (4, 8, 16, 32), "tokens": (64, 128, 256, 512), "experts": (1, 2, 3, 4), "layers": (2, 4, 8, 16)}
RANKS = (1, 2)
WIDTHS = (512, 1024, 2048)
LARGE = ("7b", "70b")  # the shapes that are told by extrapolation, and measured if asked for
ONE_LAYER = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
NO_WIDTH = 64  # of the layer whose seconds are fixed costs
CALIBRATION, FEATCAL = "slta attn_mlp", "featcal"  # what is measured at each width
VALUES, TOKENS = "values", "products with tokens"  # parts of the work


@click.command()
@click.option("--size", default="20m", show_default=True)
@click.option("--level", default="attn_mlp", show_default=True)
@click.option("--only", type=click.Choice([*GRIDS, "ranks", "widths"]), help="Only this quantity.")
@click.option("--widths", multiple=True, type=int, default=WIDTHS, show_default=True, help="Of the layers measured.")
@click.option("--setting", "settings", multiple=True, type=click.Choice([CALIBRATION, FEATCAL]), help="Only this.")
@click.option("--prompts", default=10, show_default=True, help="Of each task, for the widths.")
@click.option("--tokens", default=128, show_default=True, help="Of each prompt, for the widths.")
@click.option("--check", multiple=True, type=click.Choice(LARGE), help="With the widths, measure this layer too.")
@click.option("--one", help="Run one calibration with these values, as JSON, in this process.")
def main(
    size: str,
    level: str,
    only: str | None,
    widths: tuple[int, ...],
    settings: tuple[str, ...],
    prompts: int,
    tokens: int,
    check: tuple[str, ...],
    one: str | None,
) -> None:
    """Fit how calibration and featcal scale."""
    be_quiet()
    if one:
        values = json.loads(one)
        print(json.dumps(_run_layer(**values) if "models" in values else _run(size, level, values)))
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
    if only in (None, "widths"):
        _by_width(settings or [CALIBRATION, FEATCAL], widths, prompts, tokens, check)


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


# One layer by its width


def _by_width(settings: Sequence[str], widths: Sequence[int], prompts: int, tokens: int, check: Sequence[str]) -> None:
    """Print for each setting what a layer takes at each width, and what the large models take by that."""
    configs = [_config(width) for width in (NO_WIDTH, *widths)] + [SHAPES[shape] for shape in check]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        families = []
        for number, config in enumerate(configs):
            small = type(config).from_dict(config.to_dict() | {"vocab_size": VOCABULARY})
            families.append([str(model) for model in write_models(Path(folder) / str(number), small, 1, "cpu")])
        for name in settings:
            values = {"setting": name, "prompts": prompts, "tokens": tokens}
            fixed, *series = (
                in_subprocess(__file__, [f"--one={json.dumps(values | {'models': family})}"]) for family in families
            )
            for run in series:
                run["seconds"] -= fixed["seconds"]
            print(json.dumps(_extrapolated(name, widths, series, check, EXPERTS * prompts * tokens)), flush=True)


def _config(width: int) -> PretrainedConfig:
    large = SHAPES["7b"]
    heads = max(1, width * large.num_attention_heads // large.hidden_size)
    own = {
        "hidden_size": width,
        "intermediate_size": width * large.intermediate_size // large.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    return type(large).from_dict(large.to_dict() | own | {"head_dim": width // heads})


def _run_layer(models: list[str], setting: str, prompts: int, tokens: int) -> dict[str, Any]:
    """Processor seconds and anonymous memory, and how many ridges featcal tried for a group of maps, in the mean."""
    torch.set_num_threads(1)
    recipe = make_recipe([Path(model) for model in models], setting.split()[0], prompts, tokens)
    tried: list[int] = []

    def counted(error: Callable[[float], float]) -> float:
        ridges = set[float]()
        ridge = lowest_ridge(lambda ridge: ridges.add(ridge) or error(ridge))  # type: ignore[func-returns-value]
        tried.append(len(ridges))
        return ridge

    mock.patch.object(regression, "lowest_ridge", counted).start()
    with tempfile.TemporaryDirectory(dir=CACHE) as folder, PeakMemory() as peak:
        start = time.process_time()
        experiment = Experiment(recipe, quiet=True)
        if setting == CALIBRATION:
            measured_statistics(experiment, ["attn_mlp"], Path(folder) / "statistics.safetensors")
        else:
            own = {"scratch": folder, "head": False}
            solve_model(experiment, recipe.settings_of(FeatcalSettings).model_copy(update=own))
        seconds = time.process_time() - start
    return {
        "seconds": seconds,
        "bytes": peak.bytes,
        "ridges": sum(tried) / max(1, len(tried)),
    }


def _extrapolated(
    name: str, widths: Sequence[int], series: list[dict[str, Any]], check: Sequence[str], tokens: int
) -> dict[str, Any]:
    """Fit the first runs, those of the widths, and say what they make of larger layers; the others are the check."""
    fitted = series[: len(widths)]
    configs = [_config(width) for width in widths]
    ridges = fitted[-1]["ridges"]  # larger layers are taken to need as many
    seconds = [run["seconds"] for run in fitted]
    parts = [_work(name, config, tokens, run["ridges"]) for config, run in zip(configs, fitted, strict=True)]
    rates = _fit(list(map(_kinds, parts)), seconds)
    space = [_bytes(name, config, tokens) for config in configs]
    room = _fit(space, [run["bytes"] for run in fitted])
    power = np.polyfit(np.log(widths), np.log(seconds), 1)
    result: dict[str, Any] = {
        "benchmark": "scaling",
        "quantity": "widths",
        "setting": name,
        "tokens": tokens,
        "values": list(widths),
        "seconds": [round(value, 2) for value in seconds],
        "fitted_seconds": (np.array(list(map(_kinds, parts))) @ rates).round(2).tolist(),
        "seconds_exponent": round(float(power[0]), 2),
        "gb": [round(run["bytes"] / 1e9, 3) for run in fitted],
        "fitted_gb": (np.array(space) @ room / 1e9).round(3).tolist(),
        "ridges": [round(run["ridges"], 2) for run in series],
    }
    for shape in LARGE:
        config = SHAPES[shape]
        work = _work(name, config, tokens, ridges)
        layer = float(rates @ _kinds(work))
        result[shape] = {
            "seconds_per_layer": round(layer, 1),
            "1e12_multiplications": {part: round(count / 1e12, 3) for part, count in work.items() if part != VALUES},
            "hours": round(layer * config.num_hidden_layers / 3600, 2),
            "gb": round(float(room @ _bytes(name, config, tokens)) / 1e9, 1),
        }
    for shape, run in zip(check, series[len(widths) :], strict=True):
        config = SHAPES[shape]
        result[f"measured {shape}"] = {
            "seconds_per_layer": round(run["seconds"], 1),
            "by_its_own_ridges": round(float(rates @ _kinds(_work(name, config, tokens, run["ridges"]))), 1),
            "by_the_power": round(float(np.exp(np.polyval(power, np.log(config.hidden_size)))), 1),
            "gb": round(run["bytes"] / 1e9, 2),
        }
    return result


def _fit(terms: Sequence[Sequence[float]], values: Sequence[float]) -> np.ndarray:
    """What the terms must be multiplied by, none of them by less than zero, for the least relative errors."""
    relative = np.array(terms) / np.array(values)[:, None]
    scale = relative.max(0)
    scale[scale == 0] = 1
    return np.asarray(nnls(relative / scale, np.ones(len(values)))[0] / scale)


def _kinds(work: dict[str, float]) -> tuple[float, float, float]:
    """What takes unlike times: values, multiplications by tokens, and those of matrices by matrices."""
    values, products = work.get(VALUES, 0.0), work.get(TOKENS, 0.0)
    return values, products, sum(work.values()) - values - products


def _work(name: str, config: PretrainedConfig, tokens: int, ridges: float) -> dict[str, float]:
    """What a layer takes by part: values that are read and written, and multiplications (a float32 one is a half)."""
    width, inner = config.hidden_size, config.intermediate_size
    keys = width * config.num_key_value_heads // config.num_attention_heads
    groups = [(width, [width, keys, keys]), (width, [width]), (width, [inner, inner]), (inner, [width])]
    cells = sum(inputs * sum(outputs) for inputs, outputs in groups)
    values = float(tokens * sum(inputs + sum(outputs) for inputs, outputs in groups))
    if name == CALIBRATION:
        return {VALUES: values, TOKENS: (EXPERTS + 1) / 2 * tokens * cells}
    solved = [_solved(inputs, sum(outputs), tokens, ridges) for inputs, outputs in groups]
    return {
        VALUES: values,
        # The merged model's and the expert's layer, and the anchor's outputs.
        TOKENS: tokens * 1.5 * cells + sum(products for products, _ in solved),
        "search and solution": sum(systems for _, systems in solved),
        "anchor": sum(_actmat(inputs, rows) for inputs, outputs in groups for rows in outputs),
    }


def _solved(inputs: int, outputs: int, tokens: int, ridges: float) -> tuple[float, float]:
    """The multiplications of a regression by products with tokens, and by its systems."""
    if tokens >= inputs:
        systems = 2 * ridges * (inputs**3 / 6 + 2 * inputs**2 * PREDICTED) + inputs**3 / 6 + inputs**2 * outputs
        return tokens * (inputs**2 / 2 + inputs * outputs), systems
    half = tokens / 2
    whitened = tokens * inputs**2 / 2 + 1.5 * tokens**2 * inputs
    systems = 2 * ridges * (half**3 / 6 + 2 * half**2 * PREDICTED) + tokens**3 / 6 + tokens**2 * outputs
    return whitened + tokens * inputs * outputs, systems + inputs**3 / 6 + inputs**2 * outputs / 2


def _actmat(inputs: int, outputs: int) -> float:
    """The multiplications of ``actmat`` for one map of full rank, and of the moments that are featcal's prior."""
    rows = EXPERTS * outputs
    moments, small = rows * inputs**2 / 2, rows * (outputs * inputs / 2 + outputs * inputs)
    products = rows * inputs**2 if outputs >= inputs else small
    return moments + products + inputs**3 / 6 + inputs**2 * outputs


def _bytes(name: str, config: PretrainedConfig, tokens: int) -> tuple[float, float]:
    """Bytes that ``check`` names for featcal, or of a layer of all models in float32 for calibration; of the tokens."""
    decoder = Decoder(type(config).from_dict(config.to_dict() | ONE_LAYER))
    hidden = 4.0 * tokens * config.hidden_size
    if name == CALIBRATION:
        return 4.0 * (EXPERTS + 1) * sum(tensor.numel() for tensor in decoder.layers[0].state_dict().values()), hidden
    return solving_needs(decoder, EXPERTS)[0], hidden


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
