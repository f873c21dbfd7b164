"""Values as Python programs have them: scalars of numpy and torch, data types, one name where a list is usual."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import families, synthetic

import mergekit_slta
from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SltaSettings


@pytest.mark.parametrize(
    "values",
    [
        {"samples": np.int64(4), "ridge": np.float32(0.5), "balance": np.bool_(False)},
        {"samples": torch.tensor(4), "ridge": torch.tensor(0.5), "balance": torch.tensor(False)},
    ],
    ids=["numpy", "torch"],
)
def test_scalars_are_numbers(values: dict[str, Any]) -> None:
    models = [{"model": Path("org/math"), "parameters": {"calibration": Path("math.jsonl")}}]
    content = {"merge_method": "slta", "base_model": "org/base", "models": models, "parameters": values}
    made = Recipe(content | {"dtype": torch.float32, "out_dtype": torch.bfloat16})
    assert made.settings == SltaSettings(ridge=0.5, balance=False)
    assert [task.samples for task in made.tasks] == [4]
    assert (made.config.dtype, made.config.out_dtype) == ("float32", "bfloat16")


def test_arrays_are_gradients() -> None:
    gradients = {"lambda": np.array([0.25, 0.5]), "density": [{"value": torch.tensor(0.5)}]}
    made = families.recipe_of("org/base", {"org/math": {}}, "sftm", **gradients)
    assert made.content["parameters"] == {"lambda": [0.25, 0.5], "density": [{"value": 0.5}]}


@pytest.mark.parametrize("call", [mergekit_slta.measure, mergekit_slta.check, mergekit_slta.merge])
def test_what_is_no_recipe_is_refused(call: Callable[..., Any]) -> None:
    for wrong, kind in (({"merge_method": "slta"}, "dict"), (3, "int")):
        with pytest.raises(SltaError, match=f"'recipe' is of type {kind}: give a Recipe or its file"):
            call(wrong, *["out"] * (call is mergekit_slta.merge))


@pytest.mark.parametrize("number", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_functions_take_their_numbers_within_limits(number: Callable[[float], Any]) -> None:
    statistics = synthetic.statistics(["a", "b"], ["layer"], samples=4)
    found = statistics.solve(ridge=number(0.5), samples=number(3), balance=number(0.0), task_weights={"a": number(2.0)})
    expected = statistics.solve(ridge=0.5, samples=3, balance=False, task_weights={"a": 2})
    assert found.to_json() == expected.to_json()
    with pytest.raises(SltaError, match=re.escape("'keep_weight' is -1.0")):
        statistics.solve(keep_weight=number(-1.0))
    calls: list[Any] = [mergekit_slta.ask, mergekit_slta.evaluate, mergekit_slta.linearity]
    for call in calls:
        with pytest.raises(SltaError, match="'samples' is -1: give a whole number from 1 on"):
            call("model", *["a.jsonl"] * (call is not mergekit_slta.linearity), samples=number(-1))
    with pytest.raises(SltaError, match="'max_new_tokens' is 0: give"):
        mergekit_slta.ask("model", "a.jsonl", max_new_tokens=number(0))
