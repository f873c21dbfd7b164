"""The quickstart's family in other architectures: merged by several methods, and trained on the same prompts.

    python tests/benchmarks/architectures.py
    python tests/benchmarks/architectures.py --only gemma2 --seed 0
    python tests/benchmarks/architectures.py --routers

Trains a base model and three experts of each architecture and seed, and writes the average exact match of each merge on
held-out prompts to results/architectures.json, after every family. Task arithmetic has the best weight of the
quickstart's grid, picked on the held-out prompts themselves. ``trained`` begins with the experts' mean and trains all
of its parameters on as many prompts of the same files, and their answers, for ``STEPS`` steps over all of them, by the
best of ``RATES``, picked on the held-out prompts, too. It proves nothing of large models or of other tasks.

With ``--routers``, results/routers.json has of featcal's merges of mixtures the accuracy, the share of held-out tokens
whose likeliest routed expert is the one that the task's expert chooses, the share of those with the same choice of all
routed experts (means over layers and tasks), and the number of the routed experts' matrices that too few tokens reach
to be solved: a row for each draw of prompts.
"""

import json
import logging
import re
from dataclasses import replace
from itertools import product
from logging.handlers import BufferingHandler
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from common import CACHE, be_quiet, known_rows, load, mean_state, write_result
from family import END, IGNORED, TASKS, Family, evaluate, held_out_prompts, train_family, write_calibration
from quality import score, task_arithmetic
from quickstart import average, merge, recipes
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES = (3, 30)
STEPS, RATES = 100, (1e-4, 3e-4, 1e-3)
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
MIXTURES = {name: each for name, each in ARCHITECTURES.items() if "num_experts_per_tok" in each}
_MANY = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
MIXTURES["qwen3_moe_64"] = {**_HEADS, **_MANY, "model_type": "qwen3_moe"}
DRAWS = range(4)


@click.command()
@click.option("--only", multiple=True, type=click.Choice([*ARCHITECTURES, *MIXTURES]), help="[default: all]")
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1], show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "architectures")
@click.option("--routers", is_flag=True, help="Measure how featcal's merges of mixtures choose routed experts.")
def main(only: tuple[str, ...], seeds: tuple[int, ...], out: Path, routers: bool) -> None:
    """Merge and train a family of each architecture; families that an earlier run has finished stay."""
    be_quiet(threads=1)
    result = "routers" if routers else "architectures"
    known: dict[str, dict[str, Any]] = MIXTURES if routers else ARCHITECTURES
    rows = known_rows(result)
    for seed, name, draw in product(seeds, only or known, DRAWS if routers else [0]):
        if (key := f"{name} {seed} {draw}" if routers else f"{name} {seed}") not in rows:
            folder = out / f"{name}-{seed}"
            family = train_family(folder / "family", seed, config={"model_type": name, **known[name]})
            rows[key] = routing(family, draw, folder) if routers else scores(family, seed, folder)
            write_result(result, rows)
    click.echo(table(rows))


def scores(family: Family, seed: int, folder: Path) -> dict[str, float]:
    """The averages of one family, by merge."""
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
    model.load_state_dict(mean_state(experts))
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


def routing(family: Family, draw: int, folder: Path) -> dict[str, float]:
    """Of featcal's merges with a draw of prompts: how exact they are, and how they choose routed experts."""
    family = replace(family, calibration={task: folder / "draws" / f"{task}.jsonl" for task in TASKS})
    for task, path in family.calibration.items():
        write_calibration(path, task, draw)
    recipe, row = recipes(family, folder, ())["featcal"], dict[str, float]()
    for count in SAMPLES:
        recipe["parameters"]["samples"] = count
        logging.getLogger("mergekit_slta").addHandler(said := BufferingHandler(10**6))
        merged = merge(folder, f"featcal {count}", recipe, 0)
        pairs = [(choices(merged, task), choices(path, task)) for task, path in family.experts.items()]
        row |= {
            f"accuracy {count}": average(evaluate(merged)),
            f"first {count}": mean(float((one == two)[..., 0].double().mean()) for one, two in pairs),
            f"all {count}": mean(float((one.sort()[0] == two.sort()[0]).all(-1).double().mean()) for one, two in pairs),
            f"few {count}": sum(unsolved(record.getMessage()) for record in said.buffer),
        }
    return {column: round(value, 4) for column, value in row.items()}


def unsolved(line: str) -> int:
    """How many matrices of routed experts too few tokens reach, by a line of the log, which names the first three."""
    more = re.search(r"tokens\) and (\d+) more", line)
    return line.count(" tokens)") + (int(more[1]) if more else 0)


@torch.inference_mode()
def choices(path: Path, task: str) -> torch.Tensor:
    """The routed experts [layers, n, k] of the tokens of a task's held-out prompts and answers, the likeliest first."""
    model, tokenizer = load(path, "cpu"), AutoTokenizer.from_pretrained(path)
    texts = [f"{prompt}={TASKS[task].answer(prompt)}{END}" for prompt in held_out_prompts(task, 300)]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    logits = model(**batch, output_router_logits=True).router_logits
    chosen = torch.stack([of_layer.topk(model.config.num_experts_per_tok).indices for of_layer in logits])
    return chosen[:, batch["attention_mask"].flatten() == 1]


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
