"""Damaged files end a command in a sentence, never in a traceback.

The long run (``-m slow``) does 700 cases of each kind, or as many as the environment variable ``DAMAGE_CASES`` says.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
from support import damaged_inputs
from support.damaged_inputs import KINDS, Scene
from support.families import Family
from support.seeds import failures

SHORT, LONG = 6, int(os.environ.get("DAMAGE_CASES", "700"))


@pytest.fixture(scope="module")
def scene(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return damaged_inputs.set_scene(tmp_path_factory.mktemp("scene"), llama)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_said_in_a_sentence(kind: str, scene: Scene) -> None:
    assert failures(partial(damaged_inputs.describe, scene, kind), range(SHORT)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_is_said_in_a_sentence(kind: str, scene: Scene) -> None:
    assert failures(partial(damaged_inputs.describe, scene, kind), range(SHORT, LONG)) == {}
