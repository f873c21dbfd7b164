"""How well the merge methods keep the tasks of the quickstart's family, on held-out prompts, over several seeds.

    python tests/benchmarks/quality.py --seed 0 --seed 1 --seed 2

Prints one JSON line per seed: the three-way average of exact matches of the best task arithmetic of the quickstart's
grid (picked on the held-out prompts themselves), of sftm and actmat, actmat also by ridge and scale, of slta, of
RegMean++ (``regmean.py``) and of featcal, the last two by number of samples per task. ``--massive`` merges, by featcal
only, copies of the family into which dimensions are planted that are a thousand times larger than the others, in the
inputs of every map, at the first token only, or at the second token of one task only, without changing what the models
compute. ``--no-data`` leaves out what needs prompts.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from common import CACHE, be_quiet
from regmean import regmean_plus_plus
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import family
import quickstart

from mergekit_slta.data.draw import CalibrationSource

SAMPLES = (3, 10, 30, 100)
RIDGES = (0.03, 0.1, 0.3)
SCALES = (0.8, 1.0)
MASSIVE = 1000.0
MAPS_BY_PRODUCER = {
    "input_layernorm.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "post_attention_layernorm.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.up_proj.weight": ["mlp.down_proj.weight"],
}


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1, 2], show_default=True)
@click.option("--massive", is_flag=True, help="Only featcal, on a family with massive activations.")
@click.option("--no-data", is_flag=True, help="Only task arithmetic and the methods that need no data.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "quality")
def main(seeds: tuple[int, ...], massive: bool, no_data: bool, out: Path) -> None:
    """Merge the family of each seed by every method and compare the averages."""
    be_quiet()
    torch.set_num_threads(quickstart.THREADS)
    for seed in seeds:
        folder = out / f"seed{seed}"
        models = family.train_family(folder / "family", seed, short=False)
        if massive:
            scores = _with_massive_activations(models, folder, seed)
        else:
            scores = _task_arithmetic(models, folder, seed) | _without_data(models, folder, seed)
            scores |= {} if no_data else _with_data(models, folder, seed)
        rounded = {name: round(score, 3) for name, score in scores.items()}
        print(json.dumps({"benchmark": "quality", "seed": seed, **rounded}), flush=True)


def _task_arithmetic(models: family.Family, folder: Path, seed: int) -> dict[str, float]:
    """The best average score of the grid."""
    recipes = quickstart.recipes(models, folder, quickstart.GRID)
    grid = [f"task_arithmetic {weight}" for weight in quickstart.GRID]
    return {"task_arithmetic": max(_score(folder, name, recipes[name], seed) for name in grid)}


def _with_data(models: family.Family, folder: Path, seed: int) -> dict[str, float]:
    """The average score of every method that sees prompts."""
    recipes = quickstart.recipes(models, folder, ())
    (folder / quickstart.STATISTICS).unlink(missing_ok=True)
    scores = {name: _score(folder, name, recipes[name], seed) for name in ("slta layer", "slta attn_mlp")}
    for count in SAMPLES:
        scores[f"regmean++ {count}"] = _regmean(models, folder, count)
        recipe = recipes["featcal"]
        recipe["parameters"]["samples"] = count
        scores[f"featcal {count}"] = _score(folder, f"featcal {count}", recipe, seed)
    return scores


def _without_data(models: family.Family, folder: Path, seed: int) -> dict[str, float]:
    """The score of the methods that need no data, and of actmat with other parameters than its defaults."""
    recipes = quickstart.recipes(models, folder, ())
    scores = {name: _score(folder, name, recipes[name], seed) for name in ("sftm", "actmat")}
    for ridge, scale in itertools.product(RIDGES, SCALES):
        recipe = recipes["actmat"]
        recipe["parameters"] = {"ridge": ridge, "scale": scale}
        name = f"actmat ridge {ridge} scale {scale}"
        scores[name] = _score(folder, name, recipe, seed)
    return scores


def _with_massive_activations(models: family.Family, folder: Path, seed: int) -> dict[str, float]:
    """featcal's score on a copy of the family with massive activations, and on the family itself."""
    scores = {"featcal": _score(folder, "featcal", quickstart.recipes(models, folder, ())["featcal"], seed)}
    first, *_ = models.experts
    plants: dict[str, Callable[[family.Family], None]] = {
        "massive": _plant,
        "massive first token": lambda copies: _plant_at_token(copies, 0, list(copies.experts)),
        "massive second token of one task": lambda copies: _plant_at_token(copies, 1, [first]),
    }
    for name, plant in plants.items():
        planted = folder / name.replace(" ", "-")
        shutil.rmtree(planted, ignore_errors=True)
        shutil.copytree(folder / "family", planted / "family")
        copies = family.train_family(planted / "family", seed, short=False)  # finds the copy, and trains nothing
        plant(copies)
        recipe = quickstart.recipes(copies, planted, ())["featcal"]
        scores[f"featcal, {name}"] = _score(planted, "featcal", recipe, seed)
    return scores


def _plant(models: family.Family) -> None:
    """Scale three input dimensions of every map up, and the weights that read them down."""
    for model in (models.base, *models.experts.values()):
        _scale_dimensions(model / "model.safetensors")


def _plant_at_token(models: family.Family, position: int, tasks: list[str]) -> None:
    """Give every MLP three more neurons, about a thousand at one token of some tasks, which nothing reads."""
    rows = _token_detectors(models, position, tasks)
    for model in (models.base, *models.experts.values()):
        file = model / "model.safetensors"
        tensors = load_file(file)
        for layer, row in enumerate(rows):
            gate, up, down = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
            tensors[gate] = torch.cat([tensors[gate], row.expand(3, -1)])
            tensors[up] = torch.cat([tensors[up], row * torch.tensor([[1.0], [0.7], [-1.2]])])
            tensors[down] = torch.cat([tensors[down], torch.zeros(len(row), 3)], 1)
        save_file(tensors, file, metadata={"format": "pt"})
        config = json.loads((model / "config.json").read_text())
        config["intermediate_size"] += 3
        (model / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def _token_detectors(models: family.Family, position: int, tasks: list[str]) -> list[torch.Tensor]:
    """For every layer, what makes an MLP's input [D] about the root of MASSIVE at one token, and negative at others."""
    base = AutoModelForCausalLM.from_pretrained(models.base)
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    inputs: list[list[torch.Tensor]] = [[] for _ in base.model.layers]
    for layer, seen in zip(base.model.layers, inputs, strict=True):

        def record(module: torch.nn.Module, args: tuple[torch.Tensor], seen: list[torch.Tensor] = seen) -> None:
            seen.append(args[0][0].double())

        layer.mlp.register_forward_pre_hook(record)
    marks = []
    for task, file in models.calibration.items():
        for line in file.read_text().splitlines()[:100]:
            token_ids = tokenizer(json.loads(line)["text"])["input_ids"]
            base(torch.tensor([token_ids]))
            marks.append(torch.arange(len(token_ids)) == (position if task in tasks else -1))
    marked = torch.cat(marks)
    wanted = torch.where(marked, MASSIVE**0.5, -8.0).double()
    weight = torch.where(marked, (~marked).sum() / marked.sum(), 1.0).double().sqrt()
    return [
        torch.linalg.lstsq(torch.cat(seen) * weight[:, None], (wanted * weight)[:, None], driver="gelsd")
        .solution[:, 0]
        .float()
        for seen in inputs
    ]


def _scale_dimensions(file: Path) -> None:
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("input_layernorm.weight")]:
        layer = name.removesuffix("input_layernorm.weight")
        for producer, readers in MAPS_BY_PRODUCER.items():
            grown = tensors[layer + producer]
            dimensions = torch.randperm(len(grown), generator=generator)[:3]
            grown[dimensions] *= MASSIVE
            for reader in readers:
                tensors[layer + reader][:, dimensions] /= MASSIVE
    save_file(tensors, file, metadata={"format": "pt"})


def _score(folder: Path, name: str, recipe: dict[str, Any], seed: int) -> float:
    return quickstart.average(family.evaluate(quickstart.merge(folder, name, recipe, seed)))


def _regmean(models: family.Family, folder: Path, count: int) -> float:
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    tasks = [
        CalibrationSource(str(models.calibration[task]), "", tokenizer, lambda: tokenizer, max_tokens=512, seed=0)
        .draw(count)
        .token_ids
        for task in models.experts
    ]
    experts = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models.experts.values()]
    merged = regmean_plus_plus(experts, tasks)
    target = folder / "merged" / f"regmean-{count}"
    merged.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return quickstart.average(family.evaluate(target))


if __name__ == "__main__":
    main()
