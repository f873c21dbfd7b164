"""``auto``: from the names of models to a scored merge and a verdict, by the other commands.

Each step is a command, printed as one could type it, that writes one output below one folder. ``steps.json`` there has
a hash of each finished step's command and inputs: a step whose hash is as it was, and whose output is there, is not run
again.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import click
import torch

from mergekit_slta import files
from mergekit_slta.checks.examine import examine
from mergekit_slta.checks.space import needs
from mergekit_slta.errors import SltaError, one_line
from mergekit_slta.evaluation.evaluate import BASE, KEEP, Z, interval
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.new import answer_files, ask_arguments, new_recipe
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.tables import as_size
from mergekit_slta.words import as_score, counted, enumerated

MERGE = "featcal"  # the merge that the others are compared with
RIVALS = ("task_arithmetic", "actmat")
STEPS, SCORES, LOG = "steps.json", "scores.json", "log.txt"
ENOUGH = 0.9  # of what the task's own model answers: with less, something may be gained
# To guess the time: tokens of a prompt, and passes for each task to score or to answer, and for each prompt of a merge.
TOKENS, SCORED, ANSWERED, SOLVED = 200, 100, 400, 10


class Step(NamedTuple):
    """A command and what it needs."""

    command: Sequence[str]  # after "mergekit-slta", without the options of all steps
    output: Path
    inputs: Sequence[str] = ()  # files, and models: a folder or a name on the Hub


@dataclass
class Plan:
    """What a run makes below its folder."""

    folder: Path
    base: str
    experts: Sequence[str]
    prompts: Mapping[str, str]  # by model: the file or dataset that the command was given
    sources: Mapping[str, str]  # by model: its prompts, also those that it is going to answer
    answers: Sequence[Step]
    recipes: Mapping[str, Step]  # by the merge's name, ``MERGE`` first
    merges: Mapping[str, Step]
    scores: Step
    choices: Sequence[str]  # the command's own options
    options: Sequence[str] = ()  # mergekit's, for every step that opens models

    def words(self, step: Step, without: Collection[str] = ()) -> list[str]:
        """A step's command with its options; words of it may be left out."""
        options = self.options if step.command[0] != "new" else ()
        return [word for word in (*step.command, *options) if word not in without]

    def again(self, experts: Sequence[str], folder: str) -> str:
        """The command that plans the same for some of the experts."""
        given = [self.prompts[model] for model in (*experts, self.base) if model in self.prompts]
        prompts = [word for source in given for word in ("--calibration", source)]
        command = ["mergekit-slta", "auto", self.base, *experts, "-o", folder]
        return shlex.join([*command, *prompts, *self.choices, *self.options])


def plan(
    base: str,
    experts: Sequence[str],
    folder: Path,
    calibration: Sequence[str] = (),
    *,
    keep_base: bool = True,
    against: Sequence[str] = (),
) -> Plan:
    """Plan a merge by featcal and its rivals; see the command's help."""
    models = [*experts, *[base] * keep_base]
    if len(calibration) not in {0, len(experts), len(models)}:
        raise SltaError(
            f"--calibration is given {counted(len(calibration), 'time')}: give it once for each expert, in their "
            "order, and once more for the base model if you have prompts for it, or leave it out."
        )
    prompts = dict(zip(models, calibration, strict=False))
    written = {model: folder / "answers" / file for model, file in zip(models, answer_files(models), strict=True)}
    sources = {model: prompts.get(model, str(file)) for model, file in written.items()}
    answers = [
        Step(ask_arguments(model, str(file), model == base), file, [model])
        for model, file in written.items()
        if model not in prompts
    ]
    new = ["new", base, *experts]
    commands = {MERGE: [*new, *(word for source in sources.values() for word in ("--calibration", source))]}
    for method in dict.fromkeys((*RIVALS, *against)):
        if method == "task_arithmetic":  # with weight 1, one expert is only copied
            weights = {0.5, round(1 / len(experts), 2)} - {1.0}
            commands |= {f"{method}-{w}": [*new, "--method", method, "--weight", str(w)] for w in sorted(weights)}
        elif len(experts) > 1:
            commands[method] = [*new, "--method", method]
    recipes = {name: Step(command, folder / "recipes" / f"{name}.yml") for name, command in commands.items()}
    merges, needed = dict[str, Step](), [base, *experts, *sources.values()]
    for name, recipe in recipes.items():
        file, out = str(recipe.output), folder / "merged" / name
        merges[name] = Step(["merge", file, str(out)], out, [file, *needed])
    score = ["evaluate", str(recipes[MERGE].output), *(str(step.output) for step in merges.values())]
    inputs = [*needed, *(str(recipe.output) for recipe in recipes.values())]
    scores = Step([*score, "--json", str(folder / SCORES)], folder / SCORES, inputs)
    choices = [*["--no-keep-base"] * (not keep_base), *(word for method in against for word in ("--against", method))]
    return Plan(folder, base, experts, prompts, sources, answers, recipes, merges, scores, choices)


def checked(planned: Plan, options: Mapping[str, Any]) -> Experiment:
    """Open the main merge's recipe, and refuse what ``check`` refuses, but for answers that are still to be written."""
    recipe = planned.recipes[MERGE].output
    text = new_recipe(planned.base, planned.experts, calibration=[*planned.sources.values()])
    experiment = Experiment(Recipe.load(recipe) if recipe.exists() else Recipe.parse(text, str(recipe)), **options)
    unwritten = [str(step.output) for step in planned.answers if not step.output.exists()]
    examine(experiment, out_path=planned.merges[MERGE].output, unwritten=unwritten)
    return experiment


def described(planned: Plan, experiment: Experiment) -> Iterator[str]:
    """What a run is going to do and what it takes, a line each."""
    others = enumerated([*planned.merges][1:])
    yield f"Merge {enumerated(planned.experts)}, fine-tuned from {planned.base}, by {MERGE}; compare with {others}."
    for model in planned.sources:
        yield f"Prompts of {model}: {planned.prompts.get(model, 'its own answers to general prompts')}"
    taken = needs(experiment)
    yield str(taken)
    yield f"For the comparison: {as_size(taken.merged * (len(planned.merges) - 1))} more of disk, until it is scored"
    # The forward passes of all steps, at the speed of a product of matrices.
    factor, started = torch.randn(1024, 1024, device=experiment.device), time.perf_counter()
    float((factor @ factor).sum())
    seconds = (time.perf_counter() - started) / 1024**3  # of a product and a sum
    scored = SCORED * (len(planned.merges) + len(planned.experts) + 1) * len(planned.sources)
    solved = SOLVED * sum(task.samples for task in experiment.recipe.tasks)
    numbers = sum(header.count for header in experiment.model(experiment.recipe.base).tensors.values())
    passes = ANSWERED * len(planned.answers) + scored + solved
    yield f"Time: very roughly {counted(math.ceil(passes * TOKENS * numbers * seconds / 60), 'minute')}"


class Run:
    """A plan's steps: those that are done, and those that are run now."""

    def __init__(self, planned: Plan, run: Callable[[Sequence[str]], object], quiet: bool = False) -> None:
        """``run`` takes a command's words after "mergekit-slta"; an SltaError if the folder holds other files."""
        self._plan, self._run, self._quiet = planned, run, quiet
        self._steps, folder = planned.folder / STEPS, planned.folder
        if folder.is_dir() and any(folder.iterdir()) and not self._steps.is_file():
            raise SltaError(f"{folder} holds files that `auto` has not written: name another folder.")
        self._marks: dict[str, str] = json.loads(self._steps.read_bytes()) if self._steps.is_file() else {}

    def is_done(self, step: Step) -> bool:
        """Whether a step's output is there, made by the same command from the same inputs."""
        return step.output.exists() and self._marks.get(str(step.output)) == _mark(step)

    def take(self, step: Step, without: Collection[str] = ()) -> None:
        """Run a step, unless it is done; words of its command may be left out."""
        done, is_recipe = self.is_done(step), step.command[0] == "new"
        words = self._plan.words(step, without)
        into = f" > {shlex.quote(str(step.output))}" if is_recipe else ""
        self.say(f"$ {shlex.join(['mergekit-slta', *words])}{into}{'   # done before' * done}")
        if done:
            return
        step.output.parent.mkdir(parents=True, exist_ok=True)
        if step.command[0] == "ask":
            step.output.unlink(missing_ok=True)  # of other inputs: `ask` replaces no file
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self._run(words)
        if is_recipe:
            files.write(step.output, printed.getvalue().encode())
        else:
            self.say(printed.getvalue(), quiet=True)
        self._marks[str(step.output)] = _mark(step)
        files.write(self._steps, json.dumps(self._marks, indent=1).encode())

    def say(self, line: str, quiet: bool = False) -> None:
        """Add a line to the log, and print it unless ``quiet``."""
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        with (self._plan.folder / LOG).open("a") as log:
            log.write(f"{line}\n")
        if not (quiet or self._quiet):
            click.echo(line, err=True)


def _mark(step: Step) -> str:
    """A hash of a step's command, and of the sizes and times of its input files; the Hub's are only named."""
    parts = [Path(part).expanduser() for name in step.inputs for part in name.split("+")]  # also of an adapter
    inputs = [file for part in parts for file in (sorted(part.iterdir()) if part.is_dir() else [part])]
    stats = [(str(file), file.stat()) for file in inputs if file.is_file()]
    return files.digest([*step.command, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)])


def make(planned: Plan, run: Run, keep: bool = False) -> Verdict:
    """Run all steps of a plan, and judge the merges.

    A rival that fails is reported and left out. The rivals' models are deleted once they are scored, but for the one
    that the verdict recommends, unless all are to ``keep``.
    """
    for step in (*planned.recipes.values(), *planned.answers):
        run.take(step)
    if not run.is_done(planned.scores):
        for name, step in planned.merges.items():
            try:
                run.take(step)
            except Exception as error:
                if name == MERGE:
                    raise
                run.say(f"{name} failed and is left out ({one_line(error)}). To try again, delete {SCORES}.")
    run.take(planned.scores, {str(step.output) for step in planned.merges.values() if not run.is_done(step)})
    judged = verdict(json.loads(planned.scores.output.read_bytes()), planned)
    for name, step in planned.merges.items():
        if not keep and name not in (MERGE, judged.best):
            shutil.rmtree(step.output, ignore_errors=True)
    run.say("\n".join(judged.lines), quiet=True)  # the caller prints them
    return judged


# The verdict


class Verdict(NamedTuple):
    """What the scores say."""

    lines: Sequence[str]  # the last one is the next step
    best: str  # the merge to take


def verdict(scores: Mapping[str, Any], planned: Plan) -> Verdict:
    """Judge the merges by the scores that ``evaluate`` has written.

    Of two models, one is better by more than chance if the 95 % interval of the paired difference, the mean over the
    tasks, is above zero.
    """
    tasks = {title: Task(title, task) for title, task in scores["tasks"].items()}
    every = list(tasks.values())
    rivals = [name for name in planned.merges if name in every[0].points and name != MERGE]
    rival = max(rivals, key=lambda name: sum(task.mean(name) for task in every), default="")
    ahead, error = lead(every, MERGE, rival) if rival else (1.0, 0.0)
    better = ahead > error
    lines = [task.sentence for task in every]
    if KEEP not in tasks:
        lines.append("What it retains of the base model was not measured: there were no prompts for that.")
    if rival:
        words = f"better than {rival}, the best of the others," if better else f"no better than {rival}"
        lines.append(f"{MERGE} is {words} by more than chance ({ahead:+.2f} ± {error:.2f}).")
    if planned.answers:
        lines.append(
            "The models answered general prompts, which say little about a narrow task; prompts of the task itself "
            "(--calibration) say more."
        )
    best = MERGE if better else rival
    return Verdict([*lines, f"Next: {_next(tasks, best, planned)}"], best)


class Task:
    """A task's scores: of each prompt 1 or 0, by whether a model gives its answer.

    Where most answers of a task are long, it is the share of the answer's tokens that the model gives.
    """

    def __init__(self, title: str, scores: Mapping[str, Any]) -> None:
        short, shares = 2 * scores["short_answers"] > scores["prompts"], scores["shares"]
        self.title, self.own = title, BASE if title == KEEP else f"expert {title}"  # the task's own model
        self.points = {model: [float(share == 1) if short else share for share in of] for model, of in shares.items()}
        self._counted = f"{'answers' if short else 'tokens of answers'} on the {scores['prompts']} prompts of {title}"

    def mean(self, model: str) -> float:
        return fmean(self.points[model])

    @property
    def sentence(self) -> str:
        """What the merge gives, with its 95 % interval, and what the task's own model gives."""
        low, high = map(as_score, interval(self.mean(MERGE), len(self.points[MERGE])))
        own = f"{'base model' if self.title == KEEP else 'expert'} {as_score(self.mean(self.own))}"
        return f"{MERGE} gives, of the {self._counted}: {as_score(self.mean(MERGE))} ({low} to {high}; {own})."


def lead(tasks: Sequence[Task], first: str, second: str) -> tuple[float, float]:
    """How many more points one model has than another, the mean over tasks, and half of the 95 % interval."""
    pairs = [[a - b for a, b in zip(task.points[first], task.points[second], strict=True)] for task in tasks]
    error = sum(variance(pair) / len(pair) if len(pair) > 1 else 1.0 for pair in pairs) ** 0.5 / len(pairs)
    return fmean(map(fmean, pairs)), Z * error


def _next(tasks: Mapping[str, Task], best: str, planned: Plan) -> str:
    """What the numbers suggest, and the command for it."""
    experts = [task for title, task in tasks.items() if title != KEEP]
    recipe, taken = (shlex.quote(str(step.output)) for step in (planned.recipes[MERGE], planned.merges[best]))
    again = f"&& {planned.again(planned.experts, str(planned.folder))}"
    weakest = min(tasks.values(), key=lambda task: task.mean(MERGE) / max(task.mean(task.own), 1e-9))
    all_scored = len(experts) == len(planned.experts)  # otherwise a task's title does not tell which model it is of
    for task, model in zip(experts, planned.experts, strict=True) if all_scored else ():
        ahead, error = lead([task], task.own, BASE)
        if ahead <= error and len(experts) > 1:
            others = planned.again([expert for expert in planned.experts if expert != model], "FOLDER")
            return f"leave {task.title} out, which is no better than the base model on its own prompts: {others}"
    if best != MERGE:
        return f"take {best}, since the experts hardly interfere: mergekit-slta publish {taken} ORG/NAME"
    if weakest.mean(MERGE) >= ENOUGH * weakest.mean(weakest.own):
        return f"mergekit-slta publish {taken} ORG/NAME"
    if weakest.title == KEEP:
        return f"count the base model's prompts more: sed -i 's/weight: 1.0 /weight: 2.0 /' {recipe} {again}"
    return f"calibrate with more prompts: sed -i 's/samples: 30 /samples: 60 /' {recipe} {again}"
