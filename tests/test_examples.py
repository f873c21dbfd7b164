"""The examples: the Python one, the quickstart's models, the pair of models and the Slurm script do what they say."""

import filecmp
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import evaluate_pair
import family
import pytest
import python_api
import yaml
from support import families
from support.calibration_samples import source_of
from support.command import run
from support.html_elements import assert_self_contained
from transformers import AutoTokenizer

import mergekit_slta
from mergekit_slta.checks.examine import examine
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SETTINGS

TASKS = ["strings", "sums", "words"]


def test_the_example_in_python_gives_the_weights_that_the_commands_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a family that lies where the quickstart puts its own."""
    made = families.make_family(tmp_path / "made", experts=3, records=40)
    root, out = tmp_path / "family", tmp_path / "python"
    data = tuple(root / "calibration" / f"{task}.jsonl" for task in TASKS)
    placed = families.Family(root / "base", tuple(root / task for task in TASKS), data, made.config)
    (root / "calibration").mkdir(parents=True)
    for old, new in zip((*made.folders, *made.data), (*placed.folders, *placed.data), strict=True):
        old.rename(new)
    python_api.main(tmp_path)
    said = capsys.readouterr().out

    recipe = families.write_recipe(tmp_path / "recipe.yml", families.recipe(placed))
    run("calibrate", recipe, "-o", tmp_path / "stats.safetensors", "--level", "attn_mlp", "--quiet")
    run("solve", tmp_path / "stats.safetensors", "--json", tmp_path / "solution.json", "--quiet")
    by_command, by_python = (json.loads((place / "solution.json").read_text()) for place in (tmp_path, out))
    assert by_python == by_command and by_python["models"] == TASKS

    assert str(mergekit_slta.Statistics.load(tmp_path / "stats.safetensors").solve().table()) in said
    for expected in ("±", "On held-out prompts", str(out / "plain.yml"), str(out / "report" / "report.html")):
        assert expected in said
    assert_self_contained((out / "report" / "report.html").read_text())
    assert "task_arithmetic" in (out / "plain.yml").read_text()
    assert (out / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize("task", TASKS)
def test_a_shipped_record_is_a_prompt_and_its_answer(task: str, tmp_path: Path) -> None:
    shipped = family.family_in(family.SHIPPED)
    family.write_calibration(tmp_path / "again.jsonl", task, 0)
    assert filecmp.cmp(shipped.calibration[task], tmp_path / "again.jsonl", shallow=False)
    tokenizer = AutoTokenizer.from_pretrained(shipped.base)
    drawn = source_of(str(shipped.calibration[task]), tokenizer, max_tokens=64).draw(family.CALIBRATION_RECORDS)
    assert len(set(drawn.token_ids)) == family.CALIBRATION_RECORDS
    for row, answer in zip(drawn.token_ids, drawn.answers, strict=True):
        prompt, _, said = str(tokenizer.decode(list(row))).removeprefix("<bos>").removesuffix("\n").rpartition("=")
        assert answer and tokenizer.decode(list(row[slice(*answer)])) == said == family.TASKS[task].answer(prompt)


def test_the_shipped_models_score_as_in_the_findings() -> None:
    """Training rounds differently on every processor, scoring hardly: one prompt is 0.005."""
    shipped = family.family_in(family.SHIPPED)
    for folder, scores in {shipped.base: [0.19, 0.24, 0.35], shipped.experts["words"]: [0.17, 0.14, 0.98]}.items():
        assert list(family.evaluate(folder).values()) == pytest.approx(scores, abs=0.011)


def test_the_recipe_for_a_pair_passes_the_check_that_a_merge_makes(llama: families.Family, tmp_path: Path) -> None:
    template = {"template": "", "keep_template": r"{text}\n{text}"}
    options = {"calibration": str(llama.data[0]), "keep": str(llama.data[1]), "samples": 3, "dtype": "bfloat16"}
    found = evaluate_pair.recipes(str(llama.base), str(llama.experts[0]), options | template)
    ours = [content for content in found.values() if content["merge_method"] in SETTINGS]
    assert ours
    for content in ours:
        recipe = Recipe.parse(yaml.safe_dump(content), "recipe.yml")
        examine(Experiment(recipe), out_path=tmp_path / "out")
        assert recipe.keep is not None and recipe.keep.template == "{text}\n{text}"


def test_the_table_of_a_pair_says_what_is_gained_and_kept() -> None:
    base, expert, merge = {"math": 0.2, "chat": 0.8}, {"math": 0.6, "chat": 0.2}, {"math": 0.5, "chat": 0.6}
    scored = {"base": base, "expert": expert, "merge": merge}
    assert evaluate_pair.table(scored, ["math"], ["chat"]).splitlines()[-3:] == [
        "| base | 0.200 | 0.800 | 0.00 | 1.00 |",
        "| expert | 0.600 | 0.200 | 1.00 | 0.25 |",
        "| merge | 0.500 | 0.600 | 0.75 | 0.75 |",
    ]


# Slurm

STEPS = {
    "mergekit-slta": "mergekit-slta check r.yml --cuda --trust-remote-code",
    "torchrun": "torchrun --standalone --nproc-per-node 4 -m mergekit_slta merge r.yml out --cuda --trust-remote-code",
}


@pytest.mark.parametrize("program", STEPS)
def test_a_slurm_job_whose_time_is_up_is_requeued(program: str, tmp_path: Path) -> None:
    """Whatever it does then; in a shell whose programs write what they are called with."""
    calls = tmp_path / "calls"
    calls.touch()
    (tmp_path / "bin").mkdir()
    for name in ("mergekit-slta", "scontrol", "torchrun"):
        more = "exec sleep 60" if name == program else ""
        file = tmp_path / "bin" / name
        file.write_text(f'#!/bin/bash\necho "$(basename "$0") $*" >> calls\n{more}\n')
        file.chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    script = Path(evaluate_pair.__file__).parent / "slurm" / "merge.sbatch"
    command = ["bash", str(script), "r.yml", "out", "--trust-remote-code"]
    job = subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE)
    while STEPS[program] not in calls.read_text().splitlines():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert "goes back into the queue" in job.communicate(timeout=20)[1].decode() and job.returncode == 0
    assert calls.read_text().splitlines()[-1] == "scontrol requeue 7"
    (tmp_path / "bin" / program).write_text('#!/bin/bash\necho "$(basename "$0") $*" >> calls\n')
    for merged in (False, True):  # a finished merge is only verified
        (tmp_path / "merged-7").write_text("") if merged else calls.write_text("")
        subprocess.run(command, cwd=tmp_path, env=variables, check=True)
        assert not (tmp_path / "merged-7").exists()
    verified = "mergekit-slta verify r.yml out --cuda --trust-remote-code"
    assert calls.read_text().splitlines() == [*STEPS.values(), verified, verified]
