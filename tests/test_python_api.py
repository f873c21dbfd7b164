"""The example in Python: it uses nothing but the public names, and gives the merging weights that the commands give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import python_api
from click.testing import CliRunner
from support import families
from support.html_elements import assert_self_contained

import mergekit_slta
from mergekit_slta.cli.commands import main

TASKS = ["strings", "sums", "words"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A family that lies where the quickstart puts its own."""
    made = families.make_family(tmp_path / "made", experts=3, records=40)
    (tmp_path / "family" / "calibration").mkdir(parents=True)
    made.base.rename(tmp_path / "family" / "base")
    for task, expert, data in zip(TASKS, made.experts, made.data, strict=True):
        expert.rename(tmp_path / "family" / task)
        data.rename(tmp_path / "family" / "calibration" / f"{task}.jsonl")
    return tmp_path


def test_the_example_gives_the_weights_that_the_commands_give(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python_api.main(folder)
    said = capsys.readouterr().out
    out = folder / "python"

    family = folder / "family"
    data = tuple(family / "calibration" / f"{task}.jsonl" for task in TASKS)
    made = families.Family(family / "base", tuple(family / task for task in TASKS), data, families.config_of("llama"))
    recipe = families.write_recipe(folder / "recipe.yml", families.recipe(made))
    for command in (
        ["calibrate", recipe, "-o", folder / "stats.safetensors", "--level", "attn_mlp"],
        ["solve", folder / "stats.safetensors", "--json", folder / "solution.json"],
    ):
        done = CliRunner().invoke(main, [*map(str, command), "--quiet"])
        assert done.exit_code == 0, done.output
    by_command, by_python = (json.loads((place / "solution.json").read_text()) for place in (folder, out))
    assert by_python == by_command
    assert by_python["models"] == TASKS

    assert str(mergekit_slta.Statistics.load(folder / "stats.safetensors").solve().table()) in said
    for expected in ("±", "On held-out prompts", str(out / "plain.yml"), str(out / "report" / "report.html")):
        assert expected in said
    assert_self_contained((out / "report" / "report.html").read_text())
    assert "task_arithmetic" in (out / "plain.yml").read_text()
    assert (out / "merged" / "model.safetensors").is_file()
