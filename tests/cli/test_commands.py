"""The command line, through click's runner, and through real processes where that matters."""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import WriteRecipe
from safetensors.torch import load_file
from support import families
from support.command import run
from support.families import Family
from support.hub import serve
from support.merging import same_tensors, worst_error
from support.processes import run_python
from support.rounding import SOLVED_IN_FLOAT64, rounding

from mergekit_slta.cli.commands import main
from mergekit_slta.cli.options import MODEL_OPTIONS, mergekit_options
from mergekit_slta.reports.merge import report
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.tables import as_size


@pytest.fixture(scope="session")
def stats(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of the three experts at two levels."""
    folder = tmp_path_factory.mktemp("stats")
    recipe = families.write_recipe(folder / "recipe.yml", families.recipe(llama, samples=4))
    run("calibrate", recipe, "-o", folder / "llama.safetensors", "--level", "attn_mlp", "--level", "layer", "--quiet")
    return folder / "llama.safetensors"


def solution(*arguments: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run("solve", *arguments, "--json", "-").stdout)
    return content


def alphas(statistics: Statistics, level: str = "attn_mlp", **how: Any) -> dict[str, list[float]]:
    return {name: alpha.tolist() for name, alpha in statistics.solve(level, **how).alpha.items()}


# Help


def test_what_needs_no_model_does_not_wait_for_heavy_imports(stats: Path, tmp_path: Path) -> None:
    code = """
import sys
from mergekit_slta.cli.commands import main

def run(*arguments, code=0):
    try:
        main(arguments)
    except SystemExit as end:
        assert (end.code or 0) == code, arguments

run("--help")
run("new", "org/base", "org/math", "--calibration", "math.jsonl")
run("ask", "--prompts-only", "-o", sys.argv[2])
for command in ("check", "evaluate", "ask", "linearity"):
    run(command, "--help")
run("check", "missing.yml", code=1)
run("evaluate", code=2)
run("calibrate", "--levle", code=2)
assert not {"torch", "transformers", "mergekit"} & set(sys.modules)
run("solve", sys.argv[1], "--quiet")  # nobody else has imported huggingface_hub's modules yet
assert not {"transformers", "mergekit"} & set(sys.modules)
"""
    run_python("-S", "-c", code, stats, tmp_path / "prompts.txt")


def test_the_options_for_models_are_mergekits() -> None:
    theirs = {option.name: option for option in mergekit_options()}
    context = click.Context(main)
    for option in MODEL_OPTIONS:
        assert option.to_info_dict() == theirs[option.name].to_info_dict()
        assert option.get_help_record(context) == theirs[option.name].get_help_record(context)


# check


def test_check_says_what_is_worth_knowing_and_all_that_is_wrong(llama: Family, write_recipe: WriteRecipe) -> None:
    recipe = write_recipe(llama, dtype="bfloat16")
    said, quiet = run("check", recipe).output, run("check", recipe, "--quiet").output
    assert "no problem found" in said and "no problem found" in quiet
    assert "as the model sees it" in said and "as the model sees it" not in quiet
    assert "Note: Merging in bfloat16" in said and "Note:" not in quiet
    size = sum(parameter.numel() for parameter in llama.model(0).parameters()) / 1e6
    next_step = f"with slta; next: mergekit-yaml {recipe} ./merged-slta\n"
    assert f"Ready: merges 3 experts of {size:.3g} million parameters {next_step}" in said
    spaced = shutil.copy(recipe, recipe.with_name("my recipe.yml"))
    options = ["--transformers-cache", recipe.parent, "--trust-remote-code"]
    command = shlex.join(["mergekit-yaml", str(spaced), "./merged-slta", *map(str, options)])
    assert f"next: {command}\n" in run("check", spaced, *options).output
    text = run("check", write_recipe(llama, levle="layer", samples=0, per_expert={"templat": "{text}"}), code=1).output
    assert "did you mean 'level'?" in text and "'samples'" in text and text.count("did you mean 'template'?") == 1


BEGIN = "merge_method: slta\nbase_model: a\nmodels:\n"
REPEATED = "repeated (write it once: only the last would count), in line"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n---\na: 2", "holds several recipes, divided by '---': run mergekit-multi on it, or give each a file"),
        ("a: [1\nb: 2", "expected ',' or ']', but got ':', in line 2:\n  b: 2\n   ^\n"),
        ("a:\n\tb: 2", "is not valid YAML: found character '\\t' that cannot start any token, in line 2:"),
        ("template: {q} {a}", "line 1:\n  template: {q} {a}\n                ^\n"),
        ("# nothing\n", "is empty: write a recipe, or have `mergekit-slta new` print one"),
        ("merge_method: slta", "is no mergekit recipe: Exactly one of 'models',"),
        ("just text", "is no mergekit recipe: it should be a valid table, not 'just text'."),
        (f"{BEGIN}- model: a+b+c", "Can't parse a+b+c (only an adapter follows a '+': rename folders with one)."),
        ("models: [{model: a}]", "is no mergekit recipe: 'merge_method' is missing."),
        (f"{BEGIN}- b", "is no mergekit recipe: 'models.0' should be a valid table, not 'b'."),
        (f"{BEGIN}- model: b\n  parameters: {{template: {{q}}}}", "'models.0.parameters.template' should be one value"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (f"{BEGIN}- model: b\nmodels: []", f"YAML: the key 'models' of line 3 is {REPEATED} 5:"),
        ("a: {'level': 1, level: 2}", f"the key 'level' of line 1 is {REPEATED} 1:"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in run("check", recipe, code=1).output
    assert said in run("merge", recipe, tmp_path / "out", code=1).output


# calibrate


def test_calibrate_ends_with_one_line_about_the_file(llama: Family, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    file = tmp_path / "new" / "stats.safetensors"
    result = run("calibrate", write_recipe(llama, samples=2, level="layer"), "-o", file, "--quiet")
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{file} written: {as_size(file.stat().st_size)}, ")
    assert "6 prompts of 3 tasks" in line
    assert "3 at layer" in line
    assert Statistics.load(file).info.levels == ("layer",)
    recipe = write_recipe(llama, "featcal", name="featcal.yml", samples=2)
    said = run("calibrate", recipe, "-o", tmp_path / "other.safetensors").stderr
    assert "Note: this measures slta's merging weights; the recipe's method is featcal." in said
    assert "Note:" not in result.stderr
    assert not (tmp_path / "new" / "stats.safetensors.partial").exists()


def test_the_output_of_calibrate_replaces_the_recipes_statistics(
    llama: Family, stats: Path, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    other = write_recipe(llama, name="other.yml", statistics=str(stats), samples=3)
    assert "measure into another file" in run("calibrate", other, "-o", stats, code=1).output
    run("calibrate", other, "-o", tmp_path / "other.safetensors", "--quiet")
    without_data = write_recipe(llama, name="without.yml", calibration=False)
    said = run("calibrate", without_data, "-o", stats, "--quiet").output
    assert "already fits: " in said


# solve


def test_every_option_of_solve_changes_the_solution_as_it_should(stats: Path) -> None:
    statistics = Statistics.load(stats)
    solved = statistics.solve(ridge=0.1)
    assert solution(stats) == json.loads(statistics.solve("attn_mlp").to_json())
    assert solution(stats, "--bootstrap", "20", "--ridge", "0.1") == json.loads(solved.bootstrap(20).to_json())
    for options, expected in [
        (["--level", "layer"], alphas(statistics, "layer")),
        (["--models", "expert2, expert0"], alphas(statistics.take([2, 0]))),
        (["--task-weight", "expert1=2.5"], alphas(statistics, task_weights={"expert1": 2.5})),
        (["--ridge", "0.5"], alphas(statistics, ridge=0.5)),
        (["--no-balance"], alphas(statistics, balance=False)),
        (["--samples", "2"], alphas(statistics.first_samples(2))),
    ]:
        found = solution(stats, *options)["alpha"]
        assert list(found) == list(expected)
        for name, weights in expected.items():
            assert found[name] == pytest.approx(weights, abs=SOLVED_IN_FLOAT64)


def test_solve_takes_the_names_of_its_table(stats: Path, tmp_path: Path) -> None:
    statistics = Statistics.load(stats)
    models = ("org/llama-math-v1", "org/llama-code-v1", "org/llama-law-v1")
    info = statistics.info.model_copy(update={"models": models})
    file = tmp_path / "named.safetensors"
    replace(statistics, info=info).save(file)
    assert "alpha math" in run("solve", file).stdout
    given = solution(file, "--models", "law,code", "--task-weight", "law=3")
    assert given == solution(file, "--models", f"{models[2]},{models[1]}", "--task-weight", f"{models[2]}=3")
    assert given["models"] == [models[2], models[1]]


def test_a_plain_recipe_of_an_adapter_comes_with_the_options_that_mergekit_alone_needs(
    stats: Path, llama: Family, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yml"
    paths = ["--model", f"base={llama.base}", "--model", f"expert0={llama.base}+org/adapter"]
    said = run("solve", stats, "--recipe", file, *paths, "--quiet").stdout
    assert said.rstrip().endswith(" OUT --lora-merge-cache ./adapters --lora-merge-dtype float32")


def test_the_recipe_is_that_of_the_solution(stats: Path, llama: Family, tmp_path: Path) -> None:
    run(
        *("solve", stats, "--recipe", tmp_path / "ours.yml"),
        *("--models", "expert2,expert1", "--task-weight", "expert1=2"),
        *("--ridge", "0.25", "--no-balance", "--samples", "3", "--tokenizer-source", "base"),
        *("--model", f"base={llama.base}", "--model", "expert1=org/a=b"),
    )
    chosen = Statistics.load(stats).select("expert2", "expert1")
    solved = chosen.solve(ridge=0.25, balance=False, samples=3, task_weights={"expert1": 2})
    models = {"base": str(llama.base), "expert1": "org/a=b"}
    solved.save_recipe(tmp_path / "python.yml", models=models, tokenizer_source="base")
    assert (tmp_path / "ours.yml").read_text() == (tmp_path / "python.yml").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--models", "expert0,math"], "no expert 'math', only expert0, expert1, expert2"),
        (["--task-weight", "expert1"], "write NAME=VALUE"),
        (["--task-weight", "expert1=much"], "is 'much': give a number"),
        (["--recipe", "x.yml", "--model", "expert9=a"], "(base, expert0, expert1, expert2)"),
        (["--recipe", "x.yml", "--model", "base=/nowhere"], "--model base=PATH"),
    ],
)
def test_solve_refuses_in_words(stats: Path, options: list[str], said: str, here: None, tmp_path: Path) -> None:
    assert said in run("solve", stats, *options, code=1).output
    assert not list(tmp_path.iterdir())


def test_no_file_of_others_is_overwritten(llama: Family, stats: Path, tmp_path: Path) -> None:
    mine, base = tmp_path / "mine.yml", ("--model", f"base={llama.base}")
    mine.write_text("merge_method: featcal\n")
    for _ in range(2):
        run("solve", stats, "--recipe", tmp_path / "plain.yml", *base, "--quiet")
    assert "has not written: name another one" in run("solve", stats, "--recipe", mine, *base, code=1).output
    assert f"{mine} does not end in .json" in run("solve", stats, "--json", mine, code=1).output
    assert f"{mine} does not end in .json" in run("evaluate", mine, tmp_path, "--json", mine, code=1).output
    assert f"{mine} is a recipe, and no statistics file" in run("solve", mine, code=1).output
    assert mine.read_text() == "merge_method: featcal\n"


# Statistics on the Hub


@pytest.fixture
def hub(stats: Path, tmp_path: Path) -> Iterator[None]:
    """A local stand-in for the Hub that holds the statistics, and an empty cache."""
    repository = tmp_path / "repositories" / "org" / "stats" / "sub"
    repository.mkdir(parents=True)
    shutil.copy(stats, repository)
    with serve(tmp_path / "repositories", tmp_path / "hub", revision="v1"):
        yield


PUBLISHED = "hf:org/stats/sub/llama.safetensors@v1"


@pytest.mark.usefixtures("hub")
def test_published_statistics_solve_as_local_ones(stats: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert solution(PUBLISHED, "--transformers-cache", cache) == solution(stats)
    assert list(cache.rglob("llama.safetensors"))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hf:org/other/llama.safetensors", "no such repository, or it is private"),
        ("hf:org/stats/sub/llama.safetensors@v2", "no such revision"),
        ("hf:org/stats/llama.safetensors@v1", "no such file"),
        ("hf:org/stats", "write hf:ORG/REPO/FILE"),
    ],
)
def test_what_the_hub_does_not_have_is_said(source: str, said: str) -> None:
    assert said in run("solve", source, code=1).output


@pytest.mark.usefixtures("hub")
def test_a_recipe_may_name_published_statistics(llama: Family, stats: Path, tmp_path: Path) -> None:
    experts = [2, 0]
    outputs = []
    for number, source in enumerate([PUBLISHED, str(stats)]):
        content = families.recipe(llama, experts=experts, calibration=False, statistics=source)
        recipe = families.write_recipe(tmp_path / f"{number}.yml", content)
        run("merge", recipe, tmp_path / f"out{number}", "--quiet", "--no-write-model-card", "--no-copy-tokenizer")
        outputs.append(load_file(tmp_path / f"out{number}" / "model.safetensors"))
    assert same_tensors(*outputs)


def test_a_merged_folder_is_solved_as_its_recipe_says(llama: Family, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"balance": False, "ridge": 0.3}
    content = families.recipe(llama, experts=[0], keep={"weight": 2.5}, level="layer", samples=3, **settings)
    out = tmp_path / "out"
    run("merge", families.write_recipe(tmp_path / "recipe.yml", content), out, "--quiet")
    merged = Statistics.load(out).solve("layer", keep_weight=2.5, **settings)
    assert solution(out) == json.loads(merged.to_json())
    other = merged.statistics.solve("layer", ridge=0.3, keep_weight=0)
    assert solution(out, "--balance", "--keep-weight", "0") == json.loads(other.to_json())
    run("report", out, "-o", tmp_path / "report")
    assert (tmp_path / "report" / "report.html").read_text() == report(merged, tmp_path / "expected").read_text()


# merge


def test_names_of_any_script(family: Family, tmp_path: Path) -> None:
    """From the check to the plain recipe, where every file and folder has letters of other scripts and spaces."""
    folder = family.base.parent.rename(tmp_path / "modèles 数学")
    base, *experts = (
        folder.joinpath(own.name).rename(folder / name)
        for own, name in zip(family.folders, ("базис", "数 学", "प्रमेय", "🧮"), strict=True)
    )
    data = tuple(folder.joinpath(own.name).rename(folder / f"données {own.name}") for own in family.data)
    content = families.recipe(Family(base, tuple(experts), data, family.config), samples=3, report=str(folder / "ré"))
    recipe, stats, plain = folder / "レシピ.yml", folder / "статистика.safetensors", folder / "простой.yml"
    families.write_recipe(recipe, content | {"parameters": content["parameters"] | {"statistics": str(stats)}})
    run("check", recipe)
    run("calibrate", recipe, "-o", stats, "--quiet")
    run("merge", recipe, folder / "слияние", "--quiet")
    run("verify", recipe, folder / "слияние")
    paths = [option for own in (base, *experts) for option in ("--model", f"{own.name}={own}")]
    assert "प्रमेय" in run("solve", stats, "--recipe", plain, *paths).output
    run("merge", plain, folder / "plain", "--quiet")
    found, other = (load_file(folder / name / "model.safetensors") for name in ("слияние", "plain"))
    assert worst_error(found, other) < rounding(2, len(experts))
    assert "数 学" in (folder / "ré" / "report.html").read_text()
