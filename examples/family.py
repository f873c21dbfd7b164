"""A tiny model family on which merge methods differ: a base model and three experts that interfere.

Three tasks, each a line ``prompt=answer``. The base model knows a relative of each - counting up by one, copying
letters, translating two invented words - and has seen a few lines of the experts' own. Each expert then learns one
task - adding, reversing and rotating, translating with the words swapped - and forgets the other two. The scores are
exact matches on prompts that neither training nor calibration has seen.

The family of seed 0 is in ``examples/family``, as this script made it. Another seed makes another one, in a minute:

    python examples/family.py OUT --seed 1
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import string
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

ADDENDS = 9
LETTERS = "abcdefgh"
SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
WORDS = 20
HELD_OUT = 3  # one prompt of so many is kept for the evaluation
CALIBRATION_RECORDS = 200
PAD, BOS, UNKNOWN, END = "<pad>", "<bos>", "<unk>", "\n"
IGNORED = -100  # the label that the loss skips
SETTINGS = "family.json"
SHIPPED = Path(__file__).with_name("family")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}

# Tokens and labels of a line or of several.
Row = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Task:
    """Prompts and their answers.

    Attributes:
        prompt: draws a prompt that an expert learns.
        related: draws a prompt that the base model learns, of the same form and by another rule.
        answer: the rule, which the prompt's marks decide.
        known: the share of the expert's prompts among the base model's: as large as makes the base model answer a
            quarter to a third of them.
    """

    prompt: Callable[[random.Random], str]
    related: Callable[[random.Random], str]
    answer: Callable[[str], str]
    known: float

    def draw(self, rng: random.Random, own: float = 1.0, *, held_out: bool = False) -> str:
        """A prompt of one side of the split, the expert's with probability ``own``, else a related one."""
        while True:
            prompt = self.prompt(rng) if rng.random() < own else self.related(rng)
            if (zlib.crc32(prompt.encode()) % HELD_OUT == 0) == held_out:
                return prompt


@dataclass(frozen=True)
class Training:
    """How long and how fast the models learn.

    Attributes:
        base_steps, expert_steps: optimizer steps.
        base_rate, expert_rate: highest learning rates.
        batch, length: rows of a batch and tokens of a row.
    """

    base_steps: int = 300
    expert_steps: int = 150
    base_rate: float = 2e-3
    expert_rate: float = 7e-4
    batch: int = 32
    length: int = 64


@dataclass(frozen=True)
class Family:
    """Where a family lies: ordinary Hugging Face folders, and calibration data by task."""

    base: Path
    experts: dict[str, Path]
    calibration: dict[str, Path]


def _dictionary() -> dict[str, str]:
    """Invented words of two syllables and their translations."""
    rng = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < 2 * WORDS:
        words["".join(rng.sample(SYLLABLES, 2))] = None
    invented = list(words)
    return dict(zip(invented[:WORDS], invented[WORDS:], strict=True))


DICTIONARY = _dictionary()


def _add(prompt: str) -> str:
    first, second = prompt.split("+")
    return f"{int(first[:-1]) + int(second[:-1])}{prompt[-1]}"


def _sum(rng: random.Random) -> str:
    unit = rng.choice(LETTERS)
    return f"{rng.randrange(ADDENDS)}{unit}+{rng.randrange(ADDENDS)}{unit}"


def _count_up(rng: random.Random) -> str:
    unit = rng.choice(LETTERS)
    return f"{rng.randrange(2 * ADDENDS - 2)}{unit}+1{unit}"


def _letters(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 5)))


def _rearrange(prompt: str) -> str:
    mark, text = prompt[0], prompt[1:]
    return {"<": text[::-1], ">": text[1:] + text[0], "|": text}[mark]


def _two_words(rng: random.Random) -> str:
    return " ".join(rng.choices(list(DICTIONARY), k=2))


def _translate(prompt: str) -> str:
    first, second = (DICTIONARY[word] for word in prompt[1:].split())
    return f"{second} {first}" if prompt[0] == "~" else f"{first} {second}"


TASKS = {
    "sums": Task(prompt=_sum, related=_count_up, answer=_add, known=0.15),
    "strings": Task(
        prompt=lambda rng: rng.choice("<>") + _letters(rng),
        related=lambda rng: "|" + _letters(rng),
        answer=_rearrange,
        known=0.15,
    ),
    "words": Task(
        prompt=lambda rng: "~" + _two_words(rng),
        related=lambda rng: ":" + _two_words(rng),
        answer=_translate,
        known=0.075,
    ),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer with one token per character, which puts ``<bos>`` in front."""
    characters = END + string.digits + string.ascii_lowercase + "+=<>|~: "
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, UNKNOWN, *characters])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=CONFIG["max_position_embeddings"],
    )


def train_family(
    out_dir: str | Path,
    seed: int = 0,
    progress: bool = True,
    *,
    config: Mapping[str, Any] | None = None,
) -> Family:
    """Train a base model and its three experts by one thread, or find them where they were trained before.

    They are saved in bfloat16.

    Args:
        out_dir: folder that gets ``base``, one folder per expert, and ``calibration``.
        seed: of the initialization and of the training data.
        progress: whether to show a progress bar.
        config: entries of the models' configuration that differ from ``CONFIG``, such as
            ``{"model_type": "qwen2", "tie_word_embeddings": True}``.
    """
    folder = Path(out_dir)
    training = Training()
    settings = _settings(seed, training, {**CONFIG, **(config or {})})
    family = family_in(folder)
    if _read(folder / SETTINGS) == settings:
        if progress:
            tqdm.write(
                f"The models in {folder} are of an earlier run and are used again: delete them to train new ones."
            )
        return family
    # The settings are written last: a family without them is not complete.
    (folder / SETTINGS).unlink(missing_ok=True)
    tokenizer = build_tokenizer()
    torch.set_num_threads(1)  # more do not help models of this size, and their number changes the rounding
    steps = training.base_steps + len(TASKS) * training.expert_steps
    with torch.random.fork_rng(devices=[]), tqdm(total=steps, unit="step", disable=not progress) as bar:
        torch.manual_seed(seed)
        base = _build_model(tokenizer, settings["config"])
        _train(base, tokenizer, "base", training, seed, bar)
        _save(base, tokenizer, family.base)
        for task, path in family.experts.items():
            expert = copy.deepcopy(base)
            _train(expert, tokenizer, task, training, seed, bar)
            _save(expert, tokenizer, path)
    for task, path in family.calibration.items():
        write_calibration(path, task, seed)
    write_bytes(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True).encode())
    return family


def family_in(folder: Path) -> Family:
    """The family that was trained into a folder."""
    return Family(
        base=folder / "base",
        experts={task: folder / task for task in TASKS},
        calibration={task: folder / "calibration" / f"{task}.jsonl" for task in TASKS},
    )


def copy_shipped(folder: Path) -> Family:
    """Put a copy of the family of ``examples/family`` into a folder, in place of one that was trained there."""
    (folder / SETTINGS).unlink(missing_ok=True)
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    return family_in(folder)


@torch.inference_mode()
def evaluate(model_folder: str | Path, items: int = 300) -> dict[str, float]:
    """The share of held-out prompts of each task that a model answers exactly, line end included.

    The most likely token is taken at every position of the right answer at once, which finds the same matches as
    generating token by token does.

    Args:
        model_folder: a model with its tokenizer.
        items: prompts per task at most; a third of all prompts of a task are held out.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    vocabulary = AutoTokenizer.from_pretrained(model_folder).get_vocab()
    scores = {}
    for task in TASKS:
        encoded = [_encode(vocabulary, task, prompt) for prompt in held_out_prompts(task, items)]
        length = 1 + max(len(tokens) for tokens, _ in encoded)
        tokens, labels = _stack([_row(vocabulary, [item], length) for item in encoded])
        # Padding is on the right and attention looks to the left only, so that no mask is needed.
        predicted = model(input_ids=tokens).logits[:, :-1].argmax(-1)
        right = (predicted == labels[:, 1:]) | (labels[:, 1:] == IGNORED)
        scores[task] = right.all(1).double().mean().item()
    return scores


def held_out_prompts(task: str, items: int) -> list[str]:
    """Different prompts that no training or calibration data holds, the same in every call."""
    rng = random.Random(f"held out/{task}")
    return list(dict.fromkeys(TASKS[task].draw(rng, held_out=True) for _ in range(4 * items)))[:items]


def write_calibration(path: Path, task: str, seed: int) -> None:
    """Write different prompts of a task with their answers as ``.jsonl``: the text, and its two parts."""
    rng = random.Random(f"calibration/{task}/{seed}")
    prompts: dict[str, None] = {}
    while len(prompts) < CALIBRATION_RECORDS:
        prompts[TASKS[task].draw(rng)] = None
    pairs = [(f"{prompt}=", TASKS[task].answer(prompt) + END) for prompt in prompts]
    records = [{"text": question + answer, "question": question, "answer": answer} for question, answer in pairs]
    write_bytes(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file beside its place, then move it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    os.replace(beside, path)


def _settings(seed: int, training: Training, config: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides what the family's weights are."""
    return {
        "seed": seed,
        "training": asdict(training),
        "config": config,
        "code": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _build_model(tokenizer: PreTrainedTokenizerFast, config: Mapping[str, Any]) -> PreTrainedModel:
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, **ids, vocab_size=len(tokenizer)))


def _train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, name: str, training: Training, seed: int, bar: Any
) -> None:
    """Train the base model on everything, or an expert on its task alone."""
    if name == "base":
        steps, rate = training.base_steps, training.base_rate
        own = {task: TASKS[task].known for task in TASKS}
    else:
        steps, rate = training.expert_steps, training.expert_rate
        own = {name: 1.0}
    rows = _rows(tokenizer.get_vocab(), own, training.length, random.Random(f"train/{name}/{seed}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up))
    )
    model.train()
    bar.set_description(f"Training {name}")
    for _ in range(steps):
        tokens, labels = _stack([next(rows) for _ in range(training.batch)])
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.update()


def _rows(vocabulary: Mapping[str, int], own: Mapping[str, float], length: int, rng: random.Random) -> Iterator[Row]:
    """Endless rows packed with lines of the tasks in ``own``, which gives the share of the experts' prompts."""
    while True:
        lines: list[Row] = []
        while sum(len(tokens) for tokens, _ in lines) < length:
            task = rng.choice(list(own))
            lines.append(_encode(vocabulary, task, TASKS[task].draw(rng, own[task])))
        yield _row(vocabulary, lines, length)


def _encode(vocabulary: Mapping[str, int], task: str, prompt: str) -> Row:
    """One line; only the answer and the line's end are to be learned."""
    question = [vocabulary[character] for character in f"{prompt}="]
    answer = [vocabulary[character] for character in TASKS[task].answer(prompt) + END]
    return question + answer, [IGNORED] * len(question) + answer


def _row(vocabulary: Mapping[str, int], lines: Sequence[Row], length: int) -> Row:
    """Lines one after the other, cut or padded on the right to ``length`` tokens."""
    tokens = [vocabulary[BOS], *(token for line, _ in lines for token in line)][:length]
    labels = [IGNORED, *(label for _, line in lines for label in line)][:length]
    missing = length - len(tokens)
    return tokens + [vocabulary[PAD]] * missing, labels + [IGNORED] * missing


def _stack(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a batch, [rows, length] each."""
    tokens, labels = zip(*rows, strict=True)
    return torch.tensor(tokens), torch.tensor(labels)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    saved: Any = copy.deepcopy(model)
    saved.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Of the initialization and of the training data.")
def main(out: Path, seed: int) -> None:
    """Train a family into the folder OUT: a base model, an expert for each task, and calibration data."""
    transformers.utils.logging.disable_progress_bar()
    train_family(out, seed)


if __name__ == "__main__":
    main()
