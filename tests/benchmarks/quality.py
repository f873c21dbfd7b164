"""How well the merge methods keep the tasks of the quickstart's family, on held-out prompts, over several seeds.

    python tests/benchmarks/quality.py --seed 0 --seed 1 --seed 2

Prints one JSON line per seed: the three-way average of exact matches of the best task arithmetic of the quickstart's
grid (picked on the held-out prompts themselves), of slta, of RegMean++ (``regmean.py``) and of featcal, the last two by
number of samples per task.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from common import CACHE
from regmean import regmean_plus_plus
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import family
import quickstart

from mergekit_slta.data import load_calibration

SAMPLES = (3, 10, 30, 100)


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1, 2], show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "quality")
def main(seeds: tuple[int, ...], out: Path) -> None:
    """Merge the family of each seed by every method and compare the averages."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(quickstart.THREADS)
    for seed in seeds:
        folder = out / f"seed{seed}"
        models = family.train_family(folder / "family", seed, short=False)
        recipes = quickstart.recipes(models, folder, quickstart.GRID)
        (folder / quickstart.STATISTICS).unlink(missing_ok=True)
        grid = [f"task_arithmetic {weight}" for weight in quickstart.GRID]
        result: dict[str, Any] = {
            "benchmark": "quality",
            "seed": seed,
            "task_arithmetic": max(_score(folder, name, recipes[name], seed) for name in grid),
        }
        for name in ("slta layer", "slta attn_mlp"):
            result[name] = _score(folder, name, recipes[name], seed)
        for count in SAMPLES:
            result[f"regmean++ {count}"] = _regmean(models, folder, count, seed)
            recipe = quickstart.recipes(models, folder, ())["featcal"]
            recipe["parameters"]["samples"] = count
            result[f"featcal {count}"] = _score(folder, f"featcal {count}", recipe, seed)
        print(
            json.dumps(
                {
                    key: round(value, 3) if key != "seed" and key != "benchmark" else value
                    for key, value in result.items()
                }
            ),
            flush=True,
        )


def _score(folder: Path, name: str, recipe: dict[str, Any], seed: int) -> float:
    return quickstart.average(family.evaluate(quickstart.merge(folder, name, recipe, seed)))


def _regmean(models: family.Family, folder: Path, count: int, seed: int) -> float:
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    tasks = [
        load_calibration(
            str(models.calibration[task]),
            template="",
            tokenizer=tokenizer,
            expert_tokenizer=lambda: tokenizer,
            samples=count,
            max_tokens=512,
            seed=0,
        ).token_ids
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
