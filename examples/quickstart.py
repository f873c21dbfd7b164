"""Merge a tiny model family in many ways with the stock mergekit-yaml, and compare the merges.

Runs offline on two CPU cores, in the environment that mergekit-slta is installed in:

    python examples/quickstart.py
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
import transformers
import yaml
from family import TASKS, Family, copy_shipped, evaluate, train_family, write_bytes
from mergekit.scripts import run_yaml
from tqdm import tqdm

from mergekit_slta.figures import drawn
from mergekit_slta.slta.statistics import Statistics

STATISTICS = "statistics.safetensors"
HEAT_MAP = "alpha.png"
RESULTS = "results.json"
GRID = (0.2, 0.4, 0.6, 0.8, 1.0)
SHORT = ("task_arithmetic 0.4", "sftm", "actmat", "slta attn_mlp", "featcal")  # the rows of a short run

Recipe = dict[str, Any]
Scores = dict[str, float]


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="quickstart",
    show_default=True,
    help="Folder for models, recipes and results.",
)
@click.option(
    "--short",
    is_flag=True,
    help="Merge in five ways only, to see that it runs.",
)
@click.option("--seed", type=int, help="Train another family, by this seed.  [default: the family in examples/family]")
def main(out: Path, short: bool, seed: int | None) -> None:
    """Merge a tiny family (a base model, three experts), compare the merges, draw the merging weights."""
    started = time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    family = copy_shipped(out / "family") if seed is None else train_family(out / "family", seed)
    trained = time.monotonic()
    # Statistics of a family that was trained otherwise would be refused.
    (out / STATISTICS).unlink(missing_ok=True)
    todo = {label: made for label, made in recipes(family, out, GRID).items() if not short or label in SHORT}
    models = {"base": family.base, **{f"expert {task}": folder for task, folder in family.experts.items()}}
    scores: dict[str, Scores] = {}
    with tqdm(total=len(models) + len(todo), unit="model") as bar:
        for label in (*models, *todo):
            bar.set_description(label)
            scores[label] = evaluate(models[label] if label in models else merge(out, label, todo[label], seed or 0))
            bar.update()
    write_bytes(out / RESULTS, json.dumps(scores, indent=2).encode())
    write_bytes(out / HEAT_MAP, drawn(Statistics.load(out / STATISTICS).solve("attn_mlp").plot()))
    click.echo(f"\n{table(scores)}\n")
    if not short:
        best = max((label for label in scores if label.startswith("task_arithmetic")), key=lambda k: average(scores[k]))
        click.echo(f"{best} has the best weight, which was chosen on the prompts of this table.")
    click.echo(
        f"The merging weights of slta attn_mlp: {out / HEAT_MAP}. The recipes, to run in {out}: {out / 'recipes'}."
    )
    training = "" if seed is None else f", {trained - started:.0f} s of them for training"
    click.echo(f"This took {time.monotonic() - started:.0f} s{training}.")


def recipes(family: Family, out: Path, grid: tuple[float, ...]) -> dict[str, Recipe]:
    """What to compare: a mergekit recipe for each row of the table."""

    def recipe(method: str, expert: Recipe | None = None, *, data: bool = False, **shared: Any) -> Recipe:
        models = []
        for task, folder in family.experts.items():
            calibration = {"calibration": _local(family.calibration[task], out)} if data else {}
            models.append({"model": _local(folder, out), "parameters": {**(expert or {}), **calibration}})
        base = {} if method == "linear" else {"base_model": _local(family.base, out)}
        return {"merge_method": method, **base, "models": models, "parameters": shared, "dtype": "float32"}

    return {
        "linear": recipe("linear", {"weight": 1.0}),
        **{f"task_arithmetic {weight}": recipe("task_arithmetic", {"weight": weight}) for weight in grid},
        "ties": recipe("ties", {"weight": 1.0, "density": 0.5}),
        "dare_linear": recipe("dare_linear", {"weight": 0.4, "density": 0.5}),
        "sftm": recipe("sftm"),
        "actmat": recipe("actmat"),
        "slta layer": recipe("slta", data=True, level="layer"),
        "slta attn_mlp": recipe("slta", data=True, level="attn_mlp", statistics=STATISTICS),
        "featcal": recipe("featcal", data=True),
    }


def merge(out: Path, label: str, recipe: Recipe, seed: int, *options: str) -> Path:
    """Write a recipe and run it by the command mergekit-yaml; returns the merged model's folder.

    In this process, because most of the time of so small a merge would be the start of another.
    """
    name = label.replace(" ", "-")
    file, folder = Path("recipes") / f"{name}.yml", Path("merged") / name
    write_bytes(out / file, yaml.safe_dump(recipe, sort_keys=False).encode())
    shutil.rmtree(out / folder, ignore_errors=True)
    with contextlib.chdir(out):
        arguments = [str(file), str(folder), "--random-seed", str(seed), "--quiet", *options]
        run_yaml.main(arguments, standalone_mode=False)
    return out / folder


def average(scores: Scores) -> float:
    """The mean over the tasks."""
    return sum(scores.values()) / len(scores)


def table(scores: Mapping[str, Scores]) -> str:
    """One line per model: exact match on each task and on average."""
    width = max(map(len, scores))
    lines = [" " * width + "".join(f"{name:>9}" for name in (*TASKS, "average"))]
    for label, row in scores.items():
        lines.append(f"{label:{width}}" + "".join(f"{score:9.2f}" for score in (*row.values(), average(row))))
    return "\n".join(lines)


def _local(path: Path, out: Path) -> str:
    """A path as seen from the output folder; the dot tells mergekit that it is no name on the Hub."""
    return f"./{path.relative_to(out).as_posix()}"


if __name__ == "__main__":
    main()
