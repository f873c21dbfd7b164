"""What the prompts that ``featcal`` takes are worth as training data: a real model's merge against training.

    python tests/benchmarks/training.py --model smollm2

Trains the base model, or the mean of the three experts of ``real_model.py`` (seed 0), on 3 or 30 prompts of each task:
all parameters or an adapter of rank 16, on the prompts' answers or on the experts' own probabilities for them. The rate
is the better of two, for 30 prompts, and training ends at the best of the steps ``ENDS``: both by the loss on ``OTHER``
further prompts of each task, which a merge does not need. Written to results/training-MODEL.json: scores on held-out
prompts, processor time, and memory. It proves nothing of larger models, more prompts, or other tasks.
"""

import json
import random
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from common import CACHE, autocast, be_quiet, known_rows, load, mean_state, write_result
from peft import get_peft_model
from real_family import PRETRAINED, SYSTEM, answer_logits, body, evaluate, lora, tokenize, train_family, write_model
from real_tasks import TASKS
from transformers import AutoTokenizer

ROWS, OTHER, BATCH, ENDS = (30, 3), 30, 16, (10, 20, 40, 80, 120)
RATES = {"all parameters": (2e-5, 1e-4), "adapter": (2e-4, 1e-3)}


@click.command()
@click.option("--model", type=click.Choice([*PRETRAINED]), default="smollm2", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "real_model")
def main(model: str, out: Path) -> None:
    """Train in every way, and write the scores after each; those of an earlier run stay."""
    rows = known_rows(f"training-{model}")
    best: dict[tuple[str, ...], Sequence[float]] = {}
    for target, begin, part, count in product(("answers", "probabilities"), ("base", "mean"), RATES, ROWS):
        losses = {}
        for rate in best.get((target, begin, part), RATES[part]):
            label = f"{begin}, {part}, {target}, {count} prompts, rate {rate:g}"
            if label not in rows:
                # A process of its own, for its memory.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    rows[label] = pool.submit(trained, model, out, begin, part, target, count, rate).result()
                write_result(f"training-{model}", rows)
                click.echo(f"{label}: {rows[label]}")
            losses[rate] = rows[label]["loss on further prompts"]
        best.setdefault((target, begin, part), [min(losses, key=lambda rate: losses[rate])])


def trained(model: str, out: Path, begin: str, part: str, target: str, count: int, rate: float) -> dict[str, float]:
    """Train, and score what has the lowest loss on further prompts."""
    be_quiet()
    torch.manual_seed(0)
    folder = out / model / "seed0"
    family = train_family(folder, 0, [*TASKS][:3], model)
    tokenizer = AutoTokenizer.from_pretrained(family.base)
    experts = [load(path, "cpu") for path in family.experts.values()]
    student = load(family.base, "cpu")
    if begin == "mean":
        student.load_state_dict(mean_state(experts))
    if part == "adapter":
        student = get_peft_model(student, lora())
    else:
        student.get_input_embeddings().requires_grad_(PRETRAINED[model].trains_embeddings)
    data, other = [], []
    for task, path in enumerate(family.calibration.values()):
        pairs = [_pair(json.loads(line)) for line in path.read_text().splitlines()]
        ids = tokenize(tokenizer, random.Random(0).sample(pairs, count + OTHER))
        data += [(task, row) for row in ids[:count]]
        other += [(task, row) for row in ids[count:]]
    start = time.process_time()
    probabilities = [_probabilities(experts[task], row) for task, row in data] if target == "probabilities" else []
    del experts
    optimizer = torch.optim.AdamW((p for p in student.parameters() if p.requires_grad), lr=rate, weight_decay=0.0)
    best, kept, seconds = float("inf"), {}, 0.0
    for step, numbers in enumerate(_draws(len(data)), 1):
        with autocast():
            logits, tokens = answer_logits(body(student), [data[number][1] for number in numbers])
        targets = torch.cat([probabilities[number] for number in numbers]) if probabilities else tokens
        torch.nn.functional.cross_entropy(logits.float(), targets).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 5)
        optimizer.step()
        optimizer.zero_grad()
        if step in ENDS:
            seconds, paused = time.process_time() - start, time.process_time()
            loss = mean(_loss(student, [row for t, row in other if t == task]) for task in range(3))
            if loss < best:
                best, ended = loss, {"steps": step, "processor_seconds": round(seconds)}
                kept = {key: p.detach().clone() for key, p in student.named_parameters() if p.requires_grad}
            start += time.process_time() - paused
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    student.load_state_dict(kept, strict=False)
    target_folder = folder / "trained"
    write_model(student.merge_and_unload() if part == "adapter" else student, tokenizer, target_folder)
    instructs = PRETRAINED[model].template is None  # which only instruct models follow
    scores = evaluate(target_folder, family.test, instructions=instructs)
    shutil.rmtree(target_folder)
    return {
        "accuracy": round(mean(scores[task].exact for task in family.test), 3),
        "perplexity": round(scores["ordinary text"].loss, 2),
        **({"instructions": scores["instructions"].exact} if instructs else {}),
        "loss on further prompts": round(best, 4),
        **ended,
        "memory": memory,
    }


def _pair(record: dict[str, Any]) -> tuple[str, str]:
    system, prompt, answer = (message["content"] for message in record["messages"])
    assert system == SYSTEM
    return prompt, answer


@torch.no_grad()
def _probabilities(expert: Any, row: tuple[list[int], list[int]]) -> torch.Tensor:
    """An expert's for each token of an answer [n, vocabulary]."""
    return answer_logits(expert, [row])[0].softmax(1)


@torch.no_grad()
def _loss(model: Any, rows: Sequence[tuple[list[int], list[int]]]) -> float:
    logits, tokens = answer_logits(body(model), rows)
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens))


def _draws(count: int) -> Iterator[list[int]]:
    """The numbers of the rows of each step."""
    generator = random.Random(0)
    for _ in range(ENDS[-1]):
        yield generator.sample(range(count), min(BATCH, count))


if __name__ == "__main__":
    main()
