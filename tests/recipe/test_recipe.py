"""Recipes as text: what they name, and what is wrong with their parameters; no model is there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.recipe import Recipe, require_calibration
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
        {"model": "org/code", "parameters": {"calibration": "code.jsonl", "template": "{q}", "samples": 9}},
        {"model": "org/base", "parameters": {"calibration": "chat.jsonl"}},
    ]
    content = {"merge_method": "slta", "base_model": "org/base", "models": models, "out_dtype": "bfloat16"}
    made = Recipe(content | {"parameters": {"level": "layer", "samples": "4", "template": "{a}"}, "dtype": "float32"})
    (tmp_path / "recipe.yml").write_text(made.text)
    for found in (made, Recipe.load(tmp_path / "recipe.yml")):
        assert found.settings == SltaSettings(level="layer")
        assert [(str(task), task.calibration, task.template, task.samples) for task in found.tasks] == [
            ("org/math", "math.jsonl", "{a}", 4),
            ("org/code", "code.jsonl", "{q}", 9),
            ("org/base", "chat.jsonl", "{a}", 4),
        ]
        assert str(found.base) == "org/base"
        assert (found.config.dtype, found.config.out_dtype) == ("float32", "bfloat16")
    assert repr(made) == made.text.rstrip()


def test_the_base_model_takes_no_prompts_from_the_recipes_own_parameters() -> None:
    shared = content(parameters={"calibration": "all.jsonl", "evaluation": "test.jsonl", "samples": 5})
    shared["models"].append({"model": "org/base", "parameters": {"weight": 2.0}})
    keep = Recipe(shared).keep
    assert keep is not None and (keep.calibration, keep.evaluation, keep.samples) == ("", "", 5)


def test_a_merged_table_may_repeat_the_keys_of_the_one_that_it_extends() -> None:
    text = "merge_method: ties\nbase_model: a\nmodels:\n- &one {model: b, parameters: {}}\n- {<<: *one, model: c}"
    assert [str(reference) for reference in Recipe.parse(text, "r").references] == ["a", "b", "c"]


def test_a_method_of_mergekits_own_has_no_settings_here() -> None:
    assert [str(reference) for reference in Recipe(content("ties")).references] == ["org/base", "org/math", "org/code"]
    for name, said in (("ties", "sftm; name a recipe for one"), ("feat_cal", "did you mean 'featcal'")):
        with pytest.raises(SltaError, match=said):
            Recipe(content(name)).settings  # noqa: B018


SHARED, OWN = "in the recipe's parameters", "in the parameters of org/math"
FAULTS = [
    (content(parameters={"sample": 3}), f"Unknown parameter 'sample' {SHARED}, did you mean 'samples'?"),
    (content(parameters={"zzz": 1}), f"Unknown parameter 'zzz' {SHARED}; the known ones are balance,"),
    (content(parameters={"samples": 0}), f"'samples' {SHARED} should be greater than or equal to 1, not 0."),
    (content("actmat", parameters={"ridge": 1e-5}), f"'ridge' {SHARED} should be greater than or equal to 0.0001"),
    (content(parameters={"samples": True}), f"'samples' {SHARED} should be a number, not True."),
    (content(parameters={"balance": "perhaps"}), f"'balance' {SHARED} should be true or false, not 'perhaps'."),
    (content(parameters={"ridge": "nan"}), f"'ridge' {SHARED} should be a finite number"),
    (content("featcal", parameters={"ridge": 1e-5}), f"'ridge' {SHARED} should be greater than or equal to 0.0003"),
    (content(parameters={"level": [{"value": "layer"}]}), f"'level' {SHARED} must be one value for the whole merge"),
    (
        content("sftm", parameters={"density": [{"filter": "mlp", "value": [0.1, 3]}, {"value": 0.2}]}),
        f"'density' {SHARED} should be less than or equal to 1, not 3",
    ),
    *(
        (content("sftm", parameters={"rank": own}), f"'rank' {SHARED} is a whole")
        for own in ([1, 8], [{"value": [4, 2]}])
    ),
    (under_expert(calibraton="x"), f"Unknown parameter 'calibraton' {OWN}, did you mean 'calibration'?"),
    (under_expert(zzz=1), f"Unknown parameter 'zzz' {OWN}; the known ones are calibration,"),
    (under_expert(level="layer"), f"'level' {OWN} has no effect: it is one value for the whole merge"),
    (under_expert(weight=2), f"'weight' {OWN} has no effect: the prompts decide how much of each"),
    (under_expert(calibration=["a", "b"]), f"'calibration' {OWN} must be one value"),
    (under_expert(template=3), f"'template' {OWN} should be a valid string, not 3."),
    *((content(name, base_model=None), f"The recipe has no base_model: '{name}' needs") for name in SETTINGS),
    (content(models=[{"model": "org/base"}]), "The recipe has no expert: list a fine-tuned model beside the base"),
    (content(models=content()["models"][:1] * 2), "org/math is listed 2 times: list it once, with all its prompts"),
    (content(level="layer"), "'level' in the recipe has no effect: put it under the recipe's 'parameters'."),
    (content(template="{q}"), "'template' in the recipe has no effect: put it under the model's 'parameters'."),
    (
        content(models=[under_expert()["models"][0] | {"template": "{q}"}]),
        "'template' in the entry of org/math has no effect: put it under the model's 'parameters'.",
    ),
    (content(sample=3), "Unknown key 'sample' in the recipe, did you mean 'samples'?"),
    (content(parametres={"level": "layer"}), "Unknown key 'parametres' in the recipe, did you mean 'parameters'?"),
    (content(tokenizer={"sources": "base"}), "Unknown key 'sources' in 'tokenizer', did you mean 'source'?"),
    (content(dtype="fp32"), "'dtype: fp32' is not a data type for a merge: write bfloat16,"),
    *(
        (
            content(**made),
            "mergekit takes from org/base+org/lora the tokenizer of org/base: write org/lora as the source",
        )
        for made in ({"tokenizer": {"source": "org/base+org/lora"}}, {"tokenizer_source": "org/base+org/lora"})
    ),
    (content(out_dtype="torch.bfloat16"), "'out_dtype: torch.bfloat16' is not a data type for a merge"),
    (content(chat_template="chatlm"), "mergekit does not know 'chat_template: chatlm': write auto, alpaca, "),
]


@pytest.mark.parametrize(("recipe", "sentence"), FAULTS, ids=[sentence[:40] for _, sentence in FAULTS])
def test_a_fault_of_the_text_is_said_in_one_sentence(recipe: dict[str, Any], sentence: str) -> None:
    (problem,) = problems(recipe)
    assert problem.startswith(sentence)


@pytest.mark.parametrize("is_base", [True, False])
def test_a_model_in_another_spelling(is_base: bool, tmp_path: Path) -> None:
    first, second = f"{tmp_path}/own", f"{tmp_path}/./own"
    (tmp_path / "own").mkdir()
    recipe = content(base_model=first) if is_base else content()
    for name in [second] if is_base else [first, second]:
        recipe["models"].append({"model": name, "parameters": {"calibration": f"{name}.txt"}})
    kind = "base model" if is_base else "model"
    assert problems(recipe) == [f"{second} is the {kind} {first}: spell it the same way, or leave it out."]


@pytest.mark.parametrize("method", SETTINGS)
def test_modules_and_slices_are_refused(method: str) -> None:
    recipe = content(method)
    sources = [{**entry, "layer_range": [0, 3]} for entry in [{"model": "org/base"}, *recipe.pop("models")]]
    slices = [{"sources": sources}]
    for parts in ({"slices": slices}, {"modules": {"default": {"slices": slices}}}):
        (problem,) = problems(recipe | parts)
        assert problem == f"'{method}' merges whole models: list them under 'models', not under 'slices' or 'modules'."


def test_a_recipe_of_ties_gets_a_sentence_for_each_parameter_and_one_for_the_prompts() -> None:
    parameters, names = {"density": 0.5, "weight": 0.5}, ["org/a", "org/b", "org/c"]
    models = [{"model": name, "parameters": parameters} for name in names]
    recipe = content(models=models, parameters={"normalize": True, "int8_mask": True})
    own = ["normalize", "int8_mask", "density"]
    for method, more in (("featcal", ["weight", "calibration"]), ("actmat", [])):
        found = problems(recipe | {"merge_method": method})
        assert [problem.split("'")[1] for problem in found] == own + more
        assert all(f"'{method}' does not use it, so delete it." in problem for problem in found[:3])
        assert all("org/a, org/b and org/c" in problem for problem in found[2:])


def test_actmat_reads_the_older_name_of_its_lambda() -> None:
    for name in ("lambda", "scale"):
        assert Recipe(content("actmat", parameters={name: 0.5})).settings.model_dump(by_alias=True)["lambda"] == 0.5
    assert problems(content("sftm", parameters={"scale": 0.5}))[0].startswith("Unknown parameter 'scale'")


def test_two_experts_with_the_same_source(tmp_path: Path) -> None:
    recipe = content()
    for entry, spelling in zip(recipe["models"], ("task.jsonl", "./task.jsonl"), strict=True):
        entry["parameters"]["calibration"] = f"{tmp_path}/{spelling}"
    (problem,) = said(lambda: require_calibration(Recipe(recipe)))
    assert problem.startswith("The experts org/math and org/code have the same calibration source")
    assert problem.endswith("with equal data every merging weight of slta is one over the number of experts.")
