"""The quickstart's family in other architectures: merged by several methods, and trained on the same prompts.

    python tests/benchmarks/architectures.py
    python tests/benchmarks/architectures.py --only gemma2 --seed 0

Trains a base model and three experts of each architecture and seed, and writes the average exact match of each merge on
held-out prompts to results/architectures.json, after every family. Task arithmetic has the best weight of the
quickstart's grid, picked on the held-out prompts themselves. ``trained`` begins with the experts' mean and trains all
of its parameters on as many prompts of the same files, and their answers, for ``STEPS`` steps over all of them, by the
best of ``RATES``, picked on the held-out prompts, too. It proves nothing of large models or of other tasks.
"""

import json
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from common import CACHE, be_quiet
from family import IGNORED, Family, evaluate, train_family
from quality import score, task_arithmetic
from quickstart import average, recipes
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES = (3, 30)
STEPS, RATES = 100, (1e-4, 3e-4, 1e-3)
RESULTS = Path(__file__).with_name("results") / "architectures.json"
_HEADS: dict[str, Any] = {"head_dim": 32}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "intermediate_size": 128}
# Entries of the models' configurations that differ from the quickstart's.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": _HEADS,
    "gemma2": _HEADS,  # a norm before and after attention and MLP
    "gemma3_text": _HEADS,  # the same
    "glm4": _HEADS,  # the same
    "olmo2": {},  # a norm after them alone
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},  # convolutions have a state
    "qwen3_moe": {**_HEADS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": {**_ROUTED, "num_local_experts": 4},
    "gpt_oss": {**_ROUTED, **_HEADS, "num_local_experts": 4},
}


@click.command()
@click.option("--only", multiple=True, type=click.Choice([*ARCHITECTURES]), default=[*ARCHITECTURES])
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1], show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "architectures")
def main(only: tuple[str, ...], seeds: tuple[int, ...], out: Path) -> None:
    """Merge and train a family of each architecture; families that an earlier run has finished stay."""
    be_quiet(threads=1)
    versions = {name: version(name) for name in ("mergekit", "torch", "transformers")}
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for seed, name in product(seeds, only):
        if f"{name} {seed}" not in rows:
            rows[f"{name} {seed}"] = scores(name, seed, out / f"{name}-{seed}")
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    click.echo(table(rows))


def scores(name: str, seed: int, folder: Path) -> dict[str, float]:
    """The averages of one family, by merge."""
    family = train_family(folder / "family", seed, config={"model_type": name, **ARCHITECTURES[name]})
    known = recipes(family, folder, ())
    row = {
        "each expert": mean(evaluate(path)[task] for task, path in family.experts.items()),
        **task_arithmetic(family, folder, seed),
        "actmat": score(folder, "actmat", known["actmat"], seed),
    }
    for count in SAMPLES:
        known["featcal"]["parameters"]["samples"] = count
        row[f"featcal {count}"] = score(folder, f"featcal {count}", known["featcal"], seed)
        row[f"trained {count}"] = max(trained(family, count, rate, folder / "trained") for rate in RATES)
    return {column: round(value, 3) for column, value in row.items()}


def trained(family: Family, count: int, rate: float, folder: Path) -> float:
    """The average of the experts' mean after training on prompts of every task."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(family.base)
    model: Any = AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.float32)
    experts = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in family.experts.values()]
    means = {key: sum(expert.state_dict()[key] for expert in experts) / len(experts) for key in model.state_dict()}
    model.load_state_dict(means)
    records = [
        json.loads(line) for path in family.calibration.values() for line in path.read_text().splitlines()[:count]
    ]
    batch = tokenizer([record["text"] for record in records], padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].clone()
    for row, record in enumerate(records):
        labels[row, : 1 + len(record["question"])] = IGNORED  # a token for each letter, and <bos>
    labels[batch["attention_mask"] == 0] = IGNORED
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(STEPS):
        model(input_ids=batch["input_ids"], labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for written in (model, tokenizer):
        written.save_pretrained(folder)
    return average(evaluate(folder))


def table(rows: dict[str, dict[str, float]]) -> str:
    """The means over the seeds in Markdown, a row for each architecture."""
    columns = [*next(iter(rows.values()))]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in dict.fromkeys(key.split()[0] for key in rows):
        of_name = [row for key, row in rows.items() if key.split()[0] == name]
        cells = (f"{mean(row[column] for row in of_name):.2f}" for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
