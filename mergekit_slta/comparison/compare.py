"""Merged models side by side with the base model and the experts: likelihood and exact answers."""

from __future__ import annotations

import json
import math
import operator
import os
import statistics
from collections.abc import Iterator, Sequence
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
from mergekit_slta.errors import SltaError
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.recipe.experiment import Experiment, opened
from mergekit_slta.recipe.recipe import RecipeOrFile, Task, published_name, require_calibration
from mergekit_slta.recipe.settings import CalibrationSettings
from mergekit_slta.tables import Paragraphs, Table, as_json, as_percentage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT_ANSWER = 32  # tokens
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
        merged: the merged models' scores, in the order in which they were given.
        of_base: whether it is the base model's own task, of whose answers only those count that the base model gives.
    """

    model: str
    records: int
    tokens: int
    answers: int
    base: TaskScore
    expert: TaskScore
    merged: tuple[TaskScore, ...]
    of_base: bool = False

    def kept(self, merged: int) -> float | None:
        """The share of the expert's gain over the base model that a merge keeps; None where there is no gain.

        On the base model's own task, the share of its lead over the experts.
        """
        worse, better = (self.expert, self.base) if self.of_base else (self.base, self.expert)
        gain = worse.loss - better.loss
        return (worse.loss - self.merged[merged].loss) / gain if gain > 0 else None


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

    def columns(self) -> dict[str, list[Any]]:
        """The columns of ``to_frame``: a row for each model on each task, that of the base model last."""
        rows: list[tuple[str, str, TaskScore, float | None]] = []
        for task in [*self.tasks, *([self.keep] if self.keep else [])]:
            rows += [(task.model, "base", task.base, None), (task.model, "expert", task.expert, None)]
            named = zip(self.merged, task.merged, strict=True)
            rows += [(task.model, name, score, task.kept(index)) for index, (name, score) in enumerate(named)]
        return {
            "task of": [task for task, *_ in rows],
            "model": [model for _, model, *_ in rows],
            "negative log-likelihood": [score.loss for _, _, score, _ in rows],
            "exact answers": [math.nan if score.exact is None else score.exact for _, _, score, _ in rows],
            "gain kept": [math.nan if kept is None else kept for *_, kept in rows],
        }

    def plot(self) -> Figure:
        """Draw what each merge keeps of each expert's gain and of the base model, and its short answers.

        Returns:
            A figure of matplotlib.

        Raises:
            SltaError: there is nothing to draw.
        """
        from mergekit_slta.comparison.figure import draw  # imports matplotlib

        return draw(self).figure

    def to_json(self) -> str:
        """The numbers as JSON; what is undefined is null."""
        content: dict[str, Any] = {"tasks": [self._content(task) for task in self.tasks]}
        return as_json(content | ({"keep": self._content(self.keep)} if self.keep else {}))

    def _content(self, task: TaskComparison) -> dict[str, Any]:
        scores = [asdict(score) | {"kept": task.kept(index)} for index, score in enumerate(task.merged)]
        return asdict(task) | {"merged": dict(zip(self.merged, scores, strict=True))}

    def loss_table(self) -> Table:
        """One row per task: the models' negative log-likelihood, and the share of the gain that each merge keeps."""
        rows = []
        for task in self.tasks:
            row = [task.model, str(task.records), str(task.tokens), f"{task.base.loss:.4f}", f"{task.expert.loss:.4f}"]
            for index, score in enumerate(task.merged):
                row += [f"{score.loss:.4f}", as_percentage(task.kept(index))]
            rows.append(row)
        merged = [title for name in self.merged for title in (name, "gain kept")]
        return Table(["task of", "records", "tokens", "base", "expert", *merged], rows)

    def exact_table(self) -> Table | None:
        """One row per task whose records have short answers: the share that each model gives; None without such."""
        rows = [
            [task.model, str(task.answers), *(as_percentage(s.exact) for s in (task.base, task.expert, *task.merged))]
            for task in self.tasks
            if task.answers
        ]
        return Table(["task of", "answers", "base", "expert", *self.merged], rows) if rows else None

    def base_table(self, task: TaskComparison) -> Table:
        """One row per model: how it does the base model's own task."""
        ends = (1.0, 0.0) if task.expert.loss > task.base.loss else (None, None)
        shares = [*ends, *(task.kept(index) for index in range(len(task.merged)))]
        scores = zip(["base", "experts", *self.merged], [task.base, task.expert, *task.merged], shares, strict=True)
        rows = [
            [name, f"{own.loss:.4f}", as_percentage(share), as_percentage(own.exact)] for name, own, share in scores
        ]
        return Table(["model", "negative log-likelihood", "kept of the base", "its exact answers"], rows)

    def parts(self) -> Iterator[str | Table]:
        """The tables, and sentences that explain them."""
        yield "Negative log-likelihood per token of the answers (of all tokens where none is known), lower is better"
        yield self.loss_table()
        if exact := self.exact_table():
            yield f"Short answers (at most {SHORT_ANSWER} tokens) that greedy decoding gives exactly, higher is better"
            yield exact
        if self.keep:
            yield (
                f"The base model's own task, {self.keep.records} records: 100 % is kept where a merge does as well as "
                "it, 0 % where it does as the experts' mean; of short answers count those of the base model."
            )
            yield self.base_table(self.keep)
            if self.keep.kept(0) is None:
                yield "The experts do no worse there than it, so these records do not tell what is kept of it."
        if idle := [task.model for task in self.tasks if task.kept(0) is None]:
            yield f"Experts no better than the base model on their own task, with no gain to keep: {', '.join(idle)}."
        if not exact:
            yield (
                f"The records have no separate short answer (of at most {SHORT_ANSWER} tokens): records with `prompt` "
                "and `completion`, or with `messages`, would be scored by exact matches too."
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
    experiment = opened(recipe, device, trust_remote_code, lora_merge_cache, transformers_cache, quiet)
    return compare(experiment, [merged], samples)


def compare(
    recipe: RecipeOrFile | Experiment,
    merged: Sequence[str | os.PathLike[str]],
    samples: int | SupportsIndex = 100,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    lora_merge_cache: str | None = None,
    transformers_cache: str | None = None,
    quiet: bool = False,
) -> Comparison:
    """Compare merged models with the base model, with each expert on that expert's task, and with each other.

    The records are the next ones of each calibration source, cut as calibration cuts them and tokenized by the base
    model's tokenizer for all models. Each model is run once, in float32, with one decoder layer in memory. A model's
    scores are kept in the cache folder by its content and the records', so that a model that is done is not run again.

    Args:
        recipe: the merges' recipe, or its file; for one that is opened already there are no options.
        merged: the folders that merges were written to, at least one.
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
    experiment = opened(recipe, device, trust_remote_code, lora_merge_cache, transformers_cache, quiet)
    folders = [Path(folder).expanduser() for folder in merged]
    experiment.recipe.settings_of(CalibrationSettings)  # a recipe of another method has no held-out records
    require_calibration(experiment.recipe)
    experts = experiment.recipe.experts
    experiment.load_data(experts)  # refuses the same data twice
    tasks = [_held_out(experiment, task, operator.index(samples)) for task in experiment.recipe.tasks]
    of_base = tasks[len(experts) :]
    runs = [
        (experiment.base, tasks),
        *((model, [task, *of_base]) for model, task in zip(experiment.experts, tasks, strict=False)),
        *((_open_result(experiment, folder), tasks) for folder in folders),
    ]
    total = sum(len(group) for _, groups in runs for group in groups)
    with tqdm(
        total=total, desc="Comparing", unit="record", unit_scale=True, leave=False, disable=experiment.quiet
    ) as bar:
        scores = [_scores(experiment, model, groups, bar) for model, groups in runs]
    base, own, after = scores[0], scores[1 : 1 + len(experts)], scores[1 + len(experts) :]
    sources = [published_name(reference) for reference in (experiment.recipe.base, *(e.reference for e in experts))]
    compared = tuple(
        TaskComparison(
            model=sources[1 + index],
            records=len(task),
            tokens=_tokens(task),
            answers=sum(sample.short for sample in task),
            base=_mean(task, base[index]),
            expert=_mean(task, own[index][0]),
            merged=tuple(_mean(task, found[index]) for found in after),
        )
        for index, task in enumerate(tasks[: len(experts)])
    )
    keep = None
    if of_base:
        counted = [score.exact is True for score in base[-1]]
        first, *others = (_mean(of_base[0], found[-1], counted) for found in scores)
        keep = TaskComparison(
            model=sources[0],
            records=len(of_base[0]),
            tokens=_tokens(of_base[0]),
            answers=sum(counted),
            base=first,
            expert=_average(others[: len(experts)]),
            merged=tuple(others[len(experts) :]),
            of_base=True,
        )
    names = tuple(folder.resolve().name for folder in folders)
    if len({*sources, *names}) < len(sources) + len(names):
        names = tuple(map(str, folders))
    return Comparison(names, compared, keep)


def _held_out(experiment: Experiment, task: Task, samples: int) -> Group:
    data = experiment.samples.held_out(task, samples)
    rows = zip(data.token_ids, data.answers, strict=True)
    found = [_sample(row, answer) for row, answer in rows if len(row) > 1]
    if not found:
        raise SltaError(
            f"The held-out records of {task} have one token each, so there is nothing to predict: add longer ones."
        )
    return found


def _sample(row: tuple[int, ...], answer: tuple[int, int] | None) -> Sample:
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
        [model.fingerprint(), sorted(model.stamps.values())],
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


def _mean(group: Group, scores: Sequence[Score], counted: Sequence[bool] | None = None) -> TaskScore:
    """A model's score on a task; ``counted`` says whose short answers count, by default all."""
    given = zip(scores, counted or [True] * len(scores), strict=True)
    answered = [score.exact for score, counts in given if counts and score.exact is not None]
    loss = sum(score.loss for score in scores) / _tokens(group)
    return TaskScore(loss, sum(answered) / len(answered) if answered else None)


def _average(scores: Sequence[TaskScore]) -> TaskScore:
    """The mean of several models' scores on one task."""
    exact = [score.exact for score in scores if score.exact is not None]
    return TaskScore(statistics.mean(score.loss for score in scores), statistics.mean(exact) if exact else None)
