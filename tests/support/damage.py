"""Seeded damage to the files that a recipe names: to their bytes, and to the values of JSON and YAML."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import yaml

HEADER = 8  # bytes before the header of a safetensors file, which say how long it is
ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 7, 2**31, 2**64, -(10**30), 0.5, 1e308, float("nan"), float("inf")),
    *("", " ", "é\u2028\x85", "\x00", "1e5", "true", "../..", "x" * 5000, [], {}, [[]], [None], {"": None}, [1, "a"]),
)
SCALARS = (
    *("2020-13-45", "0xg", "1:99:99", "<<", "~", ".nan", "{", "]", "|"),
    *("- -", "a: b: c", "*a", "!own x", "\t", "`"),
)


def damage_bytes(content: bytes, rng: random.Random, within: int | None = None) -> bytes:
    """Flip, cut, zero or insert bytes, most of them among the first ``within``."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        end = max(1, min(len(data), within or len(data)) if rng.random() < 0.8 else len(data))
        spot, length = rng.randrange(end), rng.choice([1, 4, 64, 1000])
        how = rng.randrange(5)
        if how < 2 and data:
            data[spot % len(data)] ^= 1 << rng.randrange(8)
        elif how == 2:
            del data[spot:]
        elif how == 3:
            data[spot : spot + length] = bytes(length)
        else:
            data[spot:spot] = rng.randbytes(length)
    return bytes(data)


def damage_value(content: Any, rng: random.Random) -> Any:
    """Take values out of a tree of dictionaries and lists, rename their keys, or put odd values in their places."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = list(_places(content))
        if not places:
            return copy.deepcopy(rng.choice(ODD))
        holder, key = rng.choice(places)
        how = rng.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[f"{key}s"] = holder.pop(key)
        elif how == 2:
            holder[key] = [holder[key]]
        elif how == 3 and isinstance(holder[key], (int, float)):
            holder[key] = holder[key] * rng.choice([0, -1, 2, 1.5, 10**9])
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return content


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        yield content, key
        yield from _places(value)


def damage_json(content: bytes, rng: random.Random) -> bytes:
    """Damage a file of JSON, as values or as text, or nest its first value deeper than a parser can go."""
    how = rng.random()
    if how < 0.05:
        return content.replace(b":", b":" + b"[" * 100_000, 1)
    return damage_bytes(content, rng) if how < 0.3 else json.dumps(damage_value(json.loads(content), rng)).encode()


def damage_yaml(content: bytes, rng: random.Random) -> bytes:
    """Damage a file of YAML, as values, as text, or with odd scalars in place of its values."""
    how = rng.randrange(3)
    if how == 0:
        return damage_bytes(content, rng)
    value = yaml.safe_load(content)
    text = yaml.safe_dump(damage_value(value, rng) if how == 1 else value, sort_keys=False, allow_unicode=True)
    if how == 2:
        lines = text.split("\n")
        spot = rng.randrange(len(lines))
        lines[spot] = f"{lines[spot].partition(': ')[0]}: {rng.choice(SCALARS)}"
        text = "\n".join(lines)
    return text.encode()


def damage_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Damage a file of tensors: its header's values, or bytes, most of them in the header."""
    end = HEADER + int.from_bytes(content[:HEADER], "little")
    if rng.random() < 0.5:
        return damage_bytes(content, rng, within=end)
    header = json.dumps(damage_value(json.loads(content[HEADER:end]), rng)).encode()
    length = len(header) if rng.random() < 0.9 else rng.choice([0, 2**31, 2**63, len(content)])
    return length.to_bytes(HEADER, "little") + header + content[end:]


def damage_records(content: bytes, rng: random.Random) -> bytes:
    """Damage a file of JSON lines: a record, the encoding, or bytes."""
    lines = content.split(b"\n")
    spot = rng.randrange(len(lines) - 1)
    lines[spot] = json.dumps(damage_value(json.loads(lines[spot]), rng)).encode()
    damaged = b"\n".join(lines)
    how = rng.randrange(3)
    return damage_bytes(content, rng) if how == 0 else damaged.decode().encode("utf-16") if how == 1 else damaged


KINDS = {
    "recipe": ("recipe.yml", damage_yaml),
    "config": ("base/config.json", damage_json),
    "expert's config": ("pickled/config.json", damage_json),
    "tokenizer": ("base/tokenizer.json", damage_json),
    "tokenizer's config": ("base/tokenizer_config.json", damage_json),
    "weights": ("base/model.safetensors", damage_safetensors),
    "shard": ("sharded/model-00001-of-00006.safetensors", damage_safetensors),
    "index": ("sharded/model.safetensors.index.json", damage_json),
    "pickled": ("pickled/pytorch_model.bin", damage_bytes),
    "adapter": ("adapter/adapter_model.safetensors", damage_safetensors),
    "adapter's config": ("adapter/adapter_config.json", damage_json),
    "records": ("task0.jsonl", damage_records),
    "statistics": ("stats.safetensors", damage_safetensors),
}
