"""What a merge keeps of the base model, on the quickstart's family: exact matches on held-out prompts.

    python examples/quickstart.py --out quickstart
    python tests/benchmarks/keep.py quickstart/family

Merges the expert for sums, with and without prompts for the base model in the two tasks that this expert has never
seen, then two experts, with the base model's prompts in the third task. Prints a Markdown table, and writes
results/keep.json.
"""

import json
from pathlib import Path
from typing import Any

import click
import torch
from common import CACHE, be_quiet, write_result
from family import TASKS, evaluate
from quickstart import merge
from transformers import AutoModelForCausalLM, AutoTokenizer

OTHERS = ("strings", "words")  # the tasks of the base model's prompts, beside the expert for sums
WRITTEN_TOKENS = 56
ROWS: dict[str, dict[str, Any]] = {
    **{
        f"task_arithmetic {weight}": {"method": "task_arithmetic", "expert": {"weight": weight}}
        for weight in (0.5, 0.9)
    },
    **{f"slta, κ {kappa}": {"method": "slta", "keep": OTHERS, "weight": kappa} for kappa in (0.3, 1.0, 3.0)},
    "featcal": {"method": "featcal", "keep": OTHERS},
    "featcal, κ 0.3": {"method": "featcal", "keep": OTHERS, "weight": 0.3},
    "featcal, κ 3": {"method": "featcal", "keep": OTHERS, "weight": 3.0},
    "featcal, prompts that the base model wrote": {"method": "featcal", "keep": ("written",)},
    "featcal, two experts alone": {"method": "featcal", "experts": ("sums", "strings")},
    "featcal, two experts": {"method": "featcal", "experts": ("sums", "strings"), "keep": ("words",)},
}


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "keep")
@click.option("--only", default="", help="Only the rows whose names hold this.")
def main(folder: Path, out: Path, only: str) -> None:
    """Merge the family in FOLDER in each way, and print the scores."""
    be_quiet(threads=1)
    prompts = base_prompts(folder.resolve(), out)
    models = {"base model": folder / "base", "expert for sums": folder / "sums"}
    print("| | sums | strings | words |\n|---|---|---|---|", flush=True)
    rows = {label: show(label, model) for label, model in models.items()}
    for label, row in ROWS.items():
        if only in label:
            merged = merge(out, label.replace(",", ""), recipe(folder.resolve(), prompts, **row), 0)
            rows[label] = show(label, merged)
    write_result("keep", rows)


def recipe(
    folder: Path,
    prompts: dict[str, Path],
    method: str,
    experts: tuple[str, ...] = ("sums",),
    keep: tuple[str, ...] = (),
    expert: dict[str, float] | None = None,
    weight: float = 1.0,
) -> dict[str, Any]:
    """A mergekit recipe for one row."""
    data = method in ("slta", "featcal")
    models: list[dict[str, Any]] = []
    for name in experts:
        given = {"calibration": str(folder / "calibration" / f"{name}.jsonl")} if data else {}
        models.append({"model": str(folder / name), "parameters": {**(expert or {}), **given}})
    if keep:
        kept = {"calibration": str(prompts["-".join(keep)]), "weight": weight}
        models.append({"model": str(folder / "base"), "parameters": kept})
    return {"merge_method": method, "base_model": str(folder / "base"), "models": models, "dtype": "float32"}


def base_prompts(folder: Path, out: Path) -> dict[str, Path]:
    """Files of prompts on which the base model's abilities are kept: of tasks, and of its own writing."""
    out.mkdir(parents=True, exist_ok=True)
    lines = {name: (folder / "calibration" / f"{name}.jsonl").read_text().splitlines() for name in OTHERS}
    found = {
        "strings-words": [line for pair in zip(*lines.values(), strict=True) for line in pair],
        "words": lines["words"],
    }
    found["written"] = [json.dumps({"text": text}) for text in written(folder / "base")]
    files = {name: out / f"{name}.jsonl" for name in found}
    for name, content in found.items():
        files[name].write_text("\n".join(content) + "\n")
    return files


def written(base: Path, samples: int = 40) -> list[str]:
    """Texts that the base model writes by itself, from its first token on."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    start = torch.tensor([[tokenizer.bos_token_id]] * samples)
    with torch.no_grad():
        rows = model.generate(start, do_sample=True, max_new_tokens=WRITTEN_TOKENS, eos_token_id=-1)
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def show(label: str, model: Path) -> dict[str, float]:
    scores = evaluate(model)
    print(f"| {label} | {' | '.join(f'{scores[task]:.2f}' for task in TASKS)} |", flush=True)
    return scores


if __name__ == "__main__":
    main()
