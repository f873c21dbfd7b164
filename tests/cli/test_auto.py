"""``auto``: the steps on the quickstart's family, and the verdict on scores."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import family
import pytest
from support.adapters import write_adapter
from support.command import run
from support.copies import edit_tensors
from support.examining import edit_config
from support.rounding import IN_FLOAT64

from mergekit_slta.cli import auto
from mergekit_slta.errors import SltaError
from mergekit_slta.evaluation.evaluate import Comparison, TaskComparison, TaskScore, Z, lead
from mergekit_slta.recipe.new import new_recipe
from mergekit_slta.words import as_score


@pytest.fixture
def models(here: None) -> family.Family:
    return family.copy_shipped(Path("family"))


def arguments(models: family.Family, *tasks: str, **experts: object) -> list[object]:
    """The words of ``auto`` for some experts and their prompts; those of another folder by the task's name."""
    folders = [experts.get(task, models.experts[task]) for task in tasks]
    prompts = [word for task in tasks for word in ("--calibration", models.calibration[task])]
    return ["auto", models.base, *folders, "-o", "out", *prompts, "--no-keep-base"]


def stamps(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.name not in ("log.txt",)}


def test_experts_that_collide_are_merged_by_featcal_and_only_what_changed_runs_again(models: family.Family) -> None:
    words = arguments(models, "sums", "strings", "words")
    planned = run(*words, "--dry-run", "--json", "-")
    assert "Memory" in planned.stderr and not Path("out").exists()
    assert "\n".join(json.loads(planned.stdout)["lines"]) in planned.stderr

    first = run(*words)
    assert "featcal is better than actmat" in first.stdout
    assert first.stdout.rstrip().endswith(": mergekit-slta ask out/merged/featcal QUESTIONS.txt -o REPLIES.jsonl")
    assert [folder.name for folder in Path("out/merged").iterdir()] == ["featcal"]
    assert "Distance of the features by layer" in Path("out/report.html").read_text()
    tasks = json.loads(Path("out/scores.json").read_text())["tasks"]
    assert set(tasks["sums"]["points"]) >= {"base model", "actmat"}
    for title, task in tasks.items():  # what the verdict says is what `evaluate` says
        score, own = task["scores"]["featcal"], task["scores"][f"expert {title}"]
        shares = [as_score(share) for share in (score["accuracy"], score["accuracy_low"], score["accuracy_high"])]
        accuracies = [as_score(one["accuracy"]) for one in (own, task["scores"]["base model"])]
        said = "{} to {}; expert {title} {}, base model {}".format(*shares[1:], *accuracies, title=title)
        of = f"{shares[0]} of the {task['short_answers']} short answers of {title}"
        assert f"featcal gives {of} ({said})." in first.stdout

    made = stamps(Path("out"))
    again = run(*words)
    assert again.stdout == first.stdout and again.stderr.count("# done before") == 5
    assert stamps(Path("out")) == made
    shutil.rmtree("out/merged/featcal")
    assert run(*words).stdout == first.stdout
    assert json.loads(Path("out/merged/featcal/mergekit-slta/merge.json").read_text())["scores"]

    with models.calibration["sums"].open("a") as file:
        file.write('{"text": "1a+1a=2a\\n"}\n')
    run(*words, "--keep")
    changed = {name for name, when in stamps(Path("out")).items() if made.get(name) != when}
    assert {"out/scores.json", "out/merged/featcal/model.safetensors", "out/merged/actmat"} <= changed
    assert "out/recipes/featcal.yml" not in changed  # an edit there would be lost


def test_the_base_model_answers_and_takes_part_and_an_expert_may_be_an_adapter(
    models: family.Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (models.base, models.experts["sums"]):
        edit_config(folder, max_position_embeddings=1024)  # the package's prompts are longer than sums
    adapter = write_adapter(models.base, Path("adapter"))
    words = [*arguments(models, "sums", "strings", strings=f"{models.base}+{adapter}"), "--keep"]
    words.remove("--no-keep-base")
    said = run(*words).stdout
    assert "of the base model" in said and "adapter" in said
    recipe = Path("out/recipes/featcal.yml")
    recipe.write_text(f"{recipe.read_text()}\nchat_template: chatml\n")
    monkeypatch.setattr(auto, "verdict", lambda comparison, plan: auto.Verdict(["next"], "actmat"))
    lines = run(*words).stdout.splitlines()
    assert "out/recipes/actmat.yml sets another tokenizer or chat template than that of featcal" in lines[-2]
    answers = Path("out/answers/base-answers.jsonl")
    assert len(answers.read_text().splitlines()) > 30
    made = json.loads(Path("out/merged/featcal/mergekit-slta/merge.json").read_text())
    assert [task["model"] for task in made["tasks"]][-1].endswith("base")


def test_a_recipe_that_is_replaced_is_kept_with_its_edits(models: family.Family) -> None:
    recipe = Path("out/recipes/featcal.yml")
    rounds = (("base", "a", "--calibration=a"), ("base/", "a", "edited"), ("base", "c", "=c"), ("base", "d", "=d"))
    for base, prompts, found in rounds:
        plan = auto.Plan(base, ["a/+b/", "c"], Path("out"), [prompts, "e"], keep_base=False)
        auto.Run(plan, print, quiet=True).take(plan.recipes["featcal"])
        assert found in recipe.read_text()
        recipe.write_text("edited")
    assert [recipe.with_name(f"featcal.yml.old{n}").read_text() for n in ("", 2)] == ["edited"] * 2
    run(*arguments(models, "sums", "strings"), "--dry-run")  # does not read what it would replace


def test_only_finished_steps_and_the_users_own_answers_are_done(here: None) -> None:
    plan, killed = auto.Plan("org/base", ["org/math"], Path("out")), mock.Mock(side_effect=KeyboardInterrupt)
    recipe, step = plan.recipes["featcal"], plan.merges["featcal"]
    auto.Run(plan, print, quiet=True).take(recipe)
    for answers in plan.answers.values():  # by `ask` on another device
        answers.output.parent.mkdir(exist_ok=True)
        answers.output.write_text("{}")
        auto.Run(plan, killed, quiet=True).take(answers)
    step.output.mkdir(parents=True)
    auto.Run(plan, print, quiet=True).take(step)
    assert auto.Run(plan, killed).is_done(step)
    mark, text = step.mark, recipe.output.read_text()
    assert auto.Run(plan, killed).outdated() == []
    recipe.output.write_text(f"{text}\n")
    assert auto.Run(plan, killed).outdated() == ["out/merged/featcal"]
    with pytest.raises(KeyboardInterrupt):
        auto.Run(plan, killed, quiet=True).take(step)
    assert mark not in Path("out/steps.json").read_text()
    Path("out/steps.json").write_text("")  # the power was lost
    assert not auto.Run(plan, killed).is_done(step)


def test_a_run_that_was_killed_goes_on(models: family.Family, monkeypatch: pytest.MonkeyPatch) -> None:
    words = arguments(models, "sums", "strings")
    take = auto.Run.take

    def killed(self: auto.Run, step: auto.Step, *more: Any) -> None:
        if step.command[0] == "evaluate":
            raise KeyboardInterrupt
        take(self, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(auto.Run, "take", killed)
        assert "Interrupted: the same auto command goes on after the steps" in run(*words, code=130).stderr
    written = {file: file.stat().st_mtime_ns for file in Path("out/merged").glob("*/model.safetensors")}
    assert len(written) == 3 and run(*words, "--keep").stdout.startswith("featcal gives")
    assert {file: file.stat().st_mtime_ns for file in written} == written


def test_experts_that_hardly_interfere_need_only_the_simple_merge(models: family.Family) -> None:
    """A copy of the expert whose parameters differ in rounding."""
    copied = Path(shutil.copytree(models.experts["sums"], "copied"))
    edit_tensors(copied, lambda tensors: [tensor.mul_(1.004) for tensor in tensors.values()])
    lines = models.calibration["sums"].read_text().splitlines(keepends=True)
    models.calibration["sums"].write_text("".join(lines[:100]))
    models.calibration["strings"].write_text("".join(lines[100:]))
    made = run(*arguments(models, "sums", "strings", strings=copied))
    said = made.stdout
    assert "out/merged/actmat, which is not taken, was deleted (--keep keeps it)." in made.stderr
    assert "not better than task_arithmetic-0.5 by more than chance" in said
    assert "Next: read some replies of task_arithmetic-0.5, then publish it, since it has 0.9 or more" in said
    merged = Path("out/merged/task_arithmetic-0.5")
    assert "rope_theta" in (merged / "config.json").read_text()  # which mergekit's own merges lack
    again = run(*arguments(models, "sums", "strings", strings=merged), code=1).stderr
    assert f"{merged} is the folder of" in again and again.endswith("would overwrite: name another folder.\n")


def test_an_expert_that_changes_nothing_is_left_out(models: family.Family) -> None:
    said = run(*arguments(models, "sums", "strings", strings=shutil.copytree(models.base, Path("same")))).stdout
    assert "Next: give same, which is no better than the base model" in said


def test_a_rival_that_fails_is_reported_and_left_out(models: family.Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "lacking", lambda model: ["out of luck."] * (model.folder.name == "actmat"))
    result = run(*arguments(models, "sums", "strings"))
    assert "actmat failed and is left out (SltaError: out of luck)" in result.stderr
    assert "better than task_arithmetic-0.5, the best of the others" in result.stdout


def test_a_wrong_recipe_and_a_folder_of_others_are_refused_before_any_work(models: family.Family) -> None:
    words, lines = arguments(models, "sums", "strings"), models.calibration["sums"].read_text().splitlines(True)
    models.calibration["sums"].write_text("".join(lines[:30]))
    assert "has only 30 prompts, which all calibrate: none is left" in run(*words, code=1).stderr
    models.calibration["sums"].write_text("".join(lines))
    alike = arguments(models, "sums", "strings", strings=shutil.copytree(models.base, Path("featcal")).resolve())
    assert "are both called featcal: rename" in run(*alike, code=1).stderr
    edit_config(models.experts["sums"], rms_norm_eps=1e-3)
    planned = json.loads(run(*words, "--dry-run", "--json", "-").stdout)["lines"]
    assert any("Note: The configuration of the expert" in line for line in planned)
    models.calibration["sums"].unlink()
    assert "sums.jsonl" in run(*words, code=1).stderr
    recipe = Path("out/recipes/featcal.yml")
    recipe.write_text(recipe.read_text().replace("merge_method: featcal", "merge_method: slta   "))
    assert f"{recipe} has another method, slta: merge it with mergekit-yaml" in run(*words, code=1).stderr
    assert {file.name for file in Path("out").iterdir()} == {"recipes", "steps.json", "log.txt"}
    Path("mine").mkdir()
    Path("mine/mine.txt").write_text("mine")
    others = ["mine" if word == "out" else word for word in words]
    assert "files that `auto` has not written" in run(*others, code=1).stderr
    with pytest.raises(SltaError, match="--calibration is given 2 times"):
        auto.Plan("base", ["a", "b", "c"], Path("out"), ["a.jsonl", "b.jsonl"])
    with pytest.raises(SltaError, match="for one, leave the option out, or copy the expert"):
        auto.Plan("base", ["a"], Path("out"), keep_base=False)
    with pytest.raises(SltaError, match="no use for the base model's --calibration"):
        auto.Plan("base", ["a", "b"], Path("out"), ["a.jsonl", "b.jsonl", "base.jsonl"], keep_base=False)


def test_a_refusal_that_asks_for_a_parameter_is_met_in_the_recipe_that_is_there(models: family.Family) -> None:
    words, file = arguments(models, "sums", "strings"), models.calibration["sums"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps({'q': row['question'], 'a': row['answer']})}\n" for row in rows))
    wrong, recipe = [*words[:-2], "none.jsonl", "--no-keep-base"], Path("out/recipes/featcal.yml")
    assert "none.jsonl' does not exist" in run(*wrong, code=1).stderr
    refused = run(*words, code=1).stderr
    assert "Give the expert a 'template'" in refused and f"{recipe} is of another command: delete it" in refused
    recipe.unlink()
    refused = run(*words, code=1).stderr
    assert "Give the expert a 'template'" in refused and "of another command" not in refused
    line = f'calibration: "{file}"'
    recipe.write_text(recipe.read_text().replace(line, f"{line}\n      template: '{{q}}{{a}}'"))
    edited = recipe.read_text()
    assert "none.jsonl' does not exist" in run(*wrong, code=1).stderr and recipe.read_text() == edited
    assert "short answers of sums" in run(*words).stdout


def test_a_file_that_only_the_edited_recipe_names_decides_whether_a_step_is_done(models: family.Family) -> None:
    names = [str(models.experts[task]) for task in ("sums", "strings")]
    prompts = [str(models.calibration[task]) for task in ("sums", "strings")]
    plan, test = auto.Plan(str(models.base), names, Path("out"), prompts, keep_base=False), Path("test.jsonl")
    shutil.copy(prompts[0], test)
    recipe, line = plan.recipes["featcal"].output, f'calibration: "{prompts[0]}"'
    recipe.parent.mkdir(parents=True)
    text = new_recipe(plan.base, names, calibration=prompts)
    recipe.write_text(text.replace(line, f"{line}\n      evaluation: {test}"))
    plan.checked({}, written=True)
    marks = [step.mark for step in (plan.merges["featcal"], plan.scores)]
    test.write_text(test.read_text() * 2)
    assert not {step.mark for step in (plan.merges["featcal"], plan.scores)} & {*marks}


def test_a_misspelt_model_leaves_a_folder_that_the_right_name_takes(models: family.Family) -> None:
    words = arguments(models, "sums", "strings")
    wrong = ["family/sms" if word == models.experts["sums"] else word for word in words]
    assert "did you mean 'sums'" in run(*wrong, code=1).stderr
    models.calibration["sums"].unlink()
    assert "sums.jsonl' does not exist" in run(*words, code=1).stderr
    shutil.rmtree("out")
    twice = [word for word in words if word != models.experts["strings"]]
    twice.insert(2, models.experts["sums"])
    assert "A model is named twice" in run(*twice, code=1).stderr
    assert "sums.jsonl' does not exist" in run(*words, code=1).stderr


# The plan and the verdict


@pytest.mark.parametrize("name", ["hf:{}?split=train", "{}/data/c++.jsonl", "org/base+{}/data"])
def test_a_step_knows_that_an_input_or_the_code_has_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, file = auto.Step(["merge"], Path("out"), [name.format(tmp_path)]), tmp_path / "data" / "c++.jsonl"
    file.parent.mkdir()
    file.write_text("a")
    mark = step.mark
    (file.parent / ".DS_Store").touch()
    assert step.mark == mark
    with monkeypatch.context() as patch:
        patch.setattr(auto.files, "commit", lambda: "another")
        assert step.mark != mark
    file.write_text("ab")
    assert step.mark != mark


def test_models_without_prompts_answer_those_of_the_package() -> None:
    planned = auto.Plan("org/base", ["org/math", "org/code"], Path("out"))
    assert [step.command[:2] for step in planned.answers.values()] == [["ask", name] for name in planned.sources]
    assert list(planned.sources) == ["org/math", "org/code", "org/base"]
    assert [*planned.merges] == ["featcal", "task_arithmetic-0.5", "actmat"]
    assert [*auto.Plan("org/base", ["org/math"], Path("out")).merges] == ["featcal", "task_arithmetic-0.5"]


SCORE = TaskScore(1.0, 0.9, 1.0, 0, 0, 1.0, 1.0, 1.0, 0.0)


def compared(points: dict[str, list[float]]) -> TaskComparison:
    """A task with these points of the models, all of short answers."""
    number = len(points["base model"])
    return TaskComparison("model", number, number, number, 0, number, dict.fromkeys(points, SCORE), points)


def judged(
    keep: float = 1.0,
    task: float = 1.0,
    calibration: tuple[str, ...] = ("a.jsonl", "b.jsonl"),
    base: float = 0.0,
    rival: float = 0.1,
    experts: Sequence[str] = ("a",),
) -> str:
    """The next step where featcal gives these shares of a task's answers and of the base model's."""

    def points(share: float) -> list[float]:
        return [1.0] * round(100 * share) + [0.0] * round(100 * (1 - share))

    own = {"expert a": points(1), "base model": points(base), "featcal": points(task)}
    own["task_arithmetic-0.5"] = points(rival)
    of_base = own | {"base model": points(1), "featcal": points(keep), "expert a": points(0)}
    tasks = {"a": compared(own), "base model": compared(of_base)}
    lines = auto.verdict(Comparison(tasks, ("b",)), auto.Plan("base", experts, Path("out"), calibration)).lines
    assert lines[0].startswith("Not scored, because all prompts calibrate: b.")
    return lines[-1]


def test_few_short_answers_and_tokens_are_called_what_they_are() -> None:
    task = compared({name: [1.0] * 30 for name in ("expert a", "base model", "featcal")})
    assert "featcal gives 1.00 of the 30 short answers of a (" in auto._sentence("a", task, "featcal")
    some = auto._sentence("a", replace(task, answers=40, prompts=50), "featcal")
    assert "featcal gives 1.00 of the 30 short ones of 40 answers of a (" in some
    tokens = auto._sentence("base model", replace(task, short_answers=0), "featcal")
    assert tokens.startswith("featcal predicts 1.00 of the tokens of 30 answers of the base model (expert a 1.00, base")


def test_the_next_step_follows_from_the_numbers() -> None:
    assert judged().endswith(": mergekit-slta ask out/merged/featcal QUESTIONS.txt -o REPLIES.jsonl")
    assert "double 'samples' in its entry, where its file has 30" in judged(keep=0.5)
    assert "double the base model's 'weight' in out/recipes/featcal.yml" in judged(keep=0.5, experts=["a", "c"])
    assert "double 'samples' in out/recipes/featcal.yml" in judged(task=0.5)
    assert "double 'samples' in" in judged(task=0.5, rival=0.5)  # the same, and too little
    assert "replies of task_arithmetic-0.5, then publish" in judged(rival=1.0)
    assert "double 'samples' in" in judged(task=0.91, base=0.9)  # no better than the base model
    assert "give a, which is no better than the base model" in judged(base=1.0)
    assert "has learned (as far as general prompts show) and of" in judged(calibration=())
    assert "mergekit-slta ask a QUESTIONS.txt -o ANSWERS.jsonl" in judged(task=0.5, calibration=())


def test_with_few_prompts_the_simpler_merge_is_taken_only_if_it_is_enough() -> None:
    """Of 30 prompts, featcal gives 28 answers and the other 25; four that this one lacks, and one the reverse."""

    def points(*wrong: int) -> list[float]:
        return [float(number not in wrong) for number in range(30)]

    own = {"expert a": points(), "expert b": points(), "base model": points(*range(24))}
    own |= {"featcal": points(0, 1), "actmat": points(1, 2, 3, 4, 5)}
    plan = auto.Plan("base", ["a", "b"], Path("out"), ("a.jsonl", "b.jsonl"))
    judged = auto.verdict(Comparison({"a": compared(own), "b": compared(own)}), plan)
    assert judged.best == "featcal" and "read some replies of featcal" in judged.lines[-1]
    assert any("so it is taken" in line and "not better than actmat" in line for line in judged.lines)
    assert "featcal is not better than expert a alone, on all these prompts, by more than chance." in judged.lines
    failed = "Not compared, because of an error (see out/log.txt): task_arithmetic-0.5."
    assert failed in judged.lines


@pytest.mark.parametrize("best", ["featcal", "actmat"])
def test_a_merge_that_goes_on_after_its_answers_is_named(best: str) -> None:
    points = dict.fromkeys(("expert a", "expert b", "featcal", "actmat"), [1.0] * 30) | {"base model": [0.0] * 30}
    tasks = {name: compared(points if best == "actmat" else points | {"actmat": [0.0] * 30}) for name in "ab"}
    for name, task in tasks.items():
        task.scores[best] = replace(SCORE, ended=0.8 if name == "b" else 0.95)
    tasks = {name: replace(task, ended_answers=20) for name, task in tasks.items()}
    lines = auto.verdict(Comparison(tasks), auto.Plan("base", ["a", "b"], Path("out"), ("a.jsonl", "b.jsonl"))).lines
    assert f"On b, {best} stops less often after its answers than the task's own model does." in lines


def test_prompts_that_another_expert_answers_better_are_doubted() -> None:
    points = {"expert a": [0.0] * 40, "expert b": [1.0] * 40, "base model": [0.0] * 40}
    (said,) = Comparison({"a": compared(points), "b": compared(points)}).doubts
    assert said.startswith("The expert b answers the prompts of a better than a does: does each model have the prompts")


def test_a_lead_is_of_paired_prompts() -> None:
    """Ten prompts of forty that only one model answers, and for the interval one more that each alone answers."""
    task = compared({"featcal": [1.0] * 30 + [0.0] * 10, "base model": [1.0] * 20 + [0.0] * 20})
    ahead, error = lead([task], "featcal", "base model")
    assert ahead == pytest.approx(10 / 42, abs=IN_FLOAT64)
    assert error == pytest.approx(Z * ((12 - 100 / 42) / 41 / 42) ** 0.5, abs=IN_FLOAT64)
    assert lead([task, task], "featcal", "base model")[1] == pytest.approx(error / 2**0.5, abs=IN_FLOAT64)
    three = [compared({"featcal": [ahead], "base model": [0.0]}) for ahead in (0.1, 0.2, 0.3)]
    ahead, error = lead(three, "featcal", "base model")
    assert 0 < ahead < error  # three prompts prove nothing
