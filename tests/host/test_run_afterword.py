"""The words after a merge: the kept shares, and a next command that runs as it is printed."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import WriteRecipe
from mergekit.scripts import run_yaml
from support import families
from support.adapters import write_adapter
from support.command import run
from support.examining import chat_model
from support.families import Family
from support.html_elements import assert_self_contained

from mergekit_slta.cli.commands import main
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.words import as_score


def said_after(command: Any, recipe: Path, out: Path, *options: str) -> list[str]:
    """What a merge says of itself, without progress."""
    done = run(*["merge"] * (command is main), recipe, out, *options, program=command)
    return [line for line in done.stderr.splitlines() if re.match("(Share|Distance|Report|To)", line)]


def run_next(line: str) -> str:
    program, *arguments = shlex.split(line.partition(" it: ")[2])
    assert program == "mergekit-slta"
    return run(*arguments, "--quiet").stdout


@pytest.mark.parametrize("command", [run_yaml.main, main])
def test_slta_says_what_is_kept_and_evaluates_next(
    command: Any, llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    recipe, out = write_recipe(llama, experts=(0, 1), keep={}, samples=2), tmp_path / "out put"
    kept, following = said_after(command, recipe, out)
    solution = Statistics.load(out / "mergekit-slta" / "statistics.safetensors").solve()
    shares = [as_score(share) for share in (*solution.retained_overall.tolist(), solution.kept_base_overall)]
    assert re.findall(r"−?\d\.\d\d", kept) == shares and "expert0 " in kept and "base model" in kept
    assert following == f"To evaluate it: mergekit-slta evaluate '{out}/mergekit_config.yml' '{out}'"
    assert "expert expert0" in run_next(following)
    assert said_after(command, recipe, out, "--quiet") == []


def test_featcal_says_how_far_its_features_are_from_each_models_own(
    llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    pages = tmp_path / "pages"
    recipe = write_recipe(llama, "featcal", experts=(0,), keep={}, samples=2, report=str(pages))
    said, page, _ = said_after(run_yaml.main, recipe, tmp_path / "out")
    assert re.search(r"that model's prompts \(lower is better\): expert0 \d\.\d\d, the base model \d\.\d\d\.$", said)
    assert page == f"Report: {pages / 'report.html'}"
    text = (pages / "report.html").read_text()
    assert_self_contained(text)
    assert str(tmp_path) not in text and ">expert0</th>" in text


def test_a_method_without_data_verifies_next_with_the_options_of_the_merge(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", experts=[0, 1], calibration=False)
    content["models"][0]["model"] = f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}"
    recipe, cache = tmp_path / "recipe.yml", str(tmp_path / "cache")
    recipe.write_text(json.dumps(content))
    (following,) = said_after(run_yaml.main, recipe, tmp_path / "out", "--lora-merge-cache", cache)
    out = tmp_path / "out"
    assert (
        following
        == f"To verify it: mergekit-slta verify {out / 'mergekit_config.yml'} {out} --lora-merge-cache {cache}"
    )
    run_next(following)


def test_a_merge_that_may_never_stop_is_said_before_and_after_it(family: Family, tmp_path: Path) -> None:
    chat_model(family.experts[0])
    recipe = families.write_recipe(tmp_path / "recipe.yml", families.recipe(family, "sftm", calibration=False))
    lines = run(recipe, tmp_path / "out", program=run_yaml.main).stderr.splitlines()
    places = [index for index, line in enumerate(lines) if "ends its turns with <|im_end|>" in line]
    assert len(places) == 2 and lines[places[1] + 1].startswith("To verify it: ")
    assert all(f"add 'tokenizer: {{source: {family.experts[0]}}}' to the recipe." in lines[place] for place in places)
