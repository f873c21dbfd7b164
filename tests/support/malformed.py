"""Malformed input by the hundred thousand, each decided by its kind and its seed, taken in this process.

``malformed.describe(scene, "template", 17)`` repeats one case alone.
"""

from __future__ import annotations

import json
import logging
import random
import string
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save
from support import synthetic
from support.calibration_samples import TURNS, write_tokenizer
from support.damaged_inputs import damage_bytes, damage_safetensors, damage_value, damage_yaml, odd
from transformers import PreTrainedTokenizerBase

from mergekit_slta.data.draw import CalibrationSource
from mergekit_slta.data.records import record_text
from mergekit_slta.data.sources import READERS
from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.statistics import METADATA_KEY, Statistics

CHAT_TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
NOT_OURS = ("<class", "<built-in", "<function", "<method", "object at 0x", "__")  # what no record holds
RECORDS: tuple[dict[str, Any], ...] = (
    {"text": "abc"},
    {"prompt": "a", "completion": "b", "n": 3},
    {"question": "a", "answer": "b", "answers": {"text": ["a", "b"], "a.b": 1}},
    {"messages": TURNS},
    {"instruction": "a", "input": None, "output": 2.5},
)


@dataclass
class Scene:
    """Where the cases are, and what they need."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    statistics: dict[str, Any] = field(default_factory=dict)


def set_scene(folder: Path) -> Scene:
    found = synthetic.statistics(["org/a", "org/b"], ["layer", "attn_mlp"], layers=2, samples=2)
    path = folder / "sound.safetensors"
    found.save(path)
    content = path.read_bytes()
    info = found.info.model_dump(mode="json", exclude_none=True)
    grams = {f"gram/{name}": gram for name, gram in found.grams.items()}
    sound = {"content": content, "info": info, "tensors": grams | {"task": found.task, "tokens": found.tokens}}
    return Scene(folder, write_tokenizer(folder / "tokenizer", CHAT_TEMPLATE), sound)


# Recipes


def recipe(rng: random.Random, scene: Scene) -> str:
    """A recipe with wrong keys and values; returns what was said of it."""
    method = rng.choice(["slta", "slta", "featcal", "actmat", "sftm"])
    own = {"calibration": "data.jsonl"} if method in ("slta", "featcal") else {"weight": 0.5}
    models: list[dict[str, Any]] = [{"model": name, "parameters": dict(own)} for name in ("org/a", "org/b")]
    content: dict[str, Any] = {"merge_method": method, "base_model": "org/base", "models": models}
    content |= {"parameters": {"ridge": 0.1}, "dtype": "float32"}
    names = ["level", "samples", "max_tokens", "seed", "balance", "ridge", "edges", "batch_tokens", "statistics"]
    names += ["report", "scratch", "anchor", "head", "towers", "lambda", "rank", "scale", "density", "x"]
    for _ in range(rng.choice([1, 1, 2, 4])):
        how = rng.randrange(8)
        entry = rng.choice([entry for entry in models if "parameters" in entry])
        if how == 0:
            models.append(json.loads(json.dumps(entry)))  # twice
        elif how == 1:
            models.append({"model": "org/base"})
        elif how == 2:
            content["parameters"][rng.choice(names)] = odd(rng)
        elif how == 3:
            entry["parameters"][rng.choice([*names, "calibration", "template", "weight"])] = odd(rng)
        elif how == 4:
            content["parameters"][rng.choice(names)] = [odd(rng) for _ in range(rng.randrange(4))]
        elif how == 5:
            filters = [{"filter": rng.choice(["mlp", "", "x"]), "value": odd(rng)} for _ in range(2)]
            content["parameters"][rng.choice(names)] = filters
        elif how == 6:
            content[rng.choice([*names, "slices", "modules", "chat_template", "tokenizer", "Models"])] = odd(rng)
        else:
            content = damage_value(content, rng)
            break
    try:
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=rng.random() < 0.5)
    except UnicodeEncodeError:
        text = json.dumps(content)
    if rng.random() < 0.3:
        text = damage_yaml(text.encode(errors="surrogatepass"), rng).decode(errors="replace")
    found = Recipe.parse(text, "recipe.yml")
    try:
        known = found.method
    except SltaError as error:
        return error.format_message()
    assert known
    said = SltaError(*found.problems).format_message()
    found.reading  # noqa: B018  which the checks read on with
    return said


# Data


def data(rng: random.Random, scene: Scene) -> str:
    """A file of records that is no sound one; its samples are drawn."""
    kind = rng.choice([".jsonl", ".jsonl", ".json", ".csv", ".txt", ".parquet"])
    records = [dict(rng.choice(RECORDS)) for _ in range(rng.randrange(5))]
    for _ in range(rng.choice([0, 1, 2])):
        if records:
            records[rng.randrange(len(records))] = rng.choice([damage_value(rng.choice(RECORDS), rng), odd(rng)])
    newline = rng.choice(["\n", "\n", "\r\n", "\r", "\n\n", " "])
    lines = [json.dumps(record, ensure_ascii=rng.random() < 0.5) for record in records]
    text = newline.join(lines)
    if kind == ".json":
        text = rng.choice([f"[{','.join(lines)}]", text, json.dumps({"data": records}), json.dumps(odd(rng))])
    elif kind in (".csv", ".txt"):
        text = newline.join(["text,b", *(f'"{line[:20]}",{odd(rng)}' for line in lines)])
    encoding = rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"])
    content = text.encode(encoding, errors="surrogatepass" if encoding.startswith("utf") else "replace")
    if rng.random() < 0.4:
        content = damage_bytes(content, rng)
    path = scene.folder / f"data{kind}"
    path.write_bytes(content)
    template = rng.choice(["", "", "", "{text}", "{prompt} {completion}"])
    source = CalibrationSource(str(path), template, scene.tokenizer, lambda: scene.tokenizer, 16, 0)
    drawn = source.draw(3)
    assert drawn.token_ids and all(drawn.token_ids)
    return ""


# Templates

PIECES = (
    *(
        "{",
        "}",
        "{{",
        "}}",
        "{text}",
        "{n}",
        "{answers}",
        "{answers[text][0]}",
        "{answers[a.b]}",
        "{0}",
        "{}",
        "{text!r}",
    ),
    *(
        "{text.__class__}",
        "{text.__class__.__mro__}",
        "{0.__class__}",
        "{n.real}",
        "{answers.keys}",
        "{text[__class__]}",
    ),
    *("{answers[__class__]}", "{text:>9999999999}", "{n:{n}}", "{text:{text.__class__}}", "{text!x}", "{n:.99999999f}"),
    *("{text[0]}", "{text[-1]}", "{text[99]}", "{messages[0][content]}", "{messages[0].content}", "{ text }", "{téxt}"),
    *("{a{b}}", "{text:%Y}", "{text:\x00}", "\x1b[31m", "{text:{n:{n}}}", "{__import__('os')}", "{text[}", "{text]}"),
)


def template(rng: random.Random, scene: Scene) -> str:
    """A template that reaches beyond the record, or that is no sound one."""
    parts = [rng.choice(PIECES) for _ in range(rng.choice([1, 1, 2, 3]))]
    if rng.random() < 0.3:
        parts = ["".join(rng.choices(string.punctuation + "textn0", k=rng.randrange(1, 12)))]
    record = damage_value(rng.choice(RECORDS), rng) if rng.random() < 0.3 else dict(rng.choice(RECORDS))
    if not isinstance(record, dict):
        return ""
    wanted = "".join(parts)
    text, *_ = record_text(record, wanted, where="Line 1 of calibration file 'data.jsonl'", render_chat=str)
    held = json.dumps(record) + wanted
    leaked = [sign for sign in NOT_OURS if sign in text and sign not in held]
    assert not leaked, f"{wanted!r} reads {text[:200]!r}"
    return ""


# Statistics


def statistics(rng: random.Random, scene: Scene) -> str:
    """A statistics file with a wrong entry in its metadata, wrong tensors or damaged bytes; it is loaded and solved."""
    path = scene.folder / "stats.safetensors"
    info, tensors = scene.statistics["info"], dict(scene.statistics["tensors"])
    how = rng.randrange(4)
    if how == 0:
        path.write_bytes(damage_safetensors(scene.statistics["content"], rng))
    else:
        if how == 1:
            info = damage_value(info, rng)
        elif how == 2:
            name = rng.choice(list(info))
            info = info | {name: odd(rng)}
        if how == 3 or rng.random() < 0.2:
            for _ in range(rng.choice([1, 2])):
                name = rng.choice(list(tensors))
                changed = _changed(tensors.pop(name), rng)
                if changed is not None:
                    tensors[name if rng.random() < 0.9 else rng.choice(["x", "gram/", "gram/layer.9", "gram/../x"])] = (
                        changed
                    )
        path.write_bytes(save(tensors, metadata={METADATA_KEY: json.dumps(info)}))
    found = Statistics.load(path)
    for level in found.info.levels:
        for solved in found.solve(level).submodules.values():
            assert solved.alpha.isfinite().all(), "a merging weight is not finite"
    return ""


def _changed(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor | None:
    tensor = tensor.clone()
    how = rng.randrange(10)
    if how == 0:
        return None
    if how == 1:
        return tensor[:1].clone()
    if how == 2:
        return tensor.to(rng.choice([torch.float32, torch.int64, torch.float64, torch.bool, torch.bfloat16]))
    if how == 3:
        return tensor.flatten()
    if not tensor.is_floating_point():
        tensor[rng.randrange(len(tensor))] = rng.choice([-1, 0, 7, 2**62])
        return tensor
    spot = tuple(rng.randrange(size) for size in tensor.shape)
    values = torch.tensor([torch.nan, torch.inf, -1.0, 0.0, 1e308, 5e-324, 1e-160, -1e-30], dtype=torch.float64)
    tensor[spot] = rng.choice(values)
    if how > 6 and tensor.ndim == 3:
        tensor[spot[0]] = tensor[spot[0]].T.clone() if how == 7 else tensor[spot[0]] * rng.choice([-1.0, 1e300, 1e-320])
        if how == 9:
            row, column = rng.sample(range(tensor.shape[1]), 2)
            tensor[spot[0], row, column] = tensor[spot[0], column, row] = rng.choice(values)
    return tensor


# What is made of it


Case = Callable[[random.Random, Scene], str]
KINDS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "recipe": (recipe, ()),
    "data": (data, tuple(f"data{extension}" for extension in READERS)),
    "template": (template, ("template",)),
    "statistics": (statistics, ("stats.safetensors",)),
}


def describe(scene: Scene, kind: str, seed: int) -> str | None:
    """Take an input of a kind and a seed; returns what was wrong with how it was taken."""
    case, names = KINDS[kind]
    return wrong_with(lambda: case(random.Random(f"{kind} {seed}"), scene), names)


def wrong_with(case: Callable[[], str], names: tuple[str, ...]) -> str | None:
    """What is wrong with how a case ends: neither well nor in sentences of printable text that hold one of the names.

    Args:
        case: returns what was said, "" for nothing, or raises an SltaError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = case()
    except SltaError as error:
        said = error.format_message()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if names and said and not any(name in said for name in names):
        return f"names nothing: {said[:300]}"
    for line in said.splitlines():
        if not line.rstrip().endswith((".", "?")):
            return f"is no sentence: {said[:300]}"
    return None if all(c.isprintable() or c in "\n\t" for c in said) else f"is not printable: {said[:300]!r}"


def silence() -> None:
    """The warnings about every input would be longer than all else."""
    logging.getLogger("mergekit_slta").setLevel(logging.ERROR)
