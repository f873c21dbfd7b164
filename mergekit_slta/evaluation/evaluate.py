"""Merged models ranked beside the base model and the experts: exact answers, what they lost, and likelihood."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Unpack

import click
from mergekit.common import ModelPath, ModelReference
from mergekit.io.tasks import LoaderCache

from mergekit_slta import files
from mergekit_slta.data.sources import CalibrationData, end_of_turn, is_dataset, source_key, source_name
from mergekit_slta.engine.partial import require_finished
from mergekit_slta.errors import SltaError, one_line, refuse, whole_number
from mergekit_slta.evaluation.scores import Group, Sample, Score, lacking, score_model, scoring_bytes
from mergekit_slta.files import MANIFEST_OF_MERGE, RECIPE_OF_MERGE
from mergekit_slta.layers.trace import on_device
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import Recipe, RecipeOrFile, require_calibration
from mergekit_slta.recipe.settings import CalibrationSettings
from mergekit_slta.tables import Paragraphs, Table, as_json, as_size, short_names
from mergekit_slta.words import as_score, enumerated, plain_number

LOG = logging.getLogger(__name__)

SHORT_ANSWER = 32  # tokens
FEW = 20  # short answers: with fewer, merges that differ only in rounding may be a quarter apart
BASE = "base model"  # its name in tables, and that of its own task
LEAST_GAIN = 0.01  # nats per token
Z = 1.96  # standard errors of a 95 % interval
MORE = (
    "Name test data with `evaluation`, set fewer `samples` in this model's entry, or add prompts (60 or more: 30 "
    "calibrate, the rest is held out)"
)


@dataclass(frozen=True)
class TaskScore:
    """How a model does a task. What is undefined, or a limit of too few answers, is None."""

    accuracy: float | None  # the share of the short answers that greedy decoding gives
    accuracy_low: float | None  # the limits of its 95 % interval (Wilson's)
    accuracy_high: float | None
    # How many short answers the task's expert gives (on the base model's own task, the base model), and this model does
    # not; and the reverse.
    lost: int
    gained: int
    ended: float | None  # of the answers that an end token of any model ends, the share after which this one ends, too
    token_accuracy: float  # the share of the answers' tokens that are the likeliest, with the answer's own before them
    # The share of the expert's gain in likelihood over the base model that this model keeps; on the base model's task
    # that of its lead over the experts' mean.
    gain_kept: float | None
    loss: float  # negative log-likelihood per token of the answers, in nats; where none is known, of all tokens


@dataclass(frozen=True)
class TaskComparison:
    """How the models do an expert's task, or the base model's own."""

    model: str  # the expert, or the base model
    prompts: int  # that are held out
    answers: int  # of them, those with a known answer; of the others all tokens are predicted
    short_answers: int  # of at most ``SHORT_ANSWER`` tokens; on the base model's own task, those that it gives
    ended_answers: int  # with an end token after them
    tokens: int  # that were predicted
    scores: dict[str, TaskScore]  # by the models' names
    # By them, a number for each prompt that counts: the mean is the accuracy, or of few answers the token accuracy.
    points: dict[str, list[float]] = field(default_factory=dict)
    source: str = ""  # of the prompts
    sha256: str = ""  # of their tokens

    @property
    def has_accuracy(self) -> bool:
        """Whether there are enough short answers for one."""
        return self.short_answers >= FEW

    @property
    def experts(self) -> list[str]:
        """The experts among the models, by their names in tables."""
        return [name for name in self.points if name.startswith(own_model(""))]

    def mean(self, model: str) -> float:
        return fmean(self.points[model])


@dataclass(frozen=True, repr=False)
class Comparison(Paragraphs):
    """Merged models beside the base model and the experts; printed, it is tables."""

    tasks: dict[str, TaskComparison]  # by the experts' short names, in the recipe's order; then the base model's own
    unscored: tuple[str, ...] = ()  # the tasks without a prompt to score, by the same names

    @property
    def ranking(self) -> dict[str, TaskScore]:
        """Each model's means over the tasks where they are defined: the most accurate first, then the most gain kept.

        Lost and gained answers are summed. Where a task has few short answers, the gain kept decides alone, and the
        mean accuracy is without that task. Of the gain kept, a task counts by the gain.
        """
        tasks = list(self.tasks.values())
        losses = ({name: score.loss for name, score in task.scores.items()} for task in tasks)
        limits = list(map(_limits, self.tasks, losses))
        means = {}
        for name in tasks[0].scores:
            scores = [task.scores[name] for task in tasks]
            accuracy = _mean(task.scores[name].accuracy for task in tasks if task.has_accuracy)
            sums: dict[str, Any] = {of: sum(getattr(score, of) for score in scores) for of in ("lost", "gained")}
            others = ("ended", "token_accuracy", "loss")
            averages: dict[str, Any] = {of: _mean(getattr(score, of) for score in scores) for of in others}
            gains = [worse - better for worse, better in limits if worse > better]
            kept = [worse - score.loss for (worse, better), score in zip(limits, scores, strict=True) if worse > better]
            averages["gain_kept"] = sum(kept) / sum(gains) if gains else None
            means[name] = TaskScore(accuracy, None, None, **sums, **averages)

        def rank(name: str) -> tuple[float, ...]:
            return (
                -(means[name].accuracy or 0.0) * self._by_answers,
                -(means[name].gain_kept or 0.0),
                means[name].loss,
            )

        return {name: means[name] for name in sorted(means, key=rank)}

    @property
    def _by_answers(self) -> bool:
        return all(task.has_accuracy for task in self.tasks.values())

    def content(self) -> dict[str, Any]:
        """The numbers by the names of ``TaskScore``, and the ranking; what is undefined is None."""
        return asdict(self) | {"ranking": [{"model": name, **asdict(mean)} for name, mean in self.ranking.items()]}

    @property
    def lacking(self) -> list[str]:
        """A sentence on the tasks that are not scored, if there are any."""
        names = enumerated(self.unscored)
        return [f"Not scored, because all prompts calibrate: {names}. {MORE} and merge again."] if names else []

    def parts(self) -> Iterator[str | Table]:
        """The tables, answers first, and sentences that explain them."""
        tasks, ranking = self.tasks, self.ranking
        few = {name: ", too few" * (not task.has_accuracy) for name, task in tasks.items()}
        titles = [f"{name} (n={task.short_answers}{few[name]})" for name, task in tasks.items()]

        def table(cell: Callable[[TaskScore], str], *counts: str, titles: Sequence[str] = [*tasks]) -> Table:
            rows = [
                [name, cell(mean), *(str(getattr(mean, count)) for count in counts)]
                + [cell(task.scores[name]) for task in tasks.values()]
                for name, mean in ranking.items()
            ]
            return Table(["model", "average", *counts, *titles], rows)

        by = "" if self._by_answers else f", by the gain kept, since a task has fewer than {FEW} short answers"
        yield f"On held-out prompts of each task, the best model first{by}:"
        if any(task.short_answers for task in tasks.values()):
            yield (
                f"Accuracy: the share of n answers (of at most {SHORT_ANSWER} tokens) that a model gives exactly, with "
                f"a 95 % interval; with n below {FEW}, a task has no interval and is not in the average. Lost: answers "
                "that the task's expert gives and the model does not. Gained: the reverse"
            )
            yield table(_with_interval, "lost", "gained", titles=titles)
        yield (
            "Token accuracy: how often the next token of an answer is the one that the model finds the likeliest, for "
            "answers of any length"
        )
        yield table(lambda score: as_score(score.token_accuracy))
        if any(mean.ended not in (None, 1) for mean in ranking.values()):
            yield "Ended: the share of the answers with an end token after which a model ends, too"
            yield table(lambda score: as_score(score.ended))
        if any(mean.gain_kept is not None for mean in ranking.values()):
            yield (
                "Gain kept: the share of the expert's gain in likelihood (0 = base model, 1 = expert, below 0 = "
                "worse than the base model); the average counts a task by its expert's gain; accuracy may differ"
            )
            yield table(lambda score: as_score(score.gain_kept))
        yield "Loss: negative log-likelihood per token of the answers (of all tokens without one); lower is better"
        yield table(lambda score: plain_number(score.loss, ".4f"))
        counts = ("prompts", "answers", "short_answers", "ended_answers", "tokens")
        rows = [[name, *(str(getattr(task, count)) for count in counts)] for name, task in tasks.items()]
        yield Table(["task", *(count.replace("_", " ") for count in counts)], rows)
        yield from self._notes()

    def _notes(self) -> Iterator[str]:
        """Sentences on tasks that need one."""
        yield from self.lacking
        if keep := self.tasks.get(BASE):
            yield (
                "On the base model's prompts, the gain kept is 1 for the base model and 0 for the experts' mean. Lost "
                "and gained answers compare with the base model, and accuracy counts only the answers that it gives."
            )
            if keep.scores[BASE].gain_kept is None:
                yield "By likelihood, the experts are hardly or no worse there, so it does not show what is kept."
        tasks = self.tasks
        experts = {name: task for name, task in tasks.items() if name != BASE}
        if long := [name for name, task in experts.items() if task.answers and not task.short_answers]:
            yield f"No accuracy on {', '.join(long)}: all answers have more than {SHORT_ANSWER} tokens."
        if keep and keep.answers and not keep.short_answers:
            yield f"No accuracy on {BASE}: it gives no answer of at most {SHORT_ANSWER} tokens exactly."
        if idle := [name for name, task in experts.items() if task.scores[BASE].gain_kept is None]:
            on = ", ".join(idle)
            yield f"By likelihood, the expert is hardly or no better than the base model, so it has no gain, on: {on}."
        yield from self.doubts

    @property
    def doubts(self) -> Iterator[str]:
        """Sentences on prompts that do not seem to be those of their models."""
        experts = {name: task for name, task in self.tasks.items() if name != BASE}
        for name, task in experts.items():
            if not task.points:
                continue
            best = max(experts, key=lambda other: task.mean(own_model(other)))
            ahead, error = lead([task], own_model(best), own_model(name))
            if ahead > error:
                yield (
                    f"The expert {best} answers the prompts of {name} better than {name} does: does each model have "
                    "the prompts of its own task?"
                )
        highest = {name: task.scores[own_model(name)].accuracy_high for name, task in experts.items()}
        if weak := [name for name, share in highest.items() if share is not None and share < 0.5]:
            yield (
                f"On their own tasks these experts give under half of the short answers: {', '.join(weak)}. Their "
                "prompts may have another format than in training: write that format in a `template`, such as "
                "'{prompt}{completion}' where nothing stands between the two."
            )
        if any(task.answers < task.prompts for task in experts.values()):
            yield (
                "Without a known answer, all tokens of a prompt are scored, which says less. Let the expert write it "
                "(`mergekit-slta ask EXPERT PROMPTS -o FILE`), or give rows with `prompt` and `completion`, or with "
                "`messages`, or a `template` that ends with the answer's field."
            )


def evaluate(
    recipe: RecipeOrFile | Experiment,
    merged: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    samples: int = 100,
    **options: Unpack[Options],
) -> Comparison:
    """Rank merged models, the base model and the experts by their answers on each task.

    The prompts are those of ``evaluation``, or else the next ones of each calibration source, cut at ``max_tokens`` and
    tokenized with one tokenizer for all models: the merged model's if the recipe of ``slta`` or ``featcal`` sets one,
    else the base model's. Each model is run once, in float32, with one decoder layer in memory.

    Args:
        recipe: one for ``slta`` or ``featcal``, or its file, whose experts the merges have, by any method; an opened
            one takes no options.
        merged: the folder that a merge was written to, or several.
        samples: the most prompts of each task.
        options: see ``Options``.

    Returns:
        The scores of all models on each task; printed, it is tables. Those of a merge are added to its ``merge.json``.

    Raises:
        SltaError: an expert has no calibration source, no task has a prompt left, or a model cannot be run by layers.
    """
    samples = whole_number("samples", samples)
    experiment = opened(recipe, options)
    experiment.recipe.settings_class(CalibrationSettings)  # others have no prompts
    outs = [merged] if isinstance(merged, (str, os.PathLike)) else merged
    folders = list(dict.fromkeys(Path(out).expanduser().resolve() for out in outs))
    if not folders:
        raise SltaError("'merged' names no model: give the folders of one or more merged models.")
    for folder in folders:
        require_finished(folder)
    require_calibration(experiment.recipe)
    experts = experiment.recipe.experts
    experiment.load_data(experiment.recipe.tasks)  # refuses the same data twice, and tells what the merge has seen
    titles = short_names([str(expert) for expert in experts])
    tasks = dict(zip([*titles, BASE], experiment.recipe.tasks, strict=False))  # the base model's own need not be there
    recipes = _calibrated(experiment, folders)
    held_out = {title: experiment.held_out(task, samples, recipes) for title, task in tasks.items()}
    ends = _end_tokens(experiment)
    groups = {title: group for title, data in held_out.items() if (group := _samples_of(data, ends))}
    experiment.sources.clear()
    if not groups:
        raise SltaError(f"There is no prompt to evaluate on, because calibration uses all. {MORE} and merge again.")
    names = [BASE, *map(own_model, titles)]
    taken = {*names, *experiment.recipe.names.values()}
    merges = [folder.name for folder in folders]
    if len({*merges, *taken}) < len(merges) + len(taken) or any(name.startswith(own_model("")) for name in merges):
        merges = [str(folder) for folder in folders]
    opened_merges = [experiment.model(ModelReference(model=ModelPath(path=str(folder)))) for folder in folders]
    refuse(clause for model in opened_merges for clause in lacking(model))
    results = [*map(Checkpoint, opened_merges)]
    models = dict(zip([*names, *merges], [*experiment.checkpoints, *results], strict=True))
    used = {token for group in groups.values() for sample in group for token in sample.token_ids}
    moved = experiment.other_tokens(*(model.reference for model in models.values()), used=used)
    refuse(f"The {clause}: compare only models with the base model's ids." for clause in moved)
    samples_of, device, quiet = list(groups.values()), experiment.device, experiment.quiet
    if not quiet:
        nbytes = scoring_bytes(on_device(experiment.decoder, device), samples_of)
        click.echo(f"Memory: about {as_size(nbytes)}", err=True)
    scores = list[list[list[Score]]]()
    for number, (name, model) in enumerate(models.items(), 1):
        doing = f"Evaluating {name}, {number} of {len(models)} models"
        scores.append(score_model(model, samples_of, device=device, doing=doing, quiet=quiet))
    compared = dict[str, TaskComparison]()
    for (title, group), *by_all in zip(groups.items(), *scores, strict=True):
        by_model, own = dict(zip(models, by_all, strict=True)), experiment.recipe.names[tasks[title].reference]
        of_task, data = _task(title, own, group, by_model, ends), held_out[title]
        compared[title] = replace(of_task, source=source_name(data.source), sha256=data.sha256)
    comparison = Comparison(compared, tuple(title for title in tasks if title not in groups))
    for result in results:
        result.refuse_changes()  # another merge would get the scores
    for folder, name in zip(folders, merges, strict=True):
        _add_scores(folder, name, comparison)
    return comparison


def _add_scores(folder: Path, name: str, comparison: Comparison) -> None:
    """Add a merge's scores to its manifest, if its folder has one that can be read and written."""
    file, scores = folder / MANIFEST_OF_MERGE, dict[str, dict[str, Any]]()
    for of in comparison.tasks.values():
        scored = {key: getattr(of, key) for key in ("source", "sha256", "prompts", "short_answers")}
        scores[of.model] = scored | asdict(of.scores[name])
    try:
        files.write(file, as_json(json.loads(file.read_bytes()) | {"scores": scores}).encode())
    except FileNotFoundError:  # of a merge by one of mergekit's own methods
        return
    except (OSError, ValueError, TypeError) as error:
        LOG.warning("The scores could not be added to %s (%s).", file, one_line(error))


def _calibrated(experiment: Experiment, folders: Sequence[Path]) -> list[Recipe]:
    """The recipes of the merges that used prompts, which may be others than the given recipe's.

    An SltaError where they would not be drawn again, because a source of held-out prompts has changed since the merge.
    """
    recipes, changed = list[Recipe](), list[str]()
    held_out = {source_key(task.evaluation or task.calibration) for task in experiment.recipe.tasks}
    for folder in folders:
        with contextlib.suppress(SltaError):  # without a recipe, or one of another program
            recipe = Recipe.load(folder / RECIPE_OF_MERGE)
            if recipe.settings.runs_models and recipe.tasks:
                recipes.append(recipe)
                if len(folders) == 1 and _differ(recipe, experiment.recipe):
                    LOG.warning("%s was merged with other settings than those of the given recipe.", folder)
                changed += [
                    f"The prompts {source!r} are not those that calibrated {folder}: they have changed since, and some "
                    "of them may have calibrated it, or it was merged from another file of this name. Merge again, "
                    "rename the file, or name other test data with `evaluation`."
                    for source in _changed_sources(recipe, folder, experiment, held_out)
                ]
    LoaderCache().setup(experiment.options)  # which each ``Experiment`` sets
    refuse(changed)
    return recipes


def _differ(merged: Recipe, given: Recipe) -> bool:
    """Whether two recipes of one method have other settings, or their models other numbers of prompts or weights."""
    if merged.config.merge_method != given.config.merge_method:
        return False
    settings, other = (recipe.settings.model_dump(exclude={"report", "statistics"}) for recipe in (merged, given))
    tasks, others = (sorted((task.samples, task.weight) for task in recipe.tasks) for recipe in (merged, given))
    return (settings, tasks) != (other, others)


def _changed_sources(
    recipe: Recipe, folder: Path, experiment: Experiment, held_out: Collection[tuple[str, ...]]
) -> Iterator[str]:
    """Sources of held-out prompts from which a merge's recipe draws others now, by the manifest in its folder."""
    of_merge = Experiment(recipe, **experiment.options.model_dump())
    known, unread = {data.sha256 for data in experiment.drawn.values()}, dict[str, None]()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tasks = json.loads((folder / MANIFEST_OF_MERGE).read_bytes())["tasks"]
        drawn = {task["model"]: task["sha256"] for task in tasks if task["sha256"] not in known}
        for task in recipe.tasks:
            shared = source_key(task.calibration) in held_out
            if is_dataset(task.calibration) and not shared:  # somebody else's may be large
                continue
            if (before := drawn.get(recipe.names[task.reference])) is not None:
                try:
                    now = of_merge.source(task, task.calibration).draw(task.samples, quiet=True)
                except SltaError:
                    unread[task.calibration or "A source of prompts that its recipe does not name"] = None
                    continue
                if shared and now.sha256 != before:
                    yield task.calibration
    for source in unread:
        LOG.warning("%s cannot be read: held-out prompts may have calibrated %s.", source, folder)


def _end_tokens(experiment: Experiment) -> set[int]:
    """The ids of the tokens at which the base model or an expert ends, by their tokenizers."""
    ends, ids = set[str | None](), experiment.samples_tokenizer.get_vocab()
    for reference in experiment.recipe.references:
        with contextlib.suppress(SltaError):  # some folders lack a tokenizer
            tokenizer = experiment.tokenizer(reference)
            ends |= {tokenizer.eos_token, end_of_turn(tokenizer)}
    return {ids[token] for token in ends if token in ids}


def _samples_of(data: CalibrationData, ends: Collection[int]) -> Group:
    """A task's held-out records, to predict their answers as far as they are in the row, or all tokens without one."""
    group = list[Sample]()
    for row, answer in zip(data.token_ids, data.answers, strict=True):
        begin, end = answer or (1, len(row))
        if answer and end - begin > 1 and end <= len(row) and row[end - 1] in ends:
            end -= 1  # where ``ask`` has written it into the answer
        if len(row) > 1:  # otherwise nothing can be predicted
            known = answer is not None
            group.append(Sample(row, begin, min(end, len(row)), known, known and end <= len(row)))
    return group


def _task(
    title: str, model: str, group: Group, scores: Mapping[str, Sequence[Score]], end_tokens: Collection[int]
) -> TaskComparison:
    """A task's comparison, from the scores of its records by every model."""
    tokens = sum(sample.length for sample in group)
    losses = {name: sum(score.loss for score in of_records) / tokens for name, of_records in scores.items()}
    worse, better = _limits(title, losses)
    short = {index for index, sample in enumerate(group) if sample.whole and sample.length <= SHORT_ANSWER}
    ended = [index for index, sample in enumerate(group) if sample.end_token in end_tokens]
    right = {name: [*map(Score.right, of_records, group)] for name, of_records in scores.items()}
    exact = {name: {index for index in short if right[name][index] == group[index].length} for name in scores}
    exact_by_teacher = exact[own_model(title)]
    if title == BASE:
        short = exact_by_teacher

    def of_model(name: str) -> TaskScore:
        accuracy = len(exact[name] & short) / len(short) if short else None
        low, high = (None, None) if accuracy is None or len(short) < FEW else interval(accuracy, len(short))
        lost, gained = len(exact_by_teacher - exact[name]), len(exact[name] - exact_by_teacher)
        stops = _mean(float(scores[name][index].likeliest[-1] in end_tokens) for index in ended)
        kept = (worse - losses[name]) / (worse - better) if worse > better else None
        return TaskScore(accuracy, low, high, lost, gained, stops, sum(right[name]) / tokens, kept, losses[name])

    results, answers = {name: of_model(name) for name in scores}, sum(sample.known for sample in group)
    points = {name: [count * len(group) / tokens for count in counts] for name, counts in right.items()}
    if len(short) >= FEW:
        points = {name: [float(index in exact[name]) for index in sorted(short)] for name in right}
    return TaskComparison(model, len(group), answers, len(short), len(ended), tokens, results, points)


def _limits(title: str, losses: Mapping[str, float]) -> tuple[float, float]:
    """The losses at which the gain kept is 0, the base model's (on its own task the experts' mean), and 1.

    They are the same where the gain is next to nothing: a share of that is chance.
    """
    experts = [loss for name, loss in losses.items() if name.startswith(own_model(""))]
    worse, better = fmean(experts) if title == BASE else losses[BASE], losses[own_model(title)]
    return worse, better if worse - better > LEAST_GAIN else worse


def interval(share: float, number: int) -> tuple[float, float]:
    """The limits of the 95 % interval of a share of a number of answers, by Wilson (1927)."""
    middle, scale = share + Z * Z / (2 * number), 1 + Z * Z / number
    half = Z * math.sqrt(share * (1 - share) / number + (Z / (2 * number)) ** 2)
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)  # but for rounding within 0 and 1


def lead(tasks: Sequence[TaskComparison], first: str, second: str) -> tuple[float, float]:
    """How many more points one model has than another, the mean over tasks, and half of the 95 % interval."""
    pairs = [[a - b for a, b in zip(task.points[first], task.points[second], strict=True)] for task in tasks]
    # With the largest difference once more in each direction, or few prompts would seem to decide (Bonett and Price).
    wider = [[*pair, most, -most] for pair in pairs for most in [max(map(abs, pair))]]
    error = sum(variance(pair) / len(pair) for pair in wider) ** 0.5 / len(pairs)
    return fmean(map(fmean, wider)), Z * error


def _with_interval(score: TaskScore) -> str:
    """An accuracy with its interval, if it has one; a mean has none."""
    if score.accuracy_low is None:
        return as_score(score.accuracy)
    return f"{as_score(score.accuracy)} ({as_score(score.accuracy_low)}–{as_score(score.accuracy_high)})"


def own_model(title: str) -> str:
    """The name in tables of the model whose task it is."""
    return BASE if title == BASE else f"expert {title}"


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is defined; None without such."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
