"""``auto``: from the names of models to a scored merge and a verdict, by the other commands.

Each step is a command, printed as one could type it, that writes one output below one folder. ``steps.json`` there has
a hash of each finished step's command, code and inputs: a step whose hash is as it was, and whose output is there, is
not run again.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from mergekit.common import ModelPath, ModelReference
from pydantic import TypeAdapter

from mergekit_slta import __version__, files
from mergekit_slta.checks.examine import examine, first_sample, none_to_evaluate
from mergekit_slta.checks.space import asking, needs, not_overwritten
from mergekit_slta.errors import MachineError, SltaError, as_note, is_disk_full, one_line, refuse
from mergekit_slta.evaluation.evaluate import BASE, FEW, Comparison, TaskComparison, interval, lead, own_model
from mergekit_slta.evaluation.scores import lacking
from mergekit_slta.models.headers import open_model
from mergekit_slta.output.companions import finish_folder
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.new import answer_files, ask_arguments, new_recipe, require_sources
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.tables import as_size
from mergekit_slta.words import as_score, enumerated, plain_number

MERGE = "featcal"  # the merge that the others are compared with
STEPS, SCORES, LOG = "steps.json", "scores.json", "log.txt"
ENOUGH = 0.9  # of what the task's own model answers: with less, something may be gained


class Step(NamedTuple):
    """A command and what it needs."""

    command: Sequence[str]  # after "mergekit-slta", without the options of all steps
    output: Path
    inputs: Sequence[str] = ()  # files, and models: a folder or a name on the Hub

    @property
    def mark(self) -> str:
        """A hash of the command, its code, and the sizes and times of its input files; the Hub's are only named."""
        # Also of an adapter, and of a folder with a dataset, whose files may lie in folders below it.
        names = dict.fromkeys(part for name in self.inputs for part in (name, *re.split("[+?]", name)) if part)
        inputs = list[Path]()
        for name in names:
            path, below = Path(name.removeprefix("hf:")).expanduser(), "**/*" if name.startswith("hf:") else "*"
            found = (file for file in path.glob(below) if file.name[0] != ".")  # such as .DS_Store
            inputs += sorted(found) if path.is_dir() else [path]
        stats = [(str(file), file.stat()) for file in inputs if file.is_file()]
        code = [] if self.command[0] in ("new", "ask") else [__version__, files.commit()]  # those may have been edited
        return files.digest([*self.command, *code, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)])


class Plan:
    """The steps of a run, each with its output below a folder; see the command's help for the arguments.

    ``sources`` has each model's prompts, ``answers`` the steps of the models that write theirs. ``recipes`` and
    ``merges`` are by the merge's name, ``MERGE`` first.
    """

    def __init__(
        self, base: str, experts: Sequence[str], folder: Path, calibration: Sequence[str] = (), keep_base: bool = True
    ) -> None:
        require_sources(MERGE, len(experts), len(calibration))
        if not keep_base and len(experts) == 1:
            raise SltaError("--no-keep-base needs several experts: for one, leave the option out, or copy the expert.")
        if not keep_base and len(calibration) > len(experts):
            raise SltaError("--no-keep-base leaves no use for the base model's --calibration: leave one of them out.")
        base, *experts = (re.sub(r"/+(?=\+|$)", "", name) for name in (base, *experts))  # as a shell completes folders
        self.folder, self.base, self.experts = folder, base, experts
        self.options: Sequence[str] = ()  # mergekit's, for every step that opens models
        self.notes: Sequence[str] = ()  # of the check
        models = [*experts, *[base] * keep_base]
        written = dict(zip(models, (folder / "answers" / file for file in answer_files(models)), strict=True))
        self.answers = {
            model: Step(ask_arguments(model, str(written[model]), model == base), written[model], [model])
            for model in models[len(calibration) :]
        }
        answered = {model: str(step.output) for model, step in self.answers.items()}
        self.sources = dict(zip(models, calibration, strict=False)) | answered
        new = ["new", base, *experts]
        given = [f"--calibration={source}" for source in self.sources.values()]
        commands = {MERGE: [*new, f"--report={folder}", *given]}
        for weight in sorted({0.5, round(1 / len(experts), 2)} - {1.0}):  # with weight 1, one expert is only copied
            commands[f"task_arithmetic-{weight}"] = [*new, "--method", "task_arithmetic", "--weight", str(weight)]
        if len(experts) > 1:
            commands["actmat"] = [*new, "--method", "actmat"]
        self.recipes = {name: Step(words, folder / "recipes" / f"{name}.yml") for name, words in commands.items()}
        self.merges, models = dict[str, Step](), [base, *experts, *self.sources.values()]
        for name, recipe in self.recipes.items():
            file, out = str(recipe.output), folder / "merged" / name
            self.merges[name] = Step(["merge", file, str(out)], out, [file, *models])
        score = ["evaluate", str(self.recipes[MERGE].output), *(str(step.output) for step in self.merges.values())]
        inputs = [*models, *(str(recipe.output) for recipe in self.recipes.values())]
        self.scores = Step([*score, "--json", str(folder / SCORES)], folder / SCORES, inputs)

    def checked(self, options: Mapping[str, Any], written: bool, dry_run: bool = False) -> Experiment:
        """Open the main merge's recipe, and refuse what ``check`` refuses, and files without a prompt to evaluate.

        Answers that are still to be written are not looked at. ``written`` says whether the recipe's file, which may
        have been edited, is of this plan.
        """
        file = self.recipes[MERGE].output
        text = new_recipe(self.base, self.experts, calibration=[*self.sources.values()], report=str(self.folder))
        experiment = Experiment(Recipe.load(file) if written else Recipe.parse(text, str(file)), **options)
        answers = [str(step.output) for step in self.answers.values()]
        unwritten = [file for file in answers if not Path(file).exists()]
        if (method := experiment.recipe.config.merge_method) != MERGE:
            raise SltaError(f"{file} has another method, {method}: merge it with mergekit-yaml, or delete it.")
        try:
            named = [name for task in experiment.recipe.tasks for name in (task.calibration, task.evaluation)]
            merge, scores = self.merges[MERGE], self.scores  # of the recipe's sources, which may be others than these
            self.merges[MERGE] = merge._replace(inputs=[*merge.inputs, *named])
            self.scores, out = scores._replace(inputs=[*scores.inputs, *named]), merge.output
            self.notes = examine(experiment, out_path=out, unwritten=unwritten, downloading=not dry_run)
            alike = sorted(self.merges.keys() & experiment.recipe.names.values())
            refuse(
                f"A model and a merge of this run are both called {name}: rename the model's folder." for name in alike
            )
            given = [task for task in experiment.recipe.tasks if task.calibration not in answers]
            refuse(note for task in given for note in none_to_evaluate(experiment, task))
        except SltaError as error:
            if isinstance(error, MachineError) or not file.exists():
                raise
            where = f"(The recipe with these settings is {file}: after an edit, give the same command again.)"
            other = f"{file} is of another command: delete it, and it is written anew, for you to edit."
            raise type(error)(*error.sentences, where if written else other) from error
        for step in self.merges.values():  # an expert may be a merge of an earlier run
            not_overwritten(map(experiment.model, experiment.recipe.references), step.output)
        return experiment

    def described(self, experiment: Experiment) -> Iterator[str]:
        """What a run is going to do and what it takes, a line each."""
        others = enumerated([*self.merges][1:])
        yield f"Merge {enumerated(self.experts)}, fine-tuned from {self.base}, by {MERGE}; compare with {others}."
        yield from map(as_note, self.notes)
        for model, source in self.sources.items():
            general = f"its own answers to general prompts{', good or bad' * (model != self.base)}"
            yield f"Prompts of {model}: {general if model in self.answers else source}"
        yield from (first_sample(drawn, experiment.samples_tokenizer) for drawn in experiment.drawn.values())
        if any(expert in self.answers for expert in self.experts):
            yield "Questions of each expert's task, which it answers by `ask`, make a better merge: pass --calibration."
        taken = needs(experiment)
        yield str(taken)
        written = [str(step.output) for step in self.answers.values() if not step.output.exists()]
        if tasks := [task for task in experiment.recipe.tasks if task.calibration in written]:
            asked, most = [*map(str, tasks)], max(asking(experiment, task.reference) for task in tasks)
            yield f"First, prompts are answered by {enumerated(asked)}, loaded whole: up to {as_size(most)} of memory."
        yield f"Comparison: {as_size(taken.merged * (len(self.merges) - 1))} more disk space until it is done"


class Run:
    """A plan's steps: those that are done, and those that are run now."""

    def __init__(self, plan: Plan, run: Callable[[Sequence[str]], object], quiet: bool = False) -> None:
        """``run`` takes a command's words after "mergekit-slta"; an SltaError if the folder holds other files."""
        self._plan, self._run, self._quiet = plan, run, quiet
        self._steps, folder = plan.folder / STEPS, plan.folder
        others = folder.is_dir() and any(file.name != LOG and file.name[0] != "." for file in folder.iterdir())
        if others and not self._steps.is_file():
            raise SltaError(f"{folder} holds files that `auto` has not written: name another folder.")
        self._taken = set[Path]()  # the outputs of this run
        self._marks = dict[str, str]()
        with contextlib.suppress(OSError, ValueError):  # it is new, or was lost with the power
            self._marks = json.loads(self._steps.read_bytes())

    def is_done(self, step: Step) -> bool:
        """Whether a step's output is there, made by the same command from the same inputs, or answers by the user."""
        made = self._marks.get(str(step.output), step.mark if step.command[0] == "ask" else "")
        return step.output.exists() and made == step.mark

    def outdated(self) -> list[str]:
        """The merges that an earlier run has finished, of which another version, command or input is wanted now."""
        merges = {str(step.output): step.mark for step in self._plan.merges.values()}
        return [output for output, mark in merges.items() if self._marks.get(output, mark) != mark]

    def take(self, step: Step, without: Collection[str] = ()) -> None:
        """Run a step, unless it is done; words of its command may be left out."""
        if step.output in self._taken:
            return
        done, is_recipe, mark = self.is_done(step), step.command[0] == "new", step.mark  # before a run: it takes time
        words = [word for word in step.command if word not in without] + [*self._plan.options] * (not is_recipe)
        into = f" > {shlex.quote(str(step.output))}" if is_recipe else ""
        self.say(f"$ {shlex.join(['mergekit-slta', *words])}{into}{'   # done before' * done}")
        if done:
            return
        if not is_recipe:
            step.output.parent.mkdir(parents=True, exist_ok=True)
        if step.command[0] == "ask" and step.output.exists():  # of other inputs: `ask` replaces no file
            self._set_aside(step.output)
        self._marks.pop(str(step.output), None)  # what is there now is not finished
        self._save()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self._run(words)
        if is_recipe:
            earlier, text = step.output, printed.getvalue().encode()
            if earlier.exists() and earlier.read_bytes() != text:  # it may have been edited
                self._set_aside(earlier)
            files.write(step.output, text)
        else:
            self.say(printed.getvalue(), quiet=True)
        self._taken.add(step.output)
        self._marks[str(step.output)] = mark
        self._save()

    def _save(self) -> None:
        files.write(self._steps, json.dumps(self._marks, indent=1).encode())

    def _set_aside(self, file: Path) -> None:
        self.say(f"{file} is written anew; the earlier one is now {files.set_aside(file)}.")

    def say(self, line: str, quiet: bool = False) -> None:
        """Add a line to the log, and print it unless ``quiet``."""
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        with (self._plan.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")
        if not (quiet or self._quiet):
            click.echo(line, err=True)

    def _tokenizer_of(self, merge: str) -> list[object]:
        """What a merge's recipe says of its tokenizer."""
        config = Recipe.load(self._plan.recipes[merge].output).config
        return [config.tokenizer, config.tokenizer_source, config.chat_template]

    def make(self, experiment: Experiment, keep: bool = False) -> Verdict:
        """Take all steps, and judge the merges; ``experiment`` is the main merge's.

        A rival that fails is reported and left out. The rivals' models are deleted once they are scored, but for the
        one that the verdict recommends, unless all are to ``keep``.
        """
        plan = self._plan
        for step in (*plan.recipes.values(), *plan.answers.values()):
            self.take(step)
        if not (scored := self.is_done(plan.scores) and self.is_done(plan.merges[MERGE])):
            self._marks.pop(str(plan.scores.output), None)  # which are in a merge's manifest, too
        unfinished: dict[str, list[str]] = {}  # what is left to do in the folders of rivals
        for name, step in plan.merges.items() if not scored else ():
            try:
                self.take(step)
                if name != MERGE:
                    if self._tokenizer_of(name) == self._tokenizer_of(MERGE):
                        # mergekit's own methods write a folder that other programs read only in part.
                        unfinished[name] = finish_folder(experiment, step.output)
                    reference = ModelReference(model=ModelPath(path=str(step.output)))
                    refuse(lacking(open_model(reference, "--trust-remote-code" in plan.options)))
            except Exception as error:
                if name == MERGE:
                    raise
                self._marks.pop(str(step.output), None)
                if is_disk_full(error):
                    shutil.rmtree(step.output, ignore_errors=True)  # it leaves no room for the others
                again = f" To try again, delete {plan.scores.output}." * isinstance(error, MachineError)
                self.say(f"{name} failed and is left out ({one_line(error)}).{again}")
        self.take(plan.scores, {str(step.output) for step in plan.merges.values() if not self.is_done(step)})
        judged = verdict(TypeAdapter(Comparison).validate_json(plan.scores.output.read_bytes()), plan)
        said = unfinished.get(judged.best, [])
        if self._tokenizer_of(judged.best) != self._tokenizer_of(MERGE):
            another = f"{plan.recipes[judged.best].output} sets another tokenizer or chat template than that of {MERGE}"
            said = [f"{another}: edit it, and run auto again."]
        judged = judged._replace(lines=[*judged.lines[:-1], *said, judged.lines[-1]])
        others = [step for name, step in plan.merges.items() if name not in (MERGE, judged.best)]
        for step in others if not keep else ():
            if step.output.exists():
                self._marks.pop(str(step.output), None)  # half of it may stay
                self._save()
                shutil.rmtree(step.output, ignore_errors=True)
                self.say(f"{step.output}, which is not taken, was deleted (--keep keeps it).")
        self.say("\n".join(judged.lines), quiet=True)  # the caller prints them
        return judged


# The verdict


class Verdict(NamedTuple):
    """What the scores say."""

    lines: Sequence[str]  # the last one is the next step
    best: str  # the merge to take


def verdict(comparison: Comparison, plan: Plan) -> Verdict:
    """Judge the merges by the tasks' scores.

    Of two models, one is better by more than chance if the 95 % interval of the paired difference, the mean over the
    tasks, is above zero.
    """
    tasks, every = comparison.tasks, list(comparison.tasks.values())
    rivals = [name for name in plan.merges if name in every[0].points and name != MERGE]
    rival = max(rivals, key=lambda name: sum(task.mean(name) for task in every), default="")
    ahead, error = lead(every, MERGE, rival) if rival else (1.0, 0.0)
    better = ahead > error
    learned = {title: task for title, task in tasks.items() if title == BASE or not _no_better(task, own_model(title))}
    enough = {name: min(_shares(learned, name).values(), default=0.0) >= ENOUGH for name in (MERGE, rival) if name}
    best = MERGE if better or (enough[MERGE] and not enough[rival]) else rival
    lines = [*comparison.lacking, *comparison.doubts]
    for name in dict.fromkeys((MERGE, best)):
        lines += [_sentence(title, task, name) for title, task in tasks.items()]
    if BASE not in [*tasks, *comparison.unscored]:
        lines.append("What the merge keeps of the base model was not measured, because no prompts were given for it.")
    if rival:
        words = f"better than {rival}, the best of the others," if better else f"not better than {rival}"
        low, high = (plain_number(limit, "+.2f") for limit in (max(ahead - error, -1.0), min(ahead + error, 1.0)))
        taken = "" if better else ", so the simpler merge is taken"
        if best == MERGE and not better:
            taken = f", but it alone has {ENOUGH} or more of what each model has learned, so it is taken"
        lines.append(f"{MERGE} is {words} by more than chance (difference: {low} to {high}){taken}.")
    ended = {title: task.scores for title, task in tasks.items() if task.ended_answers >= FEW}
    if on := [
        title for title, of in ended.items() if (of[best].ended or 0) < ENOUGH * (of[own_model(title)].ended or 0)
    ]:
        lines.append(f"On {enumerated(on)}, {best} stops less often after its answers than the task's own model does.")
    alone = max(every[0].experts, key=lambda name: sum(task.mean(name) for task in every))
    ahead_of_one, error = lead(every, best, alone)
    if len(every) > 1 and ahead_of_one <= error:
        lines.append(f"{best} is not better than {alone} alone, on all these prompts, by more than chance.")
    if failed := [name for name in plan.merges if name not in every[0].points]:
        lines.append(f"Not compared, because of an error (see {plan.folder / LOG}): {enumerated(failed)}.")
    place, beside = plan.merges[best].output, f"the tables of scores in {plan.folder / LOG}"
    page = plan.folder / "report.html"
    lines.append(f"The merge is in {place}, {beside}{f', and a report in {page}' * page.is_file()}.")
    return Verdict([*lines, f"Next: {_next(tasks, best, plan)}"], best)


def _sentence(title: str, task: TaskComparison, merge: str) -> str:
    """What a merge gives of a task, with its 95 % interval, and what the task's own model and the base model give.

    Of the base model's own task, whose short answers are those that it gives, what the experts give says more.
    """
    number, share = len(task.points[merge]), task.mean(merge)
    low, high = map(as_score, interval(share, number))
    counts = task.has_accuracy  # tokens of one answer are not independent
    all_tokens = f"tokens of {number} {'answers' if task.answers == task.prompts else 'prompts'}"
    of = f"{number} short answers" if counts else all_tokens
    if counts and title != BASE and number < task.answers:
        of = f"{number} short ones of {task.answers} answers"
    models = [own_model(title), BASE]
    if title == BASE:
        models = task.experts + [BASE] * (not counts)
    others = ", ".join(f"{model} {as_score(task.mean(model))}" for model in models)
    known = f"({f'{low} to {high}; ' * counts}{others})"
    does = "gives" if counts else "predicts"
    return f"{merge} {does} {as_score(share)} of the {of} of {'the ' * (title == BASE)}{title} {known}."


def _no_better(task: TaskComparison, model: str) -> bool:
    """Whether a model is no better at an expert's task than the base model by more than chance."""
    ahead, error = lead([task], model, BASE)
    return ahead <= error


def _shares(tasks: Mapping[str, TaskComparison], merge: str) -> dict[str, float]:
    """What a merge has of what each expert has learned: what the base model does too, of tokens much, is none of it."""
    known = {title: task.mean(BASE) if title != BASE else 0.0 for title, task in tasks.items()}
    own = {title: max(task.mean(own_model(title)) - known[title], 1e-9) for title, task in tasks.items()}
    return {title: (task.mean(merge) - known[title]) / own[title] for title, task in tasks.items()}


def _next(tasks: Mapping[str, TaskComparison], best: str, plan: Plan) -> str:
    """What the numbers suggest, and the command or the edit for it."""
    experts = {title: task for title, task in tasks.items() if title != BASE}
    for title, task in experts.items():
        if _no_better(task, own_model(title)):
            why = "which is no better than the base model by more than chance"
            leave = f", or leave {title} out" * (len(plan.experts) > 1)
            give = f"give {title}, {why}, other prompts: more, harder ones, or in the format of its training"
            return f"{give}{leave}; then run the command again with that change"
    shares, general = _shares(tasks, best), [expert for expert in plan.experts if expert in plan.answers]
    weakest = min(shares, key=shares.__getitem__)
    if shares[weakest] >= ENOUGH:
        words = ["mergekit-slta", "ask", str(plan.merges[best].output), "QUESTIONS.txt", "-o", "REPLIES.jsonl"]
        why = f"since it has {ENOUGH} or more of what each expert has learned"
        why += " (as far as general prompts show)" * bool(general)
        if BASE in tasks and tasks[BASE].has_accuracy:
            why += " and of what the base model gives"
        elif BASE in tasks:  # likely tokens are much the same for all models
            why += " and of the base model's tokens (the experts may have them, too: see above)"
        return f"read some replies of {best}, then publish it, {why}: {shlex.join([*words, *plan.options])}"
    edit = f"in {plan.recipes[MERGE].output}, and run the same command again"
    if weakest == BASE:
        why = f"since the merge gives less than {ENOUGH} of what the base model gives on them"
        if len(plan.experts) == 1:
            where = "double 'samples' in its entry, where its file has 30 others to score,"
            return f"take more of the base model's prompts, {why}: {where} {edit}"
        return f"count the base model's prompts more, {why}: double the base model's 'weight' {edit}"
    if general:
        words = ["mergekit-slta", "ask", general[0], "QUESTIONS.txt", "-o", "ANSWERS.jsonl", *plan.options]
        answered = shlex.join(words)
        return f"write 60 questions of each expert's task, and pass the expert's answers to --calibration: {answered}"
    return f"calibrate with more prompts, where a file has 30 others to score: double 'samples' {edit}"
