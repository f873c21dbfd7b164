"""How well the merge methods keep the tasks of the quickstart's family, on held-out prompts, over several seeds.

    python tests/benchmarks/quality.py --seed 0 --seed 1 --seed 2

Writes results/quality.json, for each seed: the three-way average of exact matches of the best task arithmetic of the
quickstart's grid (picked on the held-out prompts themselves), of sftm, actmat and slta, and by number of samples per
task of featcal and of RegMean++ and FeatCal as published (``published.py``).
"""

from pathlib import Path
from typing import Any

import click
import torch
from common import CACHE, be_quiet, write_result
from family import Family, evaluate, train_family
from published import published_featcal, regmean_plus_plus
from quickstart import GRID, STATISTICS, average, merge, recipes
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_slta.data.sources import CalibrationSource, read_records

SAMPLES = (3, 10, 30, 100)


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1, 2], show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "quality")
def main(seeds: tuple[int, ...], out: Path) -> None:
    """Merge the family of each seed by every method and compare the averages."""
    be_quiet(threads=1)
    rows = {}
    for seed in seeds:
        folder = out / f"seed{seed}"
        models = train_family(folder / "family", seed)
        scores = task_arithmetic(models, folder, seed) | methods(models, folder, seed)
        rows[f"seed {seed}"] = {name: round(score, 3) for name, score in scores.items()}
        write_result("quality", rows)


def task_arithmetic(models: Family, folder: Path, seed: int) -> dict[str, float]:
    """The best average score of the grid."""
    known = recipes(models, folder, GRID)
    grid = [f"task_arithmetic {weight}" for weight in GRID]
    return {"task_arithmetic": max(score(folder, name, known[name], seed) for name in grid)}


def methods(models: Family, folder: Path, seed: int) -> dict[str, float]:
    """The average score of every method that searches nothing."""
    known = recipes(models, folder, ())
    (folder / STATISTICS).unlink(missing_ok=True)
    names = ("sftm", "actmat", "slta layer", "slta attn_mlp")
    scores = {name: score(folder, name, known[name], seed) for name in names}
    for count in SAMPLES:
        scores |= published_methods(models, folder, count)
        recipe = known["featcal"]
        recipe["parameters"]["samples"] = count
        scores[f"featcal {count}"] = score(folder, f"featcal {count}", recipe, seed)
    return scores


def score(folder: Path, name: str, recipe: dict[str, Any], seed: int) -> float:
    """The average score of a merge by a recipe."""
    return average(evaluate(merge(folder, name, recipe, seed)))


def published_methods(models: Family, folder: Path, count: int) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    tasks = [
        CalibrationSource(source, read_records(source), "", tokenizer, lambda: tokenizer, max_tokens=512, seed=0)
        .draw(count)
        .token_ids
        for source in (str(models.calibration[task]) for task in models.experts)
    ]
    base, *experts = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (models.base, *models.experts.values())
    )
    scores = {}
    for name, merged in {
        "regmean++": regmean_plus_plus(experts, tasks),
        "published featcal": published_featcal(base, experts, tasks),
    }.items():
        target = folder / "merged" / f"{name.replace(' ', '-')}-{count}"
        merged.save_pretrained(target)
        tokenizer.save_pretrained(target)
        scores[f"{name} {count}"] = average(evaluate(target))
    return scores


if __name__ == "__main__":
    main()
