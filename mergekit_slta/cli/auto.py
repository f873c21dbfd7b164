"""``auto``: from the names of models to a scored merge and a verdict, by the other commands.

Each step is a command, printed as one could type it, that writes one output below one folder. ``steps.json`` there has
a hash of each finished step's command and inputs: a step whose hash is as it was, and whose output is there, is not run
again.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import click
import torch

from mergekit_slta import files
from mergekit_slta.checks.examine import examine
from mergekit_slta.checks.space import needs
from mergekit_slta.errors import SltaError, one_line
from mergekit_slta.evaluation.evaluate import BASE, KEEP, interval
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.new import answer_files, ask_arguments, new_recipe
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.tables import as_json, as_size
from mergekit_slta.words import as_score, counted, enumerated

MERGE = "featcal"  # the merge that the others are compared with
RIVALS = ("task_arithmetic", "actmat")
STEPS, SCORES, LOG = "steps.json", "scores.json", "log.txt"
ENOUGH = 0.9  # of what the task's own model answers: with less, something may be gained
PROMPTS, TOKENS = 100, 200  # that a model answers or is scored on, and of one prompt: to guess the time
SLOW, SOLVING = 4, 10  # passes that take as long as to answer a prompt, and as to solve a merge for one
Z = 1.96  # standard errors of a 95 % interval


class Step(NamedTuple):
    """A command and what it needs."""

    command: Sequence[str]  # after "mergekit-slta"
    output: Path
    inputs: Sequence[str]  # files, and models: a folder or a name on the Hub


@dataclass(frozen=True)
class Plan:
    """What a run makes below its folder."""

    folder: Path
    base: str
    experts: Sequence[str]
    options: Sequence[str]  # that the command was given besides models, folder and prompts
    sources: Mapping[str, str]  # by model: its prompts, a file or dataset
    answers: Sequence[Step]
    recipes: Mapping[str, Step]  # by the merge's name, ``MERGE`` first
    merges: Mapping[str, Step]
    scores: Step

    def command(self, experts: Sequence[str], folder: str) -> str:
        """The command that plans the same for some of the experts."""
        written = {str(step.output) for step in self.answers}
        given = [
            self.sources[model] for model in (*experts, self.base) if self.sources.get(model, "") not in {"", *written}
        ]
        words = [
            "auto",
            self.base,
            *experts,
            "-o",
            folder,
            *(word for file in given for word in ("--calibration", file)),
        ]
        return shlex.join(
            ["mergekit-slta", *words, *["--no-keep-base"] * (self.base not in self.sources), *self.options]
        )


def plan(
    base: str,
    experts: Sequence[str],
    folder: Path,
    calibration: Sequence[str] = (),
    *,
    keep_base: bool = True,
    against: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Plan:
    """Plan a merge by featcal and its rivals.

    Args:
        base: the base model.
        experts: its fine-tunes.
        folder: the folder to write.
        calibration: the experts' prompts in their order, then the base model's; without any, the models answer prompts
            of the package.
        keep_base: whether the base model has a task of its own.
        against: methods to compare with, besides ``RIVALS``.
        options: mergekit's, for every command that opens models.

    Raises:
        SltaError: prompts are given for some of the experts, or for more models than have tasks.
    """
    models = [*experts, *[base] * keep_base]
    if len(calibration) not in {0, len(experts), len(models)}:
        raise SltaError(
            f"--calibration is given {counted(len(calibration), 'time')}: give it once for each expert, in their "
            "order, and once more for the base model if you have prompts for it, or leave it out."
        )
    written = [folder / "answers" / file for file in answer_files(models)]
    sources = dict(zip(models, [*calibration, *map(str, written[len(calibration) :])], strict=True))
    answers = [
        Step([*ask_arguments(model, str(file), model == base), *options], file, [model])
        for model, file in list(zip(models, written, strict=True))[len(calibration) :]
    ]
    new, prompts = ["new", base, *experts], [word for source in sources.values() for word in ("--calibration", source)]
    made = {MERGE: [*new, *prompts]}
    for method in dict.fromkeys((*RIVALS, *against)):
        if method == "task_arithmetic":  # with weight 1, one expert is only copied
            weights = {0.5, round(1 / len(experts), 2)} - {1.0}
            made |= {f"{method}-{w}": [*new, "--method", method, "--weight", str(w)] for w in sorted(weights)}
        elif len(experts) > 1:
            made[method] = [*new, "--method", method]
    recipes = {name: Step(command, folder / "recipes" / f"{name}.yml", []) for name, command in made.items()}
    needed = [base, *experts, *sources.values()]
    merges = {
        name: Step(
            ["merge", str(recipe.output), str(folder / "merged" / name), *options],
            folder / "merged" / name,
            [str(recipe.output), *needed],
        )
        for name, recipe in recipes.items()
    }
    outputs = [str(step.output) for step in merges.values()]
    score = ["evaluate", str(recipes[MERGE].output), *outputs, "--json", str(folder / SCORES), *options]
    inputs = [*needed, *(str(recipe.output) for recipe in recipes.values())]
    more = [*options, *(word for method in against for word in ("--against", method))]
    return Plan(folder, base, experts, more, sources, answers, recipes, merges, Step(score, folder / SCORES, inputs))


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
    written = {str(step.output) for step in planned.answers}
    for model, source in planned.sources.items():
        yield f"Prompts of {model}: {'its own answers to general prompts' if source in written else source}"
    taken = needs(experiment)
    yield str(taken)
    yield f"For the comparison: {as_size(taken.merged * (len(planned.merges) - 1))} more of disk, until it is scored"
    yield f"Time: very roughly {_minutes(planned, experiment):.0f} minutes"


def _minutes(planned: Plan, experiment: Experiment) -> float:
    """The forward passes of all steps at the speed of a product of matrices, for prompts of ``TOKENS`` tokens."""
    factor = torch.randn(1024, 1024, device=experiment.device)
    started = time.perf_counter()
    float((factor @ factor).sum())
    seconds = (time.perf_counter() - started) / 1024**3  # of a product and a sum
    prompts = sum(task.samples for task in experiment.recipe.tasks)
    scored = len(planned.merges) + len(planned.experts) + 1
    passes = PROMPTS * (len(planned.answers) * SLOW + scored * len(planned.sources)) + prompts * SOLVING
    numbers = sum(header.count for header in experiment.model(experiment.recipe.base).tensors.values())
    return passes * TOKENS * numbers * seconds / 60


class Run:
    """The steps of a plan in its folder: those that are done, and those that are run now.

    Args:
        folder: the folder; it is created with the first step.
        run: runs a command, given its words after "mergekit-slta".
        quiet: print no commands.

    Raises:
        SltaError: the folder holds other files.
    """

    def __init__(self, folder: Path, run: Callable[[Sequence[str]], object], quiet: bool = False) -> None:
        self._folder, self._run, self._quiet = folder, run, quiet
        known = (folder / STEPS).is_file()
        if not known and folder.is_dir() and any(folder.iterdir()):
            raise SltaError(f"{folder} holds files that `auto` has not written: name another folder.")
        self._marks: dict[str, str] = json.loads((folder / STEPS).read_bytes()) if known else {}

    def is_done(self, step: Step) -> bool:
        """Whether a step's output is there, made by the same command from the same inputs."""
        return step.output.exists() and self._marks.get(str(step.output)) == _mark(step)

    def take(self, step: Step, without: Collection[str] = ()) -> None:
        """Run a step, unless it is done; words of its command may be left out."""
        done = self.is_done(step)
        command = [word for word in step.command if word not in without]
        self.say(f"$ {shown(step._replace(command=command))}{'   # done before' * done}")
        if done:
            return
        step.output.parent.mkdir(parents=True, exist_ok=True)
        if step.command[0] == "ask":
            step.output.unlink(missing_ok=True)  # of other inputs: `ask` replaces no file
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self._run(command)
        if step.command[0] == "new":
            files.write(step.output, printed.getvalue().encode())
        else:
            self.say(printed.getvalue(), quiet=True)
        self._marks[str(step.output)] = _mark(step)
        files.write(self._folder / STEPS, json.dumps(self._marks, indent=1).encode())

    def say(self, line: str, quiet: bool = False) -> None:
        """Add a line to the log, and print it unless ``quiet``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / LOG).open("a") as log:
            log.write(f"{line}\n")
        if not (quiet or self._quiet):
            click.echo(line, err=True)


def shown(step: Step) -> str:
    """A step as one could type it."""
    command = shlex.join(["mergekit-slta", *step.command])
    return f"{command} > {shlex.quote(str(step.output))}" if step.command[0] == "new" else command


def _mark(step: Step) -> str:
    """A hash of a step's command, and of the sizes and times of its input files."""
    return files.digest([*step.command, *(list(_stamps(name)) for name in step.inputs)])


def _stamps(name: str) -> Iterator[tuple[str, int, int]]:
    """The files of an input, a model's with those of its adapter; none of a name on the Hub."""
    for part in name.split("+"):
        path = Path(part).expanduser()
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                yield str(file), file.stat().st_size, file.stat().st_mtime_ns


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


@dataclass(frozen=True)
class Verdict:
    """What the scores say."""

    lines: Sequence[str]  # the last one is the next step
    best: str  # the merge to take

    def to_json(self) -> str:
        """The sentences and the merge as JSON; ``scores.json`` has the numbers."""
        return as_json(asdict(self))


def verdict(scores: Mapping[str, Any], planned: Plan) -> Verdict:
    """Judge the merges by the scores that ``evaluate`` has written.

    A prompt counts 1 or 0, by whether a model gives its answer; where most answers of a task are long, the share of the
    answer's tokens that the model gives. Of two models, one is better by more than chance if the 95 % interval of the
    paired difference, the mean over the tasks, is above zero.
    """
    tasks = {title: Task(title, **task) for title, task in scores["tasks"].items()}
    every = list(tasks.values())
    named = [name for name in planned.merges if name in every[0].points]
    rival = max(named[1:], key=lambda name: sum(task.mean(name) for task in every), default="")
    ahead, error = lead(every, MERGE, rival) if rival else (1.0, 0.0)
    better = ahead > error
    lines = [f"{MERGE} gives, of the {task.counted}: {task.words(MERGE)}." for task in every]
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
    """A task's scores.

    Attributes:
        title: its name.
        own: the name of its own model.
        points: by model, those of each prompt.
        counted: what they count, in words.
    """

    def __init__(self, title: str, shares: Mapping[str, Sequence[float]], prompts: int, short_answers: int, **_: Any):
        short = 2 * short_answers > prompts
        self.title, self.own = title, BASE if title == KEEP else f"expert {title}"
        self.points = {model: [float(share == 1) if short else share for share in of] for model, of in shares.items()}
        self.counted = f"{'answers' if short else 'tokens of answers'} on the {prompts} prompts of {title}"

    def mean(self, model: str) -> float:
        return fmean(self.points[model])

    def words(self, model: str) -> str:
        """What a model gives, with its 95 % interval, and what the task's own model gives."""
        low, high = interval(self.mean(model), len(self.points[model]))
        whose = "base model" if self.title == KEEP else "expert"
        share, limits = as_score(self.mean(model)), f"{as_score(low)} to {as_score(high)}"
        return f"{share} ({limits}; {whose} {as_score(self.mean(self.own))})"


def lead(tasks: Sequence[Task], first: str, second: str) -> tuple[float, float]:
    """How many more points one model has than another, the mean over tasks, and half of the 95 % interval."""
    pairs = [[a - b for a, b in zip(task.points[first], task.points[second], strict=True)] for task in tasks]
    error = sum(variance(pair) / len(pair) if len(pair) > 1 else 1.0 for pair in pairs) ** 0.5 / len(pairs)
    return fmean(map(fmean, pairs)), Z * error


def _next(tasks: Mapping[str, Task], best: str, planned: Plan) -> str:
    """What the numbers suggest, and the command for it."""
    experts = [task for title, task in tasks.items() if title != KEEP]
    recipe, taken = (shlex.quote(str(step.output)) for step in (planned.recipes[MERGE], planned.merges[best]))
    again = f"&& {planned.command(planned.experts, str(planned.folder))}"
    weakest = min(tasks.values(), key=lambda task: task.mean(MERGE) / max(task.mean(task.own), 1e-9))
    for task, model in zip(experts, planned.experts, strict=False):
        ahead, error = lead([task], task.own, BASE)
        if ahead <= error and len(experts) > 1:
            others = planned.command([expert for expert in planned.experts if expert != model], "FOLDER")
            return f"leave {task.title} out, which is no better than the base model on its own prompts: {others}"
    if best != MERGE:
        return f"take {best}, since the experts hardly interfere: mergekit-slta publish {taken} ORG/NAME"
    if weakest.mean(MERGE) >= ENOUGH * weakest.mean(weakest.own):
        return f"mergekit-slta publish {taken} ORG/NAME"
    if weakest.title == KEEP:
        return f"count the base model's prompts more: sed -i 's/weight: 1.0 /weight: 2.0 /' {recipe} {again}"
    return f"calibrate with more prompts: sed -i 's/samples: 30 /samples: 60 /' {recipe} {again}"
