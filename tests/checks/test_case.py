"""What a recipe under examination opens, and how checks are made that look at each of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import families
from support.adapters import write_adapter
from support.examining import problems, save_random, with_data, with_expert
from support.families import Family

from mergekit_slta.checks.case import Case, attempt, failures, of_decoder, of_models, of_siblings
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder


def case_of(recipe: dict[str, Any]) -> Case:
    return Case(families.experiment(recipe))


def test_a_wrong_value_does_not_hide_what_else_is_wrong(family: Family, tmp_path: Path) -> None:
    wrong, missing = problems(with_data(family, tmp_path / "none.txt", samples="many"))
    assert wrong.startswith("'samples'") and "does not exist" in missing


def test_what_cannot_be_opened_does_not_keep_the_rest_from_it(family: Family, tmp_path: Path) -> None:
    (family.experts[0] / "model.safetensors").unlink()
    other = save_random(families.config_of("llama", num_hidden_layers=4), tmp_path / "other")
    recipe = families.recipe(family)
    recipe["models"][1]["model"] = str(other)
    case = case_of(recipe)
    assert [str(model) for model in case.models] == [str(family.base), str(other), str(family.experts[2])]
    assert [str(expert) for _, expert in case.pairs] == [str(other), str(family.experts[2])]
    assert [str(expert) for _, expert in case.siblings] == [str(family.experts[2])]
    assert str(case.base) == str(family.base)


def test_the_models_that_are_adapters(family: Family, tmp_path: Path) -> None:
    adapter = write_adapter(family.base, tmp_path / "adapter", "q_proj")
    case = case_of(with_expert(family, f"{family.base}+{adapter}"))
    assert [str(model) for model in case.adapted] == [f"{family.base}+{adapter}"]


def test_checks_of_each_of_a_kind(family: Family) -> None:
    case = case_of(families.recipe(family, experts=[0, 1]))
    base, first, second = map(str, family.folders[:3])
    assert of_models(str)(case) == [base, first, second]
    assert of_models(lambda model: None)(case) == []
    assert of_siblings(lambda base, expert: f"{base} {expert}")(case) == [f"{base} {first}", f"{base} {second}"]


def test_a_check_of_layers_is_of_layers_that_are_run(family: Family) -> None:
    def layers(case: Case, decoder: Decoder) -> list[str]:
        return [str(len(decoder))]

    assert of_decoder(layers)(case_of(families.recipe(family))) == [str(families.LAYERS)]
    assert of_decoder(layers)(case_of(families.recipe(family, "sftm", calibration=False))) == []


def test_an_attempt_catches_what_a_user_can_put_right_and_nothing_else() -> None:
    def fail(error: Exception) -> None:
        raise error

    results = [attempt(fail, SltaError("a")), attempt(str, 1), attempt(fail, SltaError("b")), None]
    assert failures(results) == ["a", "b"]
    with pytest.raises(ZeroDivisionError):
        attempt(fail, ZeroDivisionError())
