"""Recipes to start from: read as they are, and what ``check`` says is missing is what there is to fill in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.families import Family

from mergekit_slta.cli.commands import main
from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.new import METHODS, WITH_DATA, new_recipe
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SETTINGS, SltaSettings, parameter_specs


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("method", SETTINGS)
def test_the_recipe_names_the_models_and_its_method_with_the_defaults(method: str) -> None:
    text = new_recipe("org/base", ["org/math", "org/base+org/adapter"], method)
    recipe = Recipe.parse(text, "this")
    recipe.require_sound()
    assert [str(reference) for reference in recipe.references] == ["org/base", "org/math", "org/base+org/adapter"]
    assert recipe.settings == SETTINGS[method]()
    given = {**recipe.content["models"][0]["parameters"], **recipe.content["parameters"]}
    defaults = {spec.name: spec.default for spec in parameter_specs(SETTINGS[method])}
    assert given == {name: defaults[name] for name in given}
    assert all(len(line) <= 120 for line in text.splitlines())


def test_several_experts_are_merged_by_slta_and_one_by_featcal() -> None:
    assert tuple(SETTINGS) == METHODS
    assert tuple(name for name, settings in SETTINGS.items() if settings.runs_models) == WITH_DATA
    for experts, method in ((["org/math"], "featcal"), (["org/math", "org/code"], "slta")):
        text = new_recipe("org/base", experts)
        recipe = Recipe.parse(text, "this")
        assert recipe.config.merge_method == method
        assert [str(task) for task in recipe.tasks] == [*experts, *["org/base"] * (method == "featcal")]
        assert ("more exact answers: new --method featcal" in text) == (method == "slta")


def test_every_commented_line_is_right_when_it_is_used(tmp_path: Path) -> None:
    for experts in (["org/math"], ["org/math", "org/code"]):
        text = new_recipe("org/base", experts)
        for name in ("template", "statistics", "report"):
            text = text.replace(f"# {name}:", f"{name}:")
        recipe = Recipe.parse(text.replace('calibration: ""', "calibration: math.jsonl"), "this")
        recipe.require_sound()
        expert = recipe.experts[0]
        assert (expert.calibration, expert.template) == ("math.jsonl", "{question} {answer}")
    assert recipe.settings_of(SltaSettings).statistics == "merge.slta.safetensors"


@pytest.mark.parametrize("method", WITH_DATA)
def test_calibration_sources_go_to_the_experts_in_their_order_and_then_to_the_base_model(
    method: str,
) -> None:
    sources = ["math.jsonl", "hf:org/code?split=test", "own.jsonl"]
    options = [f"--calibration={source}" for source in sources]
    text = run("new", "org/base", "org/math", "org/code", "--method", method, *options)
    tasks = Recipe.parse(text, "this").tasks
    expected = list(zip(["org/math", "org/code", "org/base"], sources, strict=True))
    assert [(str(task), task.calibration) for task in tasks] == expected
    without_keep = run("new", "org/base", "org/math", "org/code", "--method", method, *options[:2])
    assert [task.calibration for task in Recipe.parse(without_keep, "this").tasks] == sources[:2]


def test_check_says_what_is_missing_until_it_is_filled_in(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text(run("new", family.base, *family.experts))
    missing = run("check", file, code=1)
    assert "3 problems found" in missing and missing.count("has no 'calibration'") == 3
    assert "once these are mended" not in missing
    content = file.read_text()
    for data in family.data:
        content = content.replace('calibration: ""', f"calibration: {data}", 1)
    file.write_text(content)
    assert "no problem found" in run("check", file)


def test_folders_that_are_there_are_no_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "sums", "adapter"):
        (tmp_path / "family" / name).mkdir(parents=True)
    given = ["family/base", "family/sums", "org/words", "family/base+family/adapter", "./family/sums/../adapter"]
    recipe = Recipe.parse(new_recipe(given[0], given[1:]), "this")
    written = ["./family/base", "./family/sums", "org/words", "./family/base+./family/adapter", given[4]]
    assert [str(reference) for reference in recipe.references] == written
    with pytest.raises(SltaError, match="named twice"):
        new_recipe("org/base", ["family/sums", "./family/sums"])


@pytest.mark.parametrize("name", ["/a b/c: d", "#x/y", "'quoted'/x", "null", "ünï/x"])
def test_names_are_quoted_as_yaml_needs_it(name: str) -> None:
    content = yaml.safe_load(new_recipe(name, ["org/math"]))
    assert content["base_model"] == name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["org/math", "--method", "actmat"], "'actmat' merges several experts: name another one, or choose slta or"),
        (["org/math", "org/code", "--method", "sftm", "--calibration", "hf:a/b"], "'sftm' takes no calibration data"),
        (
            ["org/math", "org/code", "--calibration", "hf:a/b"],
            "--calibration is given once for 2 experts: give it once",
        ),
        (["org/math", *["--calibration", "hf:a/b"] * 3], "--calibration is given 3 times for one expert: give it once"),
        (["org/base"], "A model is named twice"),
        (["org/math", "org/math"], "A model is named twice"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: list[str], sentence: str) -> None:
    assert run("new", "org/base", *arguments, code=1).startswith(f"Error: {sentence}")
