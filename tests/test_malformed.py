"""Malformed input ends in one sentence that names the file, the line or the tensor, and the fix.

Hypothesis puts any value at all in the place of a parameter, a template or an entry of metadata, and shows the smallest
that fails; ``PROPERTY_EXAMPLES`` says how many it takes. The generators of ``support/malformed.py`` know what breaks
readers, and are many times faster: the long run (``-m slow``) takes 100,000 of their inputs; ``MALFORMED_CASES``
multiplies it.

docs/robustness.md says what the user sees of each kind of input, and which test holds it.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from safetensors.torch import save
from support import malformed
from support.malformed import KINDS, NOT_OURS, Scene, wrong_with
from support.seeds import failures

from mergekit_slta.data.records import record_text
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SETTINGS, parameter_specs
from mergekit_slta.slta.statistics import METADATA_KEY, Statistics

QUICK = {"recipe": 60, "data": 150, "template": 2000, "statistics": 150}
LONG = {"recipe": 15_000, "data": 15_000, "template": 60_000, "statistics": 15_000}
TIMES = float(os.environ.get("MALFORMED_CASES", "1"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    malformed.silence()
    return malformed.set_scene(tmp_path_factory.mktemp("malformed"))


@pytest.mark.parametrize("kind", KINDS)
def test_malformed(kind: str, scene: Scene) -> None:
    assert failures(partial(malformed.describe, scene, kind), range(QUICK[kind])) == {}


# Any value at all

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
PARAMETERS = [(method, spec) for method, kind in SETTINGS.items() for spec in parameter_specs(kind)]
TEMPLATES = st.lists(st.sampled_from(["{", "}", "[", "]", ".", ":", "!", "a", "0"]) | st.text(max_size=3)).map("".join)

any_value = settings(
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "150")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@any_value
@given(place=st.sampled_from(PARAMETERS), value=VALUES)
def test_any_value_of_a_parameter(place: tuple[str, ParameterSpec], value: Any) -> None:
    method, spec = place
    needed = {"calibration": "data.jsonl"} if "calibration" in SETTINGS[method].expert.model_fields else {}
    own, shared = ({}, {spec.name: value}) if spec.scope is ParameterScope.SHARED else ({spec.name: value}, {})
    models = [{"model": "org/a", "parameters": needed | own}, {"model": "org/b", "parameters": needed}]
    content = {"merge_method": method, "base_model": "org/base", "models": models, "parameters": shared}
    text = yaml.safe_dump(content, allow_unicode=True)
    assert wrong_with(lambda: " ".join(Recipe.parse(text, "recipe.yml").problems), (spec.name, "recipe.yml")) is None


@any_value
@given(template=TEMPLATES, record=st.dictionaries(st.sampled_from(["a", "a0", "text"]) | st.text(), VALUES, max_size=3))
def test_any_template_and_any_record(template: str, record: dict[str, Any]) -> None:
    def fill() -> str:
        text, *_ = record_text(record, template, where="Line 1 of 'data.jsonl'", render_chat=str)
        held = repr(record) + template
        assert not [sign for sign in NOT_OURS if sign in text and sign not in held]
        return ""

    assert wrong_with(fill, ("template", "Line 1 of 'data.jsonl'")) is None


@any_value
@given(draw=st.data(), value=VALUES)
def test_any_value_in_the_metadata_of_statistics(draw: st.DataObject, value: Any, scene: Scene) -> None:
    info = scene.statistics["info"]
    name = draw.draw(st.sampled_from(sorted(info)))
    path = scene.folder / "stats.safetensors"
    path.write_bytes(save(scene.statistics["tensors"], metadata={METADATA_KEY: json.dumps(info | {name: value})}))

    def load() -> str:
        found = Statistics.load(path)
        solved = [solved for level in found.info.levels for solved in found.solve(level).submodules.values()]
        assert all(one.alpha.isfinite().all() for one in solved)
        return ""

    assert wrong_with(load, (path.name,)) is None


# Many of what is known to break readers


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_malformed(kind: str, part: int, scene: Scene) -> None:
    seeds = range(QUICK[kind], round(TIMES * LONG[kind]))[part::5]
    assert failures(partial(malformed.describe, scene, kind), seeds) == {}
