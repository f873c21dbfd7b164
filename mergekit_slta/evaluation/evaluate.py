"""Merged models ranked beside the base model and the experts: exact answers, what they lost, and likelihood."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, SupportsIndex, Unpack

from mergekit.common import ModelPath, ModelReference
from transformers import PreTrainedTokenizerBase

from mergekit_slta.data.records import Span
from mergekit_slta.errors import SltaError, whole_number
from mergekit_slta.evaluation.scores import Group, Sample, Score, score_model
from mergekit_slta.files import RECIPE_OF_MERGE
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import Recipe, RecipeOrFile, Task, data_of, loaded, published_name, require_calibration
from mergekit_slta.tables import Paragraphs, Table, as_json, short_names
from mergekit_slta.words import as_score, enumerated

SHORT_ANSWER = 32  # tokens
BASE, KEEP = "base", "base model"  # the model's name in tables, and that of its own task
# The fields of a TaskScore in tables of pandas.
COLUMNS = ("accuracy", "lost answers", "gained answers", "form kept", "gain kept", "negative log-likelihood")
MORE = "Add prompts (60 or more: 30 calibrate, the rest is for `evaluate`), or name test data with `evaluation`."


@dataclass(frozen=True)
class TaskScore:
    """How a model does a task.

    Attributes:
        exact: the share of the short answers that greedy decoding gives; None where no prompt has one.
        lost: how many short answers the task's expert gives (on the base model's own task, the base model), and this
            model does not.
        gained: how many short answers this model gives, and the task's expert does not.
        form: the share of the answers with a form that keep it; None where no answer has one.
        kept: the share of the expert's gain in likelihood over the base model that the model keeps, on the base model's
            own task that of its lead over the experts' mean; None without a gain.
        loss: negative log-likelihood per token of the answers, in nats; where no answer is known, of all tokens.
    """

    exact: float | None
    lost: int
    gained: int
    form: float | None
    kept: float | None
    loss: float


@dataclass(frozen=True)
class TaskComparison:
    """How the models do an expert's task, or the base model's own.

    Attributes:
        model: the expert, or the base model.
        records: how many held-out prompts were used.
        known: how many of them have a known answer; of the others all tokens are predicted.
        answers: how many have a short answer, of at most ``SHORT_ANSWER`` tokens; on the base model's own task, only
            those count that the base model gives.
        forms: how many answers have a form: they close ``</think>``, are JSON, or a special token ends them.
        tokens: how many tokens were predicted.
        scores: each model's score.
    """

    model: str
    records: int
    known: int
    answers: int
    forms: int
    tokens: int
    scores: dict[str, TaskScore]


@dataclass(frozen=True, repr=False)
class Comparison(Paragraphs):
    """Merged models beside the base model and the experts; printed, it is tables.

    Attributes:
        tasks: by the short names of the experts, in the recipe's order; then the base model's own, if it has one.
        unscored: the tasks without a prompt to score, by the same names.
    """

    tasks: dict[str, TaskComparison]
    unscored: tuple[str, ...] = ()

    @property
    def ranking(self) -> dict[str, TaskScore]:
        """Each model's means over the tasks where they are defined: the most exact answers first, then the most kept.

        Lost and gained answers are summed. Where a task's records have no short answers, what is kept decides alone.
        """
        tasks = list(self.tasks.values())
        by_answers = all(task.answers for task in tasks)
        means = {}
        for name in tasks[0].scores:
            scores = [task.scores[name] for task in tasks]
            lost, gained = sum(score.lost for score in scores), sum(score.gained for score in scores)
            exact, form, kept = (_mean(getattr(score, of) for score in scores) for of in ("exact", "form", "kept"))
            means[name] = TaskScore(exact, lost, gained, form, kept, sum(score.loss for score in scores) / len(scores))

        def rank(name: str) -> tuple[float, ...]:
            return (-(means[name].exact or 0.0) * by_answers, -(means[name].kept or 0.0), means[name].loss)

        return {name: means[name] for name in sorted(means, key=rank)}

    def columns(self) -> dict[str, list[Any]]:
        """The columns of ``to_frame``: a row for each model on each task, the best model first."""
        models = list(self.ranking)
        scores = [task.scores[model] for model in models for task in self.tasks.values()]
        rows = [[math.nan if value is None else value for value in astuple(score)] for score in scores]
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        return {"model": [model for model in models for _ in self.tasks], "task": [*self.tasks] * len(models)} | columns

    def to_json(self) -> str:
        """The numbers as JSON; what is undefined is null."""
        return as_json(
            asdict(self) | {"ranking": [{"model": name, **asdict(mean)} for name, mean in self.ranking.items()]}
        )

    def parts(self) -> Iterator[str | Table]:
        """The tables, answers first, and sentences that explain them."""
        tasks, ranking = self.tasks, self.ranking

        def table(cell: Callable[[TaskScore], str], *counts: str) -> Table:
            rows = [
                [name, cell(mean), *(str(getattr(mean, count)) for count in counts)]
                + [cell(task.scores[name]) for task in tasks.values()]
                for name, mean in ranking.items()
            ]
            return Table(["model", "average", *counts, *tasks], rows)

        yield "On held-out prompts of each task, the best model first:"
        if any(task.answers for task in tasks.values()):
            yield (
                f"Accuracy: the share of answers (of at most {SHORT_ANSWER} tokens) that a model gives exactly. Lost: "
                "answers that the task's expert gives and the model does not. Gained: the reverse"
            )
            yield table(lambda score: as_score(score.exact), "lost", "gained")
        if any(task.forms for task in tasks.values()):
            form = "the form of the answers (a closing </think>, valid JSON, an end token)"
            if all(mean.form == 1 for mean in ranking.values()):
                yield f"All models keep {form}"
            else:
                yield f"Share of the answers in which a model keeps {form}"
                yield table(lambda score: as_score(score.form))
        if any(mean.kept is not None for mean in ranking.values()):
            yield (
                "Share of the expert's gain in likelihood (0 = base model, 1 = expert, below 0 = "
                "worse than the base model); accuracy may differ"
            )
            yield table(lambda score: as_score(score.kept))
        yield "Negative log-likelihood per token of the answers (of all tokens where none is known); lower is better"
        yield table(lambda score: f"{score.loss:.4f}")
        counts = [
            [name, *map(str, (of.records, of.known, of.answers, of.forms, of.tokens))] for name, of in tasks.items()
        ]
        yield Table(["task", "prompts", "with an answer", "with a short one", "with a form", "scored tokens"], counts)
        yield from self._notes()

    def _notes(self) -> Iterator[str]:
        """Sentences on tasks that need one."""
        if self.unscored:
            yield f"Not scored, because all prompts calibrate: {enumerated(self.unscored)}. {MORE}"
        if keep := self.tasks.get(KEEP):
            yield (
                "On the base model's prompts, the share of the gain in likelihood is 1 for the base model and 0 for "
                "the experts' mean. Lost and gained answers compare with the base model, and accuracy counts only the "
                "answers that the base model gives."
            )
            if keep.scores[BASE].kept is None:
                yield "The experts do no worse there than the base model, so these prompts cannot show what is kept."
        tasks = self.tasks
        experts = {name: task for name, task in tasks.items() if name != KEEP}
        if long := [name for name, task in tasks.items() if task.known and not task.answers]:
            yield f"No accuracy on {', '.join(long)}: all answers have more than {SHORT_ANSWER} tokens."
        if idle := [name for name, task in experts.items() if task.scores[BASE].kept is None]:
            yield f"The expert is no better than the base model, so its gain is not defined, on: {', '.join(idle)}."
        answered = {name: task.scores[_expert(name)].exact for name, task in experts.items()}
        if weak := {name: share for name, share in answered.items() if share is not None and share < 0.5}:
            yield (
                "These experts give under half of their own task's short answers exactly: "
                f"{', '.join(f'{name} ({as_score(share)})' for name, share in weak.items())}. Their prompts "
                "may have another format than in training: write that format in a `template`, such as "
                "'{prompt}{completion}' where nothing stands between the two."
            )
        if any(task.known < task.records for task in self.tasks.values()):
            yield (
                "Without a known answer, all tokens of a prompt are scored, which says less. Rows with `prompt` and "
                "`completion`, or with `messages`, show the answer, and so does a `template` that ends with its field."
            )


def evaluate(
    recipe: RecipeOrFile | Experiment,
    merged: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    samples: int | SupportsIndex = 100,
    **options: Unpack[Options],
) -> Comparison:
    """Rank merged models, the base model and the experts by their answers on each task.

    The prompts are those of ``evaluation``, or else the next ones of each calibration source, cut at ``max_tokens`` and
    tokenized with the base model's tokenizer for all models. Each model is run once, in float32, with one decoder layer
    in memory.

    Args:
        recipe: a recipe of any method, or its file, with ``calibration`` for each expert; an opened one takes no
            options.
        merged: the folder that a merge was written to, or several.
        samples: the most prompts of each task.
        options: see ``Options``.

    Returns:
        The scores of all models on each task; printed, it is tables.

    Raises:
        SltaError: an expert has no calibration source, no task has a prompt left, or a model cannot be run by layers.
    """
    given = recipe if isinstance(recipe, Experiment) else data_of(loaded(recipe))
    experiment = opened(given, options)
    listed = [merged] if isinstance(merged, (str, os.PathLike)) else merged
    folders = list(dict.fromkeys(Path(folder).expanduser().resolve() for folder in listed))
    if not folders:
        raise SltaError("'merged' names no model: give the folders of one or more merged models.")
    if not any(task.calibration for task in experiment.recipe.tasks):
        raise SltaError(
            "The recipe names no prompts: name one of the same models that has a 'calibration' for each expert, such "
            "as a recipe for featcal."
        )
    require_calibration(experiment.recipe)
    experts = experiment.recipe.experts
    experiment.load_data(experts)  # refuses the same data twice
    count = whole_number("samples", samples)
    titles = short_names([str(expert) for expert in experts])
    tasks = dict(zip([*titles, KEEP], experiment.recipe.tasks, strict=False))  # the base model's own need not be there
    recipes = [*_calibrated(folders)]
    groups = {title: group for title, task in tasks.items() if (group := _held_out(experiment, task, count, recipes))}
    experiment.sources.clear()
    if not groups:
        raise SltaError(f"There is no prompt to evaluate on, because calibration uses all. {MORE}")
    names = [BASE, *map(_expert, titles)]
    taken = {*names, *map(published_name, experiment.recipe.references)}
    merges = [folder.name for folder in folders]
    if len({*merges, *taken}) < len(merges) + len(taken):
        merges = [str(folder) for folder in folders]
    results = [experiment.checkpoint(ModelReference(model=ModelPath(path=str(folder)))) for folder in folders]
    models = dict(zip([*names, *merges], [experiment.base, *experiment.experts, *results], strict=True))
    scores = [
        score_model(
            model,
            list(groups.values()),
            device=experiment.device,
            doing=f"Evaluating {name}, {number} of {len(models)} models",
            quiet=experiment.quiet,
        )
        for number, (name, model) in enumerate(models.items(), 1)
    ]
    tokenizer = experiment.samples_tokenizer
    compared = {
        title: _task(
            title, published_name(tasks[title].reference), group, dict(zip(models, of_task, strict=True)), tokenizer
        )
        for (title, group), *of_task in zip(groups.items(), *scores, strict=True)
    }
    return Comparison(compared, tuple(title for title in tasks if title not in groups))


def _calibrated(folders: Iterable[Path]) -> Iterator[Recipe]:
    """The recipes of the merges that used prompts, which may be others than the given recipe's."""
    for folder in folders:
        with contextlib.suppress(SltaError):  # without a recipe, or one of another program
            recipe = Recipe.load(folder / RECIPE_OF_MERGE)
            if recipe.method.runs_models and recipe.tasks:
                yield recipe


def _held_out(experiment: Experiment, task: Task, samples: int, recipes: Sequence[Recipe]) -> Group:
    """A task's held-out records of which anything can be predicted."""
    data = experiment.held_out(task, samples, recipes)
    return [_sample(row, answer) for row, answer in zip(data.token_ids, data.answers, strict=True) if len(row) > 1]


def _sample(row: tuple[int, ...], answer: Span | None) -> Sample:
    """A record of which the answer is predicted, as far as it is in the row; all tokens where none is known."""
    begin, end = answer or (1, len(row))
    return Sample(row, begin, min(end, len(row)), answer is not None and end <= len(row))


def _task(
    title: str,
    model: str,
    group: Group,
    scores: Mapping[str, Sequence[Score]],
    tokenizer: PreTrainedTokenizerBase,
) -> TaskComparison:
    """A task's comparison, from the scores of its records by every model."""
    tokens = sum(sample.end - sample.begin for sample in group)
    losses = {name: sum(score.loss for score in of_records) / tokens for name, of_records in scores.items()}
    worse, better = losses[BASE], losses.get(_expert(title), 0.0)
    if title == KEEP:
        experts = [loss for name, loss in losses.items() if name.startswith(_expert(""))]
        worse, better = sum(experts) / len(experts), worse
    short = [index for index, one in enumerate(group) if one.whole and one.end - one.begin <= SHORT_ANSWER]
    given = {name: {index for index in short if of[index].gives(group[index])} for name, of in scores.items()}
    before = given[BASE if title == KEEP else _expert(title)]
    counted = given[BASE] if title == KEEP else {*short}
    forms = {
        index: form
        for index, (row, begin, end, whole) in enumerate(group)
        if whole and (form := _form(row[begin:end], row[end : end + 1], tokenizer))
    }

    def of_model(name: str) -> TaskScore:
        exact = len(given[name] & counted) / len(counted) if counted else None
        lost, gained = len(before - given[name]), len(given[name] - before)
        said = [score.likeliest for score in scores[name]]
        kept_form = (form <= _form(said[index][:-1], said[index][-1:], tokenizer) for index, form in forms.items())
        kept = (worse - losses[name]) / (worse - better) if worse > better else None
        return TaskScore(exact, lost, gained, _mean(map(float, kept_form)), kept, losses[name])

    known = sum(sample.begin > 1 for sample in group)
    results = {name: of_model(name) for name in scores}
    return TaskComparison(model, len(group), known, len(counted), len(forms), tokens, results)


def _form(answer: Sequence[int], after: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> set[str | int]:
    """What of an answer's tokens is form: a closing tag, JSON, and the special token after it, if that is one."""
    text = str(tokenizer.decode([*answer], clean_up_tokenization_spaces=False))
    parts = {"</think>": "</think>" in text, "JSON": _is_json(text)}
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return {name for name, there in parts.items() if there} | (special & {*after})


def _is_json(text: str) -> bool:
    """Whether a text is a table or a list in JSON."""
    try:
        return isinstance(json.loads(text), (dict, list))
    except ValueError:
        return False


def _expert(title: str) -> str:
    """The name of an expert in tables."""
    return f"expert {title}"


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is defined; None without such."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
