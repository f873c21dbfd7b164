"""Merged models ranked beside the base model and the experts: exact answers and likelihood."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import transformers
from mergekit.common import ModelPath, ModelReference
from pydantic import TypeAdapter
from tqdm import tqdm

from mergekit_slta import __version__, files
from mergekit_slta.comparison.scores import Group, Sample, Score, score_model
from mergekit_slta.data.records import Span
from mergekit_slta.errors import SltaError, whole_number
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.recipe.experiment import Experiment, opened
from mergekit_slta.recipe.recipe import RecipeOrFile, Task, data_of, loaded, published_name, require_calibration
from mergekit_slta.tables import Paragraphs, Table, as_json, as_percentage, short_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT_ANSWER = 32  # tokens
WIDTH = 100  # characters of a line
NAME_LENGTH = 40  # characters of a model in a table
_SCORES = TypeAdapter(list[list[Score]])


@dataclass(frozen=True)
class TaskScore:
    """How a model does on a task.

    Attributes:
        loss: negative log-likelihood per token of the answers, in nats; where no answer is known, of all tokens.
        exact: the share of the short answers that greedy decoding gives; None where no record has one.
    """

    loss: float
    exact: float | None


@dataclass(frozen=True)
class TaskComparison:
    """How the models do an expert's task, or the base model's own.

    Attributes:
        model: the expert, or the base model.
        records: how many held-out records were used.
        tokens: how many tokens were predicted.
        answers: how many of the records have a short answer, of at most ``SHORT_ANSWER`` tokens.
        base, expert: the base model's score, and the expert's; on the base model's own task the experts' mean.
        experts: every expert's score, in the recipe's order.
        merged: the merged models' scores, in the order in which they were given.
        of_base: whether it is the base model's own task, of whose answers only those count that the base model gives.
        known: how many of the records show where their answer begins; of the others all tokens are predicted.
    """

    model: str
    records: int
    tokens: int
    answers: int
    base: TaskScore
    expert: TaskScore
    experts: tuple[TaskScore, ...]
    merged: tuple[TaskScore, ...]
    of_base: bool = False
    known: int = 0

    def kept(self, score: TaskScore) -> float | None:
        """The share of the expert's gain over the base model that a model with this score keeps; None without a gain.

        On the base model's own task, the share of its lead over the experts.
        """
        worse, better = (self.expert, self.base) if self.of_base else (self.base, self.expert)
        gain = worse.loss - better.loss
        return (worse.loss - score.loss) / gain if gain > 0 else None


@dataclass(frozen=True)
class Standing:
    """A model's scores.

    Attributes:
        model: its name: "base", "expert" and its own, or that of the merge.
        scores: its score on every task.
        shares: the share of the gain that it keeps there.
        exact, kept: the means over the tasks where they are defined; None where there is none.
    """

    model: str
    scores: tuple[TaskScore, ...]
    shares: tuple[float | None, ...]
    exact: float | None
    kept: float | None


@dataclass(frozen=True, repr=False)
class Comparison(Paragraphs):
    """Merged models beside the base model and the experts; printed, it is tables.

    Attributes:
        merged: the names of the merged models.
        tasks: the tasks, in the order of the recipe's experts.
        keep: the base model's own task, if it has one.
    """

    merged: tuple[str, ...]
    tasks: tuple[TaskComparison, ...]
    keep: TaskComparison | None = None

    @property
    def all_tasks(self) -> dict[str, TaskComparison]:
        """The tasks by the short names of their experts, then the base model's own."""
        names = short_names([task.model for task in self.tasks])
        return dict(zip(names, self.tasks, strict=True)) | ({"base model": self.keep} if self.keep else {})

    @property
    def ranking(self) -> list[Standing]:
        """All models, those with the most exact answers on average first; then those that keep most.

        Where the records of a task have no short answers, what is kept decides alone.
        """
        tasks = self.all_tasks
        names = ["base", *(f"expert {name}" for name, task in tasks.items() if not task.of_base), *self.merged]
        scores = zip(*((task.base, *task.experts, *task.merged) for task in tasks.values()), strict=True)
        found = []
        for name, own in zip(names, scores, strict=True):
            shares = tuple(task.kept(score) for task, score in zip(tasks.values(), own, strict=True))
            found.append(Standing(name, own, shares, _mean(score.exact for score in own), _mean(shares)))
        by_answers = all(task.answers for task in tasks.values())

        def rank(model: Standing) -> tuple[float, ...]:
            loss = sum(score.loss for score in model.scores)
            return (-(model.exact or 0.0) * by_answers, -(model.kept or 0.0), loss)

        return sorted(found, key=rank)

    def columns(self) -> dict[str, list[Any]]:
        """The columns of ``to_frame``: a row for each model on each task, the best model first."""
        models, tasks = self.ranking, list(self.all_tasks)
        scores = [score for own in models for score in own.scores]
        return {
            "model": [own.model for own in models for _ in tasks],
            "task": tasks * len(models),
            "exact answers": [math.nan if score.exact is None else score.exact for score in scores],
            "gain kept": [math.nan if share is None else share for own in models for share in own.shares],
            "negative log-likelihood": [score.loss for score in scores],
        }

    def plot(self) -> Figure:
        """Draw each model's short answers, and what it keeps of each expert's gain, the best model first.

        Returns:
            A figure of matplotlib.

        Raises:
            SltaError: there is nothing to draw.
        """
        from mergekit_slta.comparison.figure import draw  # imports matplotlib

        picture = draw(self)
        if picture is None:
            raise SltaError("No expert gains anything on its task and no record has a short answer: nothing to draw.")
        return picture.figure

    def to_json(self) -> str:
        """The numbers as JSON; what is undefined is null."""
        content: dict[str, Any] = {"tasks": [self._content(task) for task in self.tasks]}
        content |= {"keep": self._content(self.keep)} if self.keep else {}
        ranking = [{"model": own.model, "exact": own.exact, "kept": own.kept} for own in self.ranking]
        return as_json(content | {"ranking": ranking})

    def _content(self, task: TaskComparison) -> dict[str, Any]:
        def named(names: Sequence[str], scores: Sequence[TaskScore]) -> dict[str, Any]:
            return {name: asdict(score) | {"kept": task.kept(score)} for name, score in zip(names, scores, strict=True)}

        experts = [own.model for own in self.tasks]
        return asdict(task) | {"experts": named(experts, task.experts), "merged": named(self.merged, task.merged)}

    def __str__(self) -> str:
        parts = (part if isinstance(part, str) else part.within(WIDTH) for part in self.parts())
        return "\n\n".join(textwrap.fill(part, WIDTH) if "\n" not in part else part for part in parts)

    def parts(self) -> Iterator[str | Table]:
        """The tables, and sentences that explain them."""
        tasks, ranking = self.all_tasks, self.ranking
        exact = any(task.answers for task in tasks.values())

        def cell(answers: float | None, kept: float | None) -> str:
            share = as_percentage(kept, digits=0)
            return f"{as_percentage(answers, digits=0)} ({share})" if exact else share

        def rows(cells: Callable[[Standing], list[str]]) -> list[list[str]]:
            return [[_cut(own.model), *cells(own)] for own in ranking]

        gain = "the gain in likelihood kept (0% = base model, 100% = expert, below 0 = worse than the base model)"
        short = f"short answers (at most {SHORT_ANSWER} tokens) given exactly, and in brackets {gain}"
        if exact or ranking[0].kept is not None:
            yield f"On held-out records of each calibration source, the best average first: {short if exact else gain}"
            yield Table(
                ["model", "average", *tasks],
                rows(lambda own: [cell(own.exact, own.kept), *map(cell, (s.exact for s in own.scores), own.shares)]),
            )
        yield "Negative log-likelihood per token of the answers (of all tokens where none is known), lower is better"
        yield Table(["model", *tasks], rows(lambda own: [f"{score.loss:.4f}" for score in own.scores]))
        columns = ["records", "show an answer", "a short one", "scored tokens"]
        counts = [(own.records, own.known, own.answers, own.tokens) for own in tasks.values()]
        yield Table(["task", *columns], [[name, *map(str, own)] for name, own in zip(tasks, counts, strict=True)])
        if self.keep:
            yield (
                "The base model's own task: 100% is kept where a model does as well as it, 0% where it "
                "does as the experts' mean, and of the short answers only those count that the base model gives."
            )
            if self.keep.kept(self.keep.base) is None:
                yield "The experts do no worse there than it, so these records do not tell what is kept of it."
        if idle := [task.model for task in self.tasks if task.kept(task.base) is None]:
            yield f"Experts no better than the base model on their own task, with no gain to keep: {', '.join(idle)}."
        if any(task.known < task.records for task in tasks.values()):
            yield (
                "Of records that show no answer all tokens are scored, which says less. Records with `prompt` and "
                "`completion`, or with `messages`, show it, and so does a `template` that ends with its field."
            )


def evaluate(
    recipe: RecipeOrFile | Experiment,
    merged: str | os.PathLike[str],
    samples: int | SupportsIndex = 100,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    lora_merge_cache: str | None = None,
    transformers_cache: str | None = None,
    quiet: bool = False,
) -> Comparison:
    """Compare one merged model with the base model and with each expert on that expert's task, as ``compare`` does.

    Args:
        recipe: the merge's recipe, or its file.
        merged: the folder that the merge was written to.
        samples: how many records per task.
        device: where to compute: "cpu", "cuda", or a GPU such as "cuda:1".
        trust_remote_code: run the Python code that comes with a model (dangerous).
        lora_merge_cache: the folder to merge LoRA adapters in; without one, adapters are refused.
        transformers_cache: the folder for downloaded files; the Hub's own cache by default.
        quiet: no progress bars and no notes.

    Returns:
        The scores of the base model, the experts and the merged model on each task; printed, it is tables.

    Raises:
        SltaError: an expert has no calibration source or no record is left in it, or a model cannot be run by layers.
    """
    given = recipe if isinstance(recipe, Experiment) else data_of(loaded(recipe))
    experiment = opened(given, device, trust_remote_code, lora_merge_cache, transformers_cache, quiet)
    return compare(experiment, [merged], samples)


def compare(
    recipe: RecipeOrFile | Experiment,
    merged: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    samples: int | SupportsIndex = 100,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    lora_merge_cache: str | None = None,
    transformers_cache: str | None = None,
    quiet: bool = False,
) -> Comparison:
    """Compare merged models with the base model, with the experts, and with each other, on every task.

    The records are the next ones of each calibration source, cut as calibration cuts them and tokenized by the base
    model's tokenizer for all models. Each model is run once, in float32, with one decoder layer in memory. A model's
    scores are kept in the cache folder by its content and the records', so that a model that is done is not run again.

    Args:
        recipe: the merges' recipe, of any method that gives ``calibration`` for the experts, or its file; for one that
            is opened already there are no options.
        merged: the folder that a merge was written to, or several.
        samples: how many records per task.
        device: where to compute: "cpu", "cuda", or a GPU such as "cuda:1".
        trust_remote_code: run the Python code that comes with a model (dangerous).
        lora_merge_cache: the folder to merge LoRA adapters in; without one, adapters are refused.
        transformers_cache: the folder for downloaded files; the Hub's own cache by default.
        quiet: no progress bars and no notes.

    Returns:
        The scores of all models on each task; printed, it is tables.

    Raises:
        SltaError: an expert has no calibration source or no record is left in it, or a model cannot be run by layers.
    """
    given = recipe if isinstance(recipe, Experiment) else data_of(loaded(recipe))
    experiment = opened(given, device, trust_remote_code, lora_merge_cache, transformers_cache, quiet)
    listed = [merged] if isinstance(merged, (str, os.PathLike)) else merged
    folders = [Path(folder).expanduser() for folder in listed]
    if not folders:
        raise SltaError("No merged model is named to compare: give the folder of one or more.")
    require_calibration(experiment.recipe)
    experts = experiment.recipe.experts
    experiment.load_data(experts)  # refuses the same data twice
    count = whole_number("samples", samples)
    groups = [_held_out(experiment, task, count) for task in experiment.recipe.tasks]
    models = [experiment.base, *experiment.experts, *(_open_result(experiment, folder) for folder in folders)]
    total = len(models) * sum(map(len, groups))
    with tqdm(
        total=total, desc="Comparing", unit="record", unit_scale=True, leave=False, disable=experiment.quiet
    ) as bar:
        found = [_scores(experiment, model, groups, bar) for model in models]
    sources = [published_name(reference) for reference in (*(e.reference for e in experts), experiment.recipe.base)]
    tasks = [
        _task(sources[index], group, [scores[index] for scores in found], len(experts), index)
        for index, group in enumerate(groups)
    ]
    names = tuple(folder.resolve().name for folder in folders)
    if len({*sources, *names}) < len(sources) + len(names):
        names = tuple(map(str, folders))
    return Comparison(names, tuple(tasks[: len(experts)]), next(iter(tasks[len(experts) :]), None))


def _task(name: str, group: Group, found: Sequence[Sequence[Score]], experts: int, index: int) -> TaskComparison:
    """A task's scores, from those [models][records] of the base model, the experts and the merges."""
    of_base = index == experts
    counted = [(score.exact is True or not of_base) and score.exact is not None for score in found[0]]
    base, *others = (_score(group, scores, counted) for scores in found)
    own, merged = tuple(others[:experts]), tuple(others[experts:])
    mean = TaskScore(sum(score.loss for score in own) / experts, _mean(score.exact for score in own))
    expert = mean if of_base else own[index]
    known = sum(sample.begin > 1 for sample in group)
    return TaskComparison(name, len(group), _tokens(group), sum(counted), base, expert, own, merged, of_base, known)


def _held_out(experiment: Experiment, task: Task, samples: int) -> Group:
    data = experiment.samples.held_out(task, samples)
    rows = zip(data.token_ids, data.answers, strict=True)
    found = [_sample(row, answer) for row, answer in rows if len(row) > 1]
    if not found:
        raise SltaError(
            f"The held-out records of {task} have one token each, so there is nothing to predict: add longer ones."
        )
    return found


def _sample(row: tuple[int, ...], answer: Span | None) -> Sample:
    """A record of which the answer is predicted, as far as it is in the row; all tokens where none is known."""
    begin, end = answer or (1, len(row))
    short = answer is not None and end <= min(len(row), begin + SHORT_ANSWER)
    return Sample(row, begin, min(end, len(row)), short)


def _open_result(experiment: Experiment, folder: Path) -> Checkpoint:
    reference = ModelReference(model=ModelPath(path=str(folder)))
    checkpoint = Checkpoint(reference, experiment.trust_remote_code)
    checkpoint.config = experiment.model(reference).config
    return checkpoint


def _scores(experiment: Experiment, model: Checkpoint, groups: Sequence[Group], bar: Any) -> list[list[Score]]:
    """A model's scores, which are kept in the cache folder; its weights are gone afterwards."""
    bar.set_postfix_str(Path(model.folder).name)
    key = [
        [
            model.fingerprint(),
            sorted(model.stamps.values()),
            model.reference.lora and experiment.options.lora_merge_dtype,
        ],
        files.checksum(Path(model.folder) / "config.json"),
        [[list(sample) for sample in group] for group in groups],
        [__version__, torch.__version__, transformers.__version__],
    ]
    path = files.cache_folder() / "scores" / f"{files.digest(key)}.json"
    try:
        found = _SCORES.validate_json(path.read_bytes())
        bar.update(sum(map(len, groups)))
    except (OSError, ValueError):  # not scored yet, or damaged
        found = score_model(model, groups, device=experiment.device, progress=bar.update)
        files.write(path, json.dumps(found).encode())
    return found


def _tokens(group: Group) -> int:
    return sum(sample.end - sample.begin for sample in group)


def _score(group: Group, scores: Sequence[Score], counted: Sequence[bool]) -> TaskScore:
    """A model's score on a task; ``counted`` says whose short answers count."""
    exact = _mean(float(score.exact is True) for score, counts in zip(scores, counted, strict=True) if counts)
    return TaskScore(sum(score.loss for score in scores) / _tokens(group), exact)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is defined; None without such."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def _cut(name: str) -> str:
    """A model's name without the beginning of a long one: ends tell paths apart."""
    return name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}"
