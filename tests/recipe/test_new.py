"""Recipes to start from: read as they are, and what ``check`` says is missing is what there is to fill in."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from support.calibration_samples import BOS, EOS, spelled, write_scripted
from support.command import run
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.new import WITH_DATA, new_recipe
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SETTINGS, parameter_specs


@pytest.mark.parametrize("method", SETTINGS)
def test_the_recipe_names_the_models_and_its_method_with_the_defaults(method: str) -> None:
    options = [] if method == "featcal" else ["--method", method]  # which is the default
    second = "org/code" if method == "actmat" else "org/base+org/adapter"  # which gets another ridge, below
    text = run("new", "org/base", "org/math", second, *options).output
    recipe = Recipe.parse(text, "this")
    recipe.require_sound()
    assert [str(reference) for reference in recipe.references] == ["org/base", "org/math", second]
    assert recipe.settings == SETTINGS[method]()
    given = {**recipe.content["models"][0]["parameters"], **recipe.content["parameters"]}
    assert given.pop("calibration", None) == ("math-answers.jsonl" if method in WITH_DATA else None)
    defaults = {spec.name: spec.default for spec in parameter_specs(SETTINGS[method])}
    assert given == {name: defaults[name] for name in given}
    for name in ("template", "evaluation", "statistics", "report"):  # what is commented out is sound too
        text = text.replace(f"# {name}:", f"{name}:")
    Recipe.parse(text, "this").require_sound()


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_recipes_of_mergekits_own_methods_merge_and_are_scored_by_a_recipe_with_samples(
    method: str, family: Family, tmp_path: Path
) -> None:
    text = run("new", family.base, *family.experts, "--method", method).output
    assert not any(word in text for word in ("check RECIPE", "mergekit-slta ask", "calibration"))
    assert "(mergekit-slta check is not for this method, which is mergekit's own.)" in text
    recipe, other = tmp_path / "recipe.yml", tmp_path / "other.yml"
    recipe.write_text(text)
    run("merge", recipe, tmp_path / "out", "--quiet")
    sources = (f"--calibration={file}" for file in family.data)
    other.write_text(run("new", family.base, *family.experts, *sources).output.replace("samples: 30", "samples: 3"))
    assert re.search(r"^out +\S", run("evaluate", other, tmp_path / "out", "--quiet").output, re.MULTILINE)


@pytest.mark.parametrize("method", WITH_DATA)
def test_calibration_sources_go_to_the_experts_in_their_order_and_then_to_the_base_model(method: str) -> None:
    sources = ["math.jsonl", "hf:org/code?split=test", "own.jsonl"]
    options = [f"--calibration={source}" for source in sources]
    text = run("new", "org/base", "org/math", "org/code", "--method", method, *options).output
    tasks = Recipe.parse(text, "this").tasks
    expected = list(zip(["org/math", "org/code", "org/base"], sources, strict=True))
    assert [(str(task), task.calibration) for task in tasks] == expected
    without_keep = run("new", "org/base", "org/math", "org/code", "--method", method, *options[:2]).output
    assert [task.calibration for task in Recipe.parse(without_keep, "this").tasks] == sources[:2]


def test_the_base_model_is_asked_in_general_and_adapters_need_a_folder(tmp_path: Path) -> None:
    experts = ["org/math", "org/base+org/lora"]
    text = new_recipe("org/base", experts)
    math, lora, base = asks(text)
    assert "--topic" not in (*math, *lora) and lora[-2:] == ["--lora-merge-cache", "./adapters"]
    topics = ["instructions", "chat", "explaining"]
    assert [word for option, word in pairwise(base) if option == "--topic"] == topics
    assert "# Prompts of some topics: --topic with instructions, chat, " in text
    commands = [line for line in text.splitlines() if line.startswith("#   ") and " RECIPE" in line]
    assert len(commands) == 3 and all(" --lora-merge-cache ./adapters " in line for line in commands)
    assert "--lora-merge-cache" not in new_recipe("org/base", experts[:1])


@pytest.mark.parametrize(
    ("experts", "calibration", "asked"),
    [
        (1, ["there.jsonl"], ["base-answers.jsonl"]),
        (1, ["new.jsonl"], ["new.jsonl", "base-answers.jsonl"]),
        (1, ["new.csv", "hf:org/new.jsonl"], []),  # which `ask` does not write
        (1, ["there.jsonl", "new.jsonl"], ["new.jsonl"]),
        (2, ["there.jsonl", "new.jsonl"], ["new.jsonl"]),
        (2, ["there.jsonl", "new.jsonl", "base.jsonl"], ["new.jsonl", "base.jsonl"]),
    ],
)
def test_files_that_do_not_exist_yet_come_with_the_command_that_writes_them(
    experts: int, calibration: list[str], asked: list[str], here: None
) -> None:
    Path("there.jsonl").touch()
    Path("base-answers.jsonl").touch()  # perhaps another model's
    text = new_recipe("org/base", ["org/a", "org/b"][:experts], calibration=calibration)
    assert [command[command.index("-o") + 1] for command in asks(text)] == asked
    sources = [task.calibration for task in Recipe.parse(text, "this").tasks]
    assert sources[: len(calibration)] == calibration and {*asked} <= {*sources}
    offered = "# mergekit-slta ask org/base -o base-answers.jsonl --topic"  # for several experts, as a proposal
    assert (offered in text.replace("#   ", "")) == (experts == len(calibration) == 2)


def asks(text: str) -> list[list[str]]:
    """The ``ask`` commands in a recipe's comments, from the command's name on."""
    lines = [line.removeprefix("#   mergekit-slta ") for line in text.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("ask ")]


def test_models_of_one_name_get_files_of_their_own(here: None) -> None:
    Path("b", "it's here").mkdir(parents=True)
    text = new_recipe("a/base", ["b/base", "c/base", "b/it's here"])
    files = ["base-answers.jsonl", "base2-answers.jsonl", "it's here-answers.jsonl", "base3-answers.jsonl"]
    assert [task.calibration for task in Recipe.parse(text, "this").tasks] == files
    assert [command[command.index("-o") + 1] for command in asks(text)] == files


def test_the_commands_run_as_printed_and_write_what_the_recipe_needs(here: None, tmp_path: Path) -> None:
    for number, name in enumerate(("base", "math", "words")):
        write_scripted(tmp_path / "models" / name, [BOS, *[*spelled("abc"[number:]), EOS] * 60], None)
    printed = run("new", "models/base", "models/math", "models/words").output
    Path("recipe.yml").write_text(printed)
    said = run("check", "recipe.yml", code=1).output
    assert said.count("or write it with 'mergekit-slta ask'") == said.count("not exist") == 3
    assert all(f"Calibration file '{name}-answers.jsonl' does not exist" in said for name in ("math", "words", "base"))
    commands = asks(printed)
    assert [command[1] for command in commands] == ["./models/math", "./models/words", "./models/base"]
    for command in commands:
        run(*command)
    assert "no problem found" in run("check", "recipe.yml").output
    numbers = [len(Path(command[command.index("-o") + 1]).read_text().splitlines()) for command in commands]
    assert all(number > 20 for number in numbers)


def test_folders_that_are_there_are_no_names_on_the_hub(here: None) -> None:
    for name in ("base", "sums", "adapter"):
        Path("family", name).mkdir(parents=True)
    given = ["family/base", "family/sums", "org/words", "family/base+family/adapter", "./family/sums/../adapter"]
    recipe = Recipe.parse(new_recipe(given[0], given[1:]), "this")
    written = ["./family/base", "./family/sums", "org/words", "./family/base+./family/adapter", given[4]]
    assert [str(reference) for reference in recipe.references] == written
    with pytest.raises(SltaError, match="named twice"):
        new_recipe("org/base", ["family/sums", "./family/sums"])


def test_adapters_get_no_actmat_without_a_word_and_the_weights_that_served_them() -> None:
    full, adapters = ["org/a", "org/b"], ["org/base+org/a", "org/base+org/b"]
    plain, warned = (new_recipe("org/base", experts, "actmat") for experts in (full, adapters))
    assert "about as good as a weighted sum\n# (--method task_arithmetic --weight 0.6)" in warned
    assert "weighted sum" not in plain
    for experts, weight in ((full, 0.5), (adapters, 0.6)):
        content = yaml.safe_load(new_recipe("org/base", experts, "task_arithmetic"))
        assert [entry["parameters"]["weight"] for entry in content["models"]] == [weight] * 2


@pytest.mark.parametrize("name", ["./a b/c: d", "./#x/y", "./'quoted'/x", "null", "./ünï/x"])
def test_names_are_quoted_as_yaml_needs_it(name: str, here: None) -> None:
    if name.startswith("."):
        Path(name).mkdir(parents=True)
    assert yaml.safe_load(new_recipe(name, ["org/math"]))["base_model"] == name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["org/math", "--method", "actmat"], "'actmat' merges several experts: name another one, or choose featcal or"),
        (["org/math", "org/code", "--method", "sftm", "--calibration", "hf:a/b"], "'sftm' uses no prompts"),
        (["org/math", "org/code", "--calibration", "hf:a/b"], "--calibration is given once for 2 experts: give it"),
        (["org/math", *["--calibration", "hf:a/b"] * 3], "--calibration is given 3 times for one expert: give it once"),
        (["org/base"], "A model is named twice"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: list[str], sentence: str) -> None:
    assert run("new", "org/base", *arguments, code=1).output.startswith(f"Error: {sentence}")
