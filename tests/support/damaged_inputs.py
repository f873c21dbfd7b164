"""Damaged files by the thousand: a small scene of a recipe, models, an adapter and statistics, and seeded damage to it.

Each case is decided by its kind and its seed, so that what a long run finds can be repeated alone:
``damaged_inputs.describe(scene, "config.json", 17)``.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from support import families
from support.adapters import write_adapter
from support.copies import pickled, sharded
from support.families import Family
from support.memory import memory_of_this_process

from mergekit_slta.cli.commands import main

PATIENCE = 60  # seconds; the longest case takes a few on an idle machine
MEMORY = 4 * 10**9  # bytes of address space that a command may take above what this process had before
RECIPE, MEASURED = "recipe.yml", "measured.yml"
STATISTICS = "stats.safetensors"
HEADER = 8  # bytes before the header of a safetensors file, which say how long it is

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, float("nan")),
    *(float("inf"), "", " ", "x", "é\u2028\x85", "\x00", "\ud800", "1e5", "NaN", "true", "../..", "x" * 5000, "/"),
    *([], {}, [[]], [None], {"": None}, {"x": [1, {"y": "z"}]}, [1, "a", 2.5], [[[[[[[[]]]]]]]], [0, 0], ["", {}]),
)
TAGS = (
    *("!!int", "!!float", "!!timestamp", "!!binary", "!!set", "!!omap", "!!pairs", "!!bool", "!!null", "!!str", "!own"),
    *("!!python/object/apply:os.getcwd []", "!!map", "!!seq", "!!merge", "!!value", "&a", "*a", "<<:", "?"),
)
SCALARS = (
    *("2020-01-01", "2020-13-45", "2001-12-14t21:59:43.10-05:00", "0x", "0xg", "08", "1:99:99", "=", "<<", "~", "1_0"),
    *("_", "0b2", ".inf", "-.INF", ".nan", "{", "[", "}", "|", ">", "- -", "a: b: c", "%", "@", "`", "\t", '"\\ud800"'),
)


@dataclass(frozen=True)
class Scene:
    """A sound recipe on disk, with everything that it names.

    Attributes:
        folder: where it is.
        cache: where mergekit merges the adapter.
    """

    folder: Path
    cache: Path


def set_scene(folder: Path, family: Family) -> Scene:
    """A base model, one expert in shards, one pickled, and one that is an adapter; and statistics of them."""
    shutil.copytree(family.base, folder / "base")
    sharded(family.experts[0], folder / "sharded")
    pickled(family.experts[1], folder / "pickled")
    write_adapter(family.base, folder / "adapter")
    write_adapter(family.base, folder / "adapter2", seed=1)
    experts = [folder / "sharded", folder / "pickled", f"{folder / 'base'}+{folder / 'adapter'}"]
    content = families.recipe(family, samples=3, max_tokens=8) | {"base_model": str(folder / "base")}
    for entry, expert in zip(content["models"], experts, strict=True):
        entry["model"] = str(expert)
    scene = Scene(folder, folder / "cache")
    families.write_recipe(folder / RECIPE, content)
    assert not run(scene, "calibrate", folder / RECIPE, "-o", folder / STATISTICS)
    content["parameters"]["statistics"] = str(folder / STATISTICS)
    families.write_recipe(folder / MEASURED, content)
    return scene


# Damage, by the kind of the file


def damage_bytes(content: bytes, rng: random.Random, within: int | None = None) -> bytes:
    """Flip, cut, repeat, move, zero or insert bytes, most of them among the first ``within``."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        end = max(1, min(len(data), within or len(data)) if rng.random() < 0.8 else len(data))
        spot, length = rng.randrange(end), rng.choice([1, 2, 4, 8, 64, 1000])
        how = rng.randrange(8)
        if how < 3 and data:
            data[spot % len(data)] ^= 1 << rng.randrange(8)
        elif how == 3:
            del data[spot:]
        elif how == 4:
            del data[spot : spot + length]
        elif how == 5:
            data[spot : spot + length] = bytes(length)
        elif how == 6:
            data[spot:spot] = rng.randbytes(length)
        else:
            other = rng.randrange(max(1, len(data)))
            data[spot:spot] = data[other : other + length]
    return bytes(data)


def damage_value(content: Any, rng: random.Random) -> Any:
    """Put other values in some places of a tree of dictionaries and lists, or take them out, or put in new ones."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = list(_places(content))
        if not places:
            return odd(rng)
        holder, key = rng.choice(places)
        how = rng.randrange(8)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[rng.choice(["", "x", str(key) + "s", "0", "é", "_", str(key).upper()])] = holder.pop(key)
        elif how == 2:
            holder[key] = [holder[key]]
        elif how == 3:
            holder[key] = _elsewhere(rng.choice(places))
        elif how == 4 and isinstance(holder[key], (int, float, str)):
            holder[key] = str(holder[key]) + rng.choice(["0", "x", " ", "\n", "-"])
        elif how == 5 and isinstance(holder[key], (int, float)):
            holder[key] = -holder[key] if rng.random() < 0.3 else holder[key] * rng.choice([0, 2, 3, 1.5, 10**9])
        else:
            holder[key] = odd(rng)
    return content if rng.random() < 0.98 else odd(rng)


def odd(rng: random.Random) -> Any:
    """One of the odd values, a copy because further damage would change it."""
    return copy.deepcopy(rng.choice(ODD))


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        yield content, key
        yield from _places(value)


def _elsewhere(place: tuple[Any, Any]) -> Any:
    holder, key = place
    return json.loads(json.dumps(holder[key])) if (isinstance(holder, list) or key in holder) else None


def damage_json(content: bytes, rng: random.Random) -> bytes:
    """Damage a file of JSON, as values or as text, or nest its first value deeper than a parser can go."""
    how = rng.random()
    if how < 0.02:
        return content.replace(b":", b":" + b"[" * 100_000, 1)
    if how < 0.3:
        return damage_bytes(content, rng)
    return json.dumps(damage_value(json.loads(content), rng)).encode()


def damage_yaml(content: bytes, rng: random.Random) -> bytes:
    """Damage a file of YAML, as values, as text, or with tags and odd scalars before or in place of its values."""
    how = rng.randrange(4)
    if how == 0:
        return damage_bytes(content, rng)
    value = yaml.safe_load(content)
    text = yaml.safe_dump(damage_value(value, rng) if how == 1 else value, sort_keys=False, allow_unicode=True)
    if how == 1:
        return text.encode(errors="surrogatepass")
    lines = text.split("\n")
    for _ in range(rng.choice([1, 1, 2])):
        spot = rng.randrange(len(lines))
        key, colon, rest = lines[spot].partition(": ")
        odd = f"{rng.choice(TAGS)} {rest}" if how == 2 else rng.choice(SCALARS)
        lines[spot] = key + (colon or ": ") + odd if rng.random() < 0.8 else odd
    return "\n".join(lines).encode()


def damage_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Damage a file of tensors: its header's values, or bytes, most of them in the header."""
    end = HEADER + int.from_bytes(content[:HEADER], "little")
    if rng.random() < 0.5:
        return damage_bytes(content, rng, within=end)
    header = json.dumps(damage_value(json.loads(content[HEADER:end]), rng)).encode()
    length = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 2**31, 2**63, len(content), len(header) - 1])
    return length.to_bytes(HEADER, "little") + header + content[end:]


def damage_pickle(content: bytes, rng: random.Random) -> bytes:
    """Damage a pickled checkpoint: bytes, half of the time of its program."""
    return damage_bytes(content, rng, within=rng.choice([4000, len(content)]))


@dataclass(frozen=True)
class Kind:
    """Where damage is done, and how; and what meets it after the check, unless the check has read all of the file."""

    file: str
    damage: Callable[[bytes, random.Random], bytes]
    then: str = ""


KINDS = {
    "recipe": Kind(RECIPE, damage_yaml, "calibrate"),
    "config": Kind("base/config.json", damage_json, "calibrate"),
    "expert's config": Kind("pickled/config.json", damage_json),
    "tokenizer": Kind("base/tokenizer.json", damage_json),
    "expert's tokenizer": Kind("pickled/tokenizer.json", damage_json),
    "tokenizer's config": Kind("base/tokenizer_config.json", damage_json),
    "safetensors": Kind("base/model.safetensors", damage_safetensors, "calibrate"),
    "shard": Kind("sharded/model-00001-of-00006.safetensors", damage_safetensors, "calibrate"),
    "index": Kind("sharded/model.safetensors.index.json", damage_json, "calibrate"),
    "pickled": Kind("pickled/pytorch_model.bin", damage_pickle, "calibrate"),
    "adapter": Kind("adapter/adapter_model.safetensors", damage_safetensors, "calibrate"),
    "adapter's config": Kind("adapter/adapter_config.json", damage_json, "calibrate"),
    "statistics": Kind(STATISTICS, damage_safetensors, "solve"),
}


# What the commands make of it


class TooLong(BaseException):
    """A command did not end."""


@contextmanager
def _limits() -> Iterator[None]:
    """Let a command end in an error after some time, and where it asks for much memory."""

    def end(*_: object) -> None:
        raise TooLong(f"no end after {PATIENCE} seconds")

    before = signal.signal(signal.SIGALRM, end)
    usual, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_of_this_process("VmSize") + MEMORY, most))
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (usual, most))
        signal.signal(signal.SIGALRM, before)


def run(scene: Scene, *arguments: object) -> str:
    """Run a command in this process; returns what it says when it refuses, nothing when it does not.

    Raises:
        BaseException: whatever the command ended in beside a refusal.
    """
    LoaderCache.loaders.clear()
    options = ["--lora-merge-cache", scene.cache, "--quiet"] if arguments[0] != "solve" else ["--quiet"]
    with _limits():
        result = CliRunner().invoke(main, list(map(str, [*arguments, *options])))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    return result.output if result.exit_code else ""


def describe(scene: Scene, name: str, seed: int) -> str | None:
    """Do the damage of a kind and a seed, and undo it; returns what was wrong with how the commands took it."""
    kind = KINDS[name]
    path = scene.folder / kind.file
    sound = path.read_bytes()
    made = scene.folder / "made.safetensors"
    recipe = scene.folder / (MEASURED if kind.file == STATISTICS else RECIPE)
    then = {"calibrate": (recipe, "-o", made), "solve": (path,)}
    try:
        path.write_bytes(kind.damage(sound, random.Random(f"{name} {seed}")))
        said = run(scene, "check", recipe)
        if kind.then and not said:
            said = run(scene, kind.then, *then[kind.then])
        return None if not said or _names_a_thing(said, kind) else f"does not name {kind.file}: {said}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "mergekit_slta" in frame.filename]
        return f"{type(error).__name__}: {str(error)[:150]} (at {', '.join(own[-2:])})"
    finally:
        path.write_bytes(sound)
        for left in (scene.cache, made, made.with_name(f"{made.name}.partial")):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _names_a_thing(said: str, kind: Kind) -> bool:
    """Whether a refusal says where to look: at the file, at the model that it belongs to, or at a key of the recipe."""
    place = Path(kind.file)
    return kind.file == RECIPE or place.name in said or f"/{place.parent}" in said
