"""Recipes to start from: read as they are, and what ``check`` says is missing is what there is to fill in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.families import Family

from mergekit_slta.cli.commands import main
from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.new import new_recipe
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import FeatcalSettings, SltaSettings


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_the_recipe_names_the_models_and_the_defaults() -> None:
    text = new_recipe("org/base", ["org/math", "org/base+org/adapter"])
    recipe = Recipe.parse(text, "this")
    recipe.require_sound()
    assert [str(reference) for reference in recipe.references] == ["org/base", "org/math", "org/base+org/adapter"]
    assert recipe.settings_of(SltaSettings) == SltaSettings()
    assert all(len(line) <= 120 for line in text.splitlines())


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


def test_one_expert_comes_with_prompts_of_the_base_model() -> None:
    recipe = Recipe.parse(new_recipe("org/base", ["org/chat"]), "this")
    assert recipe.settings_of(FeatcalSettings) == FeatcalSettings()
    assert [str(task) for task in recipe.tasks] == ["org/chat", "org/base"]
    assert recipe.keep_weight == 1.0


def test_check_says_what_is_missing_until_it_is_filled_in(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text(run("new", family.base, *family.experts))
    missing = run("check", file, code=1)
    assert "3 problems found" in missing and missing.count("has no 'calibration'") == 3
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


@pytest.mark.parametrize(("base", "experts"), [("a/b", ["a/b"]), ("a/b", ["a/c", "a/c"]), ("a/b", [])])
def test_models_that_make_no_merge_are_refused(base: str, experts: list[str]) -> None:
    with pytest.raises(SltaError, match="named twice|at least one expert"):
        new_recipe(base, experts)
