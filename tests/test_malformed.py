"""Malformed input ends in one sentence that names the file, the line or the tensor, and the fix.

The long run (``-m slow``) takes 100,000 inputs of these kinds; ``MALFORMED_CASES`` multiplies it.

| input | what the user sees | test |
|---|---|---|
| recipe: types, unknown keys, lists, huge numbers, experts twice, the base among them | which key, and the fix | \
``test_malformed[recipe]`` |
| data: marks, line ends, encodings, nested JSON, nulls, damage | which file and line | ``test_malformed[data]`` |
| template: attributes, positions, widths, half a brace | which template | ``test_malformed[template]`` |
| statistics: each metadata field, shapes, NaN, negative diagonals, asymmetry | which file, and what is wrong | \
``test_malformed[statistics]`` |
| damaged configurations, tokenizers, checkpoints, indexes, adapters | which file | ``test_damage.py`` |
| checkpoints with NaN, other shapes or data types, quantized ones | which tensor | ``test_checkpoints`` |
"""

from __future__ import annotations

import os

import pytest
from support import malformed
from support.malformed import KINDS, Scene

QUICK = {"recipe": 60, "data": 150, "template": 2000, "statistics": 150}
LONG = {"recipe": 15_000, "data": 15_000, "template": 60_000, "statistics": 15_000}
TIMES = float(os.environ.get("MALFORMED_CASES", "1"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    malformed.silence()
    return malformed.set_scene(tmp_path_factory.mktemp("malformed"))


def failures(scene: Scene, kind: str, seeds: range) -> dict[int, str]:
    found = {seed: malformed.describe(scene, kind, seed) for seed in seeds}
    return {seed: failure for seed, failure in found.items() if failure}


@pytest.mark.parametrize("kind", KINDS)
def test_malformed(kind: str, scene: Scene) -> None:
    assert failures(scene, kind, range(QUICK[kind])) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_malformed(kind: str, scene: Scene) -> None:
    assert failures(scene, kind, range(QUICK[kind], round(TIMES * LONG[kind]))) == {}
