"""Accuracy of merges of LoRA adapters on the quickstart's models, with several ridges of ``actmat``.

    python tests/benchmarks/adapters.py FOLDER

FOLDER is one that the quickstart filled. For each seed, three adapters of rank 16 are trained on the prompts of its
tasks: from one random beginning, as trainers with a fixed seed make them, or each from its own. Scored are held-out
prompts. It takes five minutes.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from common import load, write_result
from family import evaluate
from mergekit.scripts import extract_lora
from peft import PeftModel, get_peft_model
from quickstart import average
from real_family import lora
from transformers import AutoModelForCausalLM, AutoTokenizer

import mergekit_slta as slta

TASKS = ("sums", "strings", "words")
MERGES: dict[str, dict[str, Any]] = {
    "task_arithmetic 0.4": {"merge_method": "task_arithmetic", "parameters": {"weight": 0.4}},
    **{
        f"actmat, ridge {ridge:g}": {"merge_method": "actmat", "parameters": {"ridge": ridge}}
        for ridge in (0.03, 0.3, 1, 3, 10, 30)
    },
    **{f"featcal, {count} prompts": {"merge_method": "featcal", "parameters": {"samples": count}} for count in (3, 30)},
}
STEPS, BATCH = 300, 32


def train(folder: Path, task: str, seed: int, out: Path) -> str:
    """Train an adapter on a task's prompts, whose beginning depends on the seed; its name in a recipe."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "family" / "base")
    torch.manual_seed(seed)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "family" / "base"), lora())
    rows = map(json.loads, (folder / "family" / "calibration" / f"{task}.jsonl").read_text().splitlines())
    pairs = [(tokenizer(row["text"])["input_ids"], len(tokenizer(row["question"])["input_ids"])) for row in rows]
    longest = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in pairs])
    labels = torch.tensor([[-100] * q + ids[q:] + [-100] * (longest - len(ids)) for ids, q in pairs])
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows_of_step = torch.randint(len(pairs), (BATCH,), generator=draw)
        model(input_ids=ids[rows_of_step], labels=labels[rows_of_step]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    return f"{folder / 'family' / 'base'}+{out}"


def extract(base: Path, merged: Path, rank: int) -> None:
    """Put the base model with the adapter of a merge, which mergekit-extract-lora makes, in the merge's place."""
    adapter = merged.with_name(f"adapter of rank {rank}")
    ranks = ["--max-rank", str(rank), "--out-path", str(adapter)]
    extract_lora.main(["--model", str(merged), "--base-model", str(base), *ranks], standalone_mode=False)
    write_whole(base, adapter, merged)


def write_whole(base: Path, adapter: Path, out: Path) -> Path:
    """Write a model with an adapter in it."""
    model: Any = PeftModel.from_pretrained(load(base, "cpu"), adapter)
    model.merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    return out


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--seed", "seeds", type=int, multiple=True, default=(0, 1, 2))
def main(folder: Path, seeds: tuple[int, ...]) -> None:
    """Print the mean accuracy of each merge, and its deviation over the seeds."""
    torch.set_num_threads(1)
    folder, rows = folder.resolve(), {}
    for shared in (True, False):
        found: dict[str, list[float]] = {}
        for seed in seeds:
            with tempfile.TemporaryDirectory() as temporary:
                out = Path(temporary)
                base = folder / "family" / "base"
                options: Any = {"quiet": True, "lora_merge_cache": f"{temporary}/merged"}
                begins = [seed if shared else 100 * (seed + 1) + index for index in range(len(TASKS))]
                models = [train(folder, task, begin, out / task) for task, begin in zip(TASKS, begins, strict=True)]
                shape = {"base_model": str(base), "dtype": "float32"}
                data = [str(folder / "family" / "calibration" / f"{task}.jsonl") for task in TASKS]
                given = [{"calibration": source} for source in data]
                with_data = shape | {
                    "merge_method": "featcal",
                    "models": [{"model": m, "parameters": p} for m, p in zip(models, given, strict=True)],
                }
                for label, merge in MERGES.items():
                    plain = shape | {"models": [{"model": model} for model in models]} | merge
                    content = with_data | merge if merge["merge_method"] == "featcal" else plain
                    slta.merge(slta.Recipe(content), out / label, **options)
                for label in MERGES:
                    found.setdefault(label, []).append(average(evaluate(out / label)))
                alone = {task: evaluate(write_whole(base, out / task, out / f"{task} alone"))[task] for task in TASKS}
                found.setdefault("each adapter alone", []).append(average(alone))
        beginning = "from one beginning" if shared else "each from its own beginning"
        click.echo(beginning)
        rows[beginning] = found
        for label, scores in found.items():
            click.echo(
                f"  {label}: {statistics.mean(scores):.2f} ± {statistics.stdev(scores) if len(scores) > 1 else 0:.2f}"
            )
    write_result("adapters", rows, seeds=seeds)


if __name__ == "__main__":
    main()
