"""Recipes as text: what they name, and what is wrong with their parameters; no model is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mergekit.common import ModelReference

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.configuration import expert_parameters
from mergekit_slta.recipe.recipe import Recipe, Task, require_calibration
from mergekit_slta.recipe.settings import SETTINGS, SltaSettings


def content(method: str = "slta", **changes: Any) -> dict[str, Any]:
    """A sound recipe for two experts, with changed top-level keys."""
    models: list[dict[str, Any]] = [{"model": name} for name in ("org/math", "org/code")]
    if method in SETTINGS and SETTINGS[method].runs_models:
        models = [{**entry, "parameters": {"calibration": f"{entry['model'][4:]}.jsonl"}} for entry in models]
    return {"merge_method": method, "base_model": "org/base", "models": models} | changes


def problems(recipe: dict[str, Any]) -> list[str]:
    return said(Recipe(recipe).require_sound)


def said(check: Callable[[], object]) -> list[str]:
    """The sentences in which something is refused; none if it is not."""
    try:
        check()
    except SltaError as error:
        return list(error.sentences)
    return []


def under_expert(**parameters: Any) -> dict[str, Any]:
    return content(models=[{"model": "org/math", "parameters": {"calibration": "math.jsonl", **parameters}}])


def test_reads_what_the_recipe_names() -> None:
    recipe = content()
    assert problems(recipe) == []
    found = Recipe(recipe | {"parameters": {"template": "{q}", "samples": "7"}})
    assert found.base == ModelReference.parse("org/base")
    assert found.experts == tuple(
        Task(ModelReference.parse(f"org/{task}"), f"{task}.jsonl", "{q}") for task in ("math", "code")
    )
    assert found.settings == SltaSettings(samples=7)


def test_of_a_recipe_with_wrong_parameters_nothing_can_be_used() -> None:
    recipe = content(parameters={"samples": "many", "seed": 4, "sampels": 3})
    recipe["models"][0]["parameters"]["calibration"] = 5
    found = Recipe(recipe)
    for name in ("base", "experts", "settings"):
        with pytest.raises(SltaError) as caught:
            getattr(found, name)
        assert caught.value.sentences == tuple(problems(recipe)) and len(problems(recipe)) == 3


def test_a_recipe_made_in_python_is_the_one_in_yaml(tmp_path: Path) -> None:
    models = [
        {"model": "org/math", "parameters": {"calibration": Path("math.jsonl")}},
        {"model": "org/code", "parameters": {"calibration": "code.jsonl", "template": "{q}"}},
    ]
    content = {"merge_method": "slta", "base_model": "org/base", "models": models, "out_dtype": "bfloat16"}
    made = Recipe(content | {"parameters": {"level": "layer", "samples": 4}, "dtype": "float32"})
    (tmp_path / "recipe.yml").write_text(made.text)
    for found in (made, Recipe.load(tmp_path / "recipe.yml")):
        assert found.settings == SltaSettings(level="layer", samples=4)
        assert [(str(e), e.calibration, e.template) for e in found.experts] == [
            ("org/math", "math.jsonl", ""),
            ("org/code", "code.jsonl", "{q}"),
        ]
        assert str(found.base) == "org/base"
        assert (found.config.dtype, found.config.out_dtype) == ("float32", "bfloat16")
    assert repr(made) == made.text.rstrip()


def test_a_merged_table_may_repeat_the_keys_of_the_one_that_it_extends() -> None:
    text = "merge_method: ties\nbase_model: a\nmodels:\n- &one {model: b, parameters: {}}\n- {<<: *one, model: c}"
    assert [str(reference) for reference in Recipe.parse(text, "r").references] == ["a", "b", "c"]


def test_a_method_of_mergekits_own_has_no_settings_here() -> None:
    found = Recipe(content("ties"))
    assert [str(reference) for reference in found.references] == ["org/base", "org/math", "org/code"]
    with pytest.raises(SltaError, match="'ties': this command knows slta, featcal, actmat, sftm"):
        found.settings  # noqa: B018


def test_a_misspelt_method_gets_a_suggestion() -> None:
    with pytest.raises(SltaError, match="merge_method is 'feat_cal', did you mean 'featcal'"):
        Recipe(content("feat_cal")).settings  # noqa: B018


def test_an_experts_own_parameter_comes_before_the_shared_one() -> None:
    recipe = under_expert(template="{own}") | {"parameters": {"template": "{all}"}}
    (parameters,) = expert_parameters(Recipe(recipe).config).values()
    assert parameters == {"calibration": "math.jsonl", "template": "{own}"}


def test_the_base_model_among_the_models_is_no_expert() -> None:
    recipe = content()
    recipe["models"].insert(1, {"model": "org/base"})
    assert problems(recipe) == []
    assert len(Recipe(recipe).experts) == 2


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"sample": 3}, "Unknown parameter 'sample' in the recipe's parameters, did you mean 'samples'?"),
        ({"samples": 0}, "'samples' in the recipe's parameters should be greater than or equal to 1, not 0."),
        ({"samples": True}, "'samples' in the recipe's parameters should be a number, not True."),
        ({"balance": "perhaps"}, "'balance' in the recipe's parameters should be true or false, not 'perhaps'."),
        ({"edges": "base"}, "Unknown parameter 'edges' in the recipe's parameters"),
        ({"batch_tokens": 40}, "Unknown parameter 'batch_tokens' in the recipe's parameters"),
        ({"anchor": "base"}, "Unknown parameter 'anchor' in the recipe's parameters"),
        ({"head": False}, "Unknown parameter 'head' in the recipe's parameters"),
        ({"towers": "mean"}, "Unknown parameter 'towers' in the recipe's parameters"),
        ({"zzz": 1}, "Unknown parameter 'zzz' in the recipe's parameters; the known ones are balance,"),
        ({"ridge": "nan"}, "'ridge' in the recipe's parameters should be a finite number"),
        ({"level": [{"filter": "mlp", "value": "layer"}]}, "'level' in the recipe's parameters must be one value"),
    ],
)
def test_wrong_shared_parameters(parameters: dict[str, Any], sentence: str) -> None:
    (problem,) = problems(content(parameters=parameters))
    assert problem.startswith(sentence)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        (
            {"calibraton": "x"},
            "Unknown parameter 'calibraton' in the parameters of org/math, did you mean 'calibration'?",
        ),
        (
            {"level": "layer"},
            "'level' in the parameters of org/math has no effect: it is one value for the whole merge",
        ),
        (
            {"zzz": 1},
            "Unknown parameter 'zzz' in the parameters of org/math; the known ones are calibration,",
        ),
        ({"weight": 2}, "'weight' in the parameters of org/math has no effect: the method solves the experts' weights"),
        ({"calibration": ["a", "b"]}, "'calibration' in the parameters of org/math must be one value"),
        ({"template": 3}, "'template' in the parameters of org/math should be a valid string, not 3."),
    ],
)
def test_wrong_parameters_of_an_expert(parameters: dict[str, Any], sentence: str) -> None:
    (problem,) = problems(under_expert(**parameters))
    assert problem.startswith(sentence)


def test_every_value_of_a_gradient_is_checked() -> None:
    density = [{"filter": "mlp", "value": [0.1, 3]}, {"value": 0.2}]
    (problem,) = problems(content("sftm", parameters={"density": density}))
    assert "'density'" in problem and "less than or equal to 1" in problem and "not 3" in problem
    assert "the recipe's parameters" in problem


@pytest.mark.parametrize("method", SETTINGS)
def test_no_base_model(method: str) -> None:
    (problem,) = problems(content(method, base_model=None))
    assert problem.startswith(f"The recipe has no base_model: '{method}' needs")


def test_no_expert() -> None:
    assert problems(content(models=[{"model": "org/base"}])) == [
        "The recipe has no expert: list a fine-tuned model beside the base model."
    ]


def test_a_model_listed_twice() -> None:
    recipe = content()
    recipe["models"].append(recipe["models"][0])
    assert problems(recipe) == ["org/math is listed 2 times: list it once, with all of its records in one file."]


def test_the_base_model_in_another_spelling(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    recipe = content(base_model=str(tmp_path / "base"))
    recipe["models"].append({"model": f"{tmp_path}/./base", "parameters": {"calibration": "x.txt"}})
    assert problems(recipe) == [
        f"{tmp_path}/./base is the base model {tmp_path}/base: spell it the same way, or leave it out."
    ]


def test_modules_and_slices_are_refused_where_whole_models_are_needed() -> None:
    slices = [{"sources": [entry | {"layer_range": [0, 3]} for entry in content()["models"]]}]
    for place, given in (("slices", slices), ("modules", {"default": {"slices": slices}})):
        assert problems(content(models=None) | {place: given}) == [
            f"'slta' merges whole models: list the experts under 'models', not in '{place}'."
        ]


def test_misspelt_parameters_are_found_wherever_they_stand() -> None:
    source = {"model": "org/math", "layer_range": [0, 2], "parameters": {"weigt": 1}}
    base = {"model": "org/base", "layer_range": [0, 2]}
    piece = {"sources": [base, source], "parameters": {"rnk": 1}}
    modules = {"vision": {"slices": [piece], "parameters": {"lamda": 1}}}
    found = problems(content("sftm", models=None, modules=modules, parameters={"densty": 1}))
    assert [problem.split("'")[1] for problem in found] == ["densty", "lamda", "rnk", "weigt"]
    assert [problem.split("'")[-2] for problem in found] == ["density", "lambda", "rank", "weight"]


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (content(level="layer"), "'level' in the recipe has no effect: put it under the recipe's 'parameters'."),
        (content(template="{q}"), "'template' in the recipe has no effect: put it under the model's 'parameters'."),
        (
            content(models=[{"model": "org/math", "calibration": "math.jsonl"}]),
            "'calibration' in the entry of org/math has no effect: put it under the model's 'parameters'.",
        ),
        (content(parametres={"level": "layer"}), "Unknown key 'parametres' in the recipe, did you mean 'parameters'?"),
    ],
)
def test_keys_that_mergekit_drops(recipe: dict[str, Any], sentence: str) -> None:
    assert problems(recipe) == [sentence]


def test_an_expert_without_calibration() -> None:
    recipe = Recipe(content(models=[{"model": "org/math"}]))
    (problem,) = said(lambda: require_calibration(recipe))
    assert problem.startswith("The expert org/math has no 'calibration'")
    require_calibration(recipe, statistics=True)


def test_two_experts_with_the_same_source(tmp_path: Path) -> None:
    recipe = content()
    for entry, spelling in zip(recipe["models"], ("task.jsonl", "./task.jsonl"), strict=True):
        entry["parameters"]["calibration"] = f"{tmp_path}/{spelling}"
    (problem,) = said(lambda: require_calibration(Recipe(recipe)))
    assert problem.startswith("The experts org/math and org/code have the same calibration source")
    assert problem.endswith("with equal data every merging weight of slta is one over the number of experts.")


def test_types_that_mergekit_does_not_know() -> None:
    first, second = problems(content(dtype="fp32", out_dtype="int8"))
    assert first.startswith("'dtype: fp32' is not a data type for a merge: write bfloat16,")
    assert second.startswith("'out_dtype: int8'")


def test_a_chat_template_that_mergekit_refuses_after_the_merge() -> None:
    (problem,) = problems(content(chat_template="chatlm"))
    assert problem.startswith("mergekit does not know 'chat_template: chatlm': write auto, alpaca, ")
    assert not problems(content(chat_template="chatml")) + problems(
        content(chat_template="{{ messages[0]['content'] }}")
    )
