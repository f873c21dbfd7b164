"""Train a tiny model family, merge it in many ways with the stock mergekit-yaml, and compare the merges.

Runs offline on two CPU cores, in the environment that mergekit-slta is installed in:

    python examples/quickstart.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
import transformers
import yaml
from family import TASKS, Family, evaluate, train_family, write_bytes
from tqdm import tqdm

from mergekit_slta.figures import Matrix, heat_map
from mergekit_slta.slta.statistics import Statistics

STATISTICS = "statistics.safetensors"
HEAT_MAP = "alpha.png"
RESULTS = "results.json"
GRID = (0.2, 0.4, 0.6, 0.8, 1.0)
SHORT = ("task_arithmetic 0.4", "sftm", "actmat", "slta attn_mlp", "featcal")  # the rows of a short run
THREADS = 2  # more do not help models of this size, and their number changes the rounding
ANSWERED = "{question}{answer}"  # the same text as a record's ``text``; it also tells `compare` the last line's answer
BRANCHES = {"attn": "Attention", "mlp": "MLP"}

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
    help="Train for a few steps only and merge in five ways, to see that it runs; the scores mean nothing.",
)
@click.option("--seed", default=0, show_default=True, help="Of the family and of the methods that draw at random.")
@click.option("--retrain", is_flag=True, help="Train the family even if it is there.")
def main(out: Path, short: bool, seed: int, retrain: bool) -> None:
    """Train a tiny family (a base model, three experts), merge it, compare the merges, draw the merging weights."""
    started = time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    family = train_family(out / "family", seed, short, retrain=retrain)
    trained = time.monotonic()
    scores = evaluate_family(family)
    # Statistics of a family that was trained otherwise would be refused.
    (out / STATISTICS).unlink(missing_ok=True)
    todo = {label: made for label, made in recipes(family, out, GRID).items() if not short or label in SHORT}
    # Two at a time, because most of the time of so small a merge is Python's start in one thread.
    with ThreadPoolExecutor(2) as pool, tqdm(total=len(todo), desc="Merging", unit="merge") as bar:
        for label, folder in zip(todo, pool.map(lambda label: merge(out, label, todo[label], seed), todo), strict=True):
            scores[label] = evaluate(folder)
            bar.set_description(f"Merged by {label}")
            bar.update()
    write_bytes(out / RESULTS, json.dumps(scores, indent=2).encode())
    write_bytes(out / HEAT_MAP, picture_of_weights(out / STATISTICS))
    click.echo(f"\n{table(scores)}\n")
    if short:
        click.echo("This was a short run: the models hardly learned, and the numbers cannot be compared with any.")
    else:
        best = max((label for label in scores if label.startswith("task_arithmetic")), key=lambda k: average(scores[k]))
        click.echo(f"The best of the grid, found on the very prompts of this table: {best}.")
    click.echo(
        f"The merging weights of slta attn_mlp: {out / HEAT_MAP}. The recipes, to be run in {out}: {out / 'recipes'}."
    )
    click.echo(f"{time.monotonic() - started:.0f} s in all, {trained - started:.0f} s of them for training.")


def recipes(family: Family, out: Path, grid: tuple[float, ...]) -> dict[str, Recipe]:
    """What to compare: a mergekit recipe for each row of the table."""

    def recipe(method: str, expert: Recipe | None = None, *, data: bool = False, **shared: Any) -> Recipe:
        models = []
        for task, folder in family.experts.items():
            calibration = {"calibration": _local(family.calibration[task], out)} if data else {}
            if method == "slta":  # by ``text`` in featcal: there one line's answer would weigh more than the others
                calibration["template"] = ANSWERED
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


def merge(out: Path, label: str, recipe: Recipe, seed: int) -> Path:
    """Write a recipe and run it as a user does; returns the merged model's folder."""
    name = label.replace(" ", "-")
    file, folder = Path("recipes") / f"{name}.yml", Path("merged") / name
    write_bytes(out / file, yaml.safe_dump(recipe, sort_keys=False).encode())
    shutil.rmtree(out / folder, ignore_errors=True)
    command = shutil.which("mergekit-yaml", path=str(Path(sys.executable).parent))
    if command is None:
        raise click.ClickException(f"There is no mergekit-yaml beside {sys.executable}: install mergekit-slta there.")
    done = subprocess.run(
        [command, file, folder, "--random-seed", str(seed), "--quiet"],
        cwd=out,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},  # two merges run at a time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise click.ClickException(f"mergekit-yaml {file} failed:\n{done.stdout}")
    return out / folder


def evaluate_family(family: Family) -> dict[str, Scores]:
    """The scores of the base model and of each expert."""
    models = {"base": family.base, **{f"expert {task}": folder for task, folder in family.experts.items()}}
    return {label: evaluate(folder) for label, folder in tqdm(models.items(), desc="Evaluating", unit="model")}


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


def picture_of_weights(path: Path) -> bytes:
    """Heat maps of the merging weights: layers across, experts down, one map per branch, as PNG."""
    measured = Statistics.load(path)
    alpha = measured.solve("attn_mlp").alpha
    layers = [str(layer) for layer in range(measured.info.num_layers)]
    experts = [Path(model).name for model in measured.info.models]
    maps = []
    for branch, title in BRANCHES.items():
        values = [[float(alpha[f"layer.{layer}.{branch}"][row]) for layer in layers] for row in range(len(experts))]
        maps.append(Matrix(title, values, experts, layers))
    drawn = heat_map(maps, x_label="layer", y_label="expert", value_label="merging weight α", limits=(0.0, 1.0))
    return drawn.png()


def _local(path: Path, out: Path) -> str:
    """A path as seen from the output folder; the dot tells mergekit that it is no name on the Hub."""
    return f"./{path.relative_to(out).as_posix()}"


if __name__ == "__main__":
    main()
