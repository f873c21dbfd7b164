r"""Merge an instruct model with one fine-tune of it in several ways, and score what each merge gained and kept.

Needs a GPU, the Hub and `pip install "lm_eval[ifeval]"` for real models. One pair, with everything that it downloads:

    python examples/evaluate_pair.py google/gemma-2-2b-it google/gemma-2-2b-jpn-it --device cuda --chat \
        --calibration "hf:kunishou/databricks-dolly-15k-ja?split=train" \
        --keep "hf:databricks/databricks-dolly-15k?split=train" --keep-template "{instruction}\n{context}\n{response}" \
        --gained mgsm_direct_ja --kept ifeval --kept gsm8k

An interrupted run goes on where it stopped; each row is scored in a process of its own and kept in results.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from family import write_bytes

RESULTS = "results.json"
# The first of these metrics that a task reports is its score.
METRICS = (
    *("prompt_level_strict_acc,none", "exact_match,flexible-extract", "exact_match,remove_whitespace"),
    *("exact_match,strict-match", "exact_match,none", "pass@1,create_test", "acc_norm,none", "acc,none"),
)

Recipe = dict[str, Any]
Scores = dict[str, float]


@click.command()
@click.argument("base")
@click.argument("expert")
@click.option("--calibration", required=True, metavar="SOURCE", help="Prompts of the fine-tune's task.")
@click.option("--template", default="", help="How a row of --calibration becomes text.")
@click.option("--keep", required=True, metavar="SOURCE", help="Prompts that need the base model's abilities.")
@click.option("--keep-template", default="", help="How a row of --keep becomes text.")
@click.option(
    "--gained", multiple=True, required=True, metavar="TASK", help="A task of lm-eval for what the fine-tune learned."
)
@click.option(
    "--kept", multiple=True, required=True, metavar="TASK", help="A task of lm-eval for the base model's abilities."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="pair", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="The device of the merges and of lm-eval.")
@click.option("--dtype", default="bfloat16", show_default=True, help="The type of the merged models' tensors.")
@click.option("--samples", default=30, show_default=True, help="Prompts of each kind for featcal.")
@click.option("--limit", type=int, help="Score only so many items of each task.")
@click.option("--batch-size", default="auto", show_default=True, help="The batch size of lm-eval.")
@click.option("--chat", is_flag=True, help="Write lm-eval's prompts with the chat template.")
@click.option("--tasks", type=click.Path(exists=True, path_type=Path), help="A folder with tasks of your own.")
@click.option("--keep-models", is_flag=True, help="Do not delete a merged model when it has been scored.")
def main(
    base: str, expert: str, gained: tuple[str, ...], kept: tuple[str, ...], out: Path, keep_models: bool, **options: Any
) -> None:
    """Merge EXPERT, a fine-tune of the instruct model BASE, in several ways, and print a table of scores."""
    scored: dict[str, Scores] = json.loads((out / RESULTS).read_text()) if (out / RESULTS).is_file() else {}
    todo: dict[str, str | Recipe] = {"base": base, "expert": expert, **recipes(base, expert, options)}
    for label, recipe in todo.items():
        if scored.get(label, {}).keys() >= {*gained, *kept}:
            continue
        click.echo(f"{label} ...", err=True)
        folder = recipe if isinstance(recipe, str) else merged(out, label, recipe, options["device"])
        scored[label] = scores(str(folder), (*gained, *kept), out / "scores" / label, options)
        write_bytes(out / RESULTS, json.dumps(scored, indent=2).encode())
        if isinstance(folder, Path) and not keep_models:
            shutil.rmtree(folder)
    text = table({label: scored[label] for label in todo}, gained, kept)
    write_bytes(out / "table.md", f"{text}\n".encode())
    click.echo(text)


def recipes(base: str, expert: str, options: Mapping[str, Any]) -> dict[str, Recipe]:
    """A mergekit recipe for each merge of the table."""

    def recipe(method: str, models: list[Recipe], **shared: Any) -> Recipe:
        types = {"dtype": "float32", "out_dtype": options["dtype"]}
        return {"merge_method": method, "base_model": base, "models": models, "parameters": shared, **types}

    def calibrated(model: str, source: str, template: str) -> Recipe:
        own = {"template": template.replace("\\n", "\n")} if template else {}  # as a shell passes line breaks on
        return {"model": model, "parameters": {"calibration": source} | own}

    gain = calibrated(expert, options["calibration"], options["template"])
    keep = calibrated(base, options["keep"], options["keep_template"])
    found = {
        f"task_arithmetic-{weight}": recipe("task_arithmetic", [{"model": expert, "parameters": {"weight": weight}}])
        for weight in (0.3, 0.5, 0.7)
    }
    return {
        **found,
        "ties": recipe("ties", [{"model": expert, "parameters": {"weight": 1.0, "density": 0.5}}]),
        "slerp": recipe("slerp", [{"model": base}, {"model": expert}], t=0.5),
        "featcal": recipe("featcal", [gain, keep], samples=options["samples"]),
    }


def merged(out: Path, label: str, recipe: Recipe, device: str) -> Path:
    """Write a recipe and merge it by mergekit-yaml, as a user does; returns the folder."""
    file, folder = out / "recipes" / f"{label}.yml", out / "merged" / label
    write_bytes(file, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode())
    shutil.rmtree(folder, ignore_errors=True)
    run([str(Path(sys.executable).with_name("mergekit-yaml")), str(file), str(folder), "--device", device])
    return folder


def scores(model: str, tasks: Sequence[str], out: Path, options: Mapping[str, Any]) -> Scores:
    """The score of a model on each of lm-eval's tasks, from a process of its own."""
    shutil.rmtree(out, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", *tasks, "--output_path", str(out)),
        *("--model_args", f"pretrained={model},dtype={options['dtype']}", "--device", options["device"]),
        *("--batch_size", str(options["batch_size"])),
        *(("--limit", str(options["limit"])) if options["limit"] else ()),
        *(("--apply_chat_template",) if options["chat"] else ()),
        *(("--include_path", str(options["tasks"])) if options["tasks"] else ()),
    ]
    run(command)
    (file,) = out.rglob("results_*.json")
    return {
        task: score(task, found) for task, found in json.loads(file.read_text())["results"].items() if task in tasks
    }


def score(task: str, found: Mapping[str, Any]) -> float:
    """The first of ``METRICS`` that lm-eval reports for a task."""
    for metric in METRICS:
        if metric in found:
            return float(found[metric])
    raise click.ClickException(f"{task} reports {', '.join(found)}: add the one to use to METRICS.")


def run(command: Sequence[str]) -> None:
    """Run a program; its output is shown if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stdout}")


def table(scored: Mapping[str, Scores], gained: Sequence[str], kept: Sequence[str]) -> str:
    """A Markdown table: every score, the share of the fine-tune's gain, and the share of the base model's skills.

    The gain is that of the mean over the tasks in ``gained``, what is kept that of the mean over the tasks in ``kept``.
    """

    def mean(label: str, tasks: Sequence[str]) -> float:
        return sum(scored[label][task] for task in tasks) / len(tasks)

    def share(part: float, whole: float) -> str:
        return f"{part / whole:.2f}" if whole else "-"

    lines = [["", *gained, *kept, "gained", "kept"], ["---"] * (len(gained) + len(kept) + 3)]
    for label, row in scored.items():
        gain = share(mean(label, gained) - mean("base", gained), mean("expert", gained) - mean("base", gained))
        values = [f"{row[task]:.3f}" for task in (*gained, *kept)]
        lines.append([label, *values, gain, share(mean(label, kept), mean("base", kept))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
