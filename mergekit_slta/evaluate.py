"""What one merge keeps of its experts' skill: a comparison with a single merged model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mergekit_slta.comparison.compare import compare, gain_kept, without_gain
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.tables import Paragraphs, Table, as_json, as_percentage


@dataclass(frozen=True)
class TaskEvaluation:
    """How well the base model, the expert and the merged model predict an expert's task.

    Attributes:
        model: the expert.
        records: how many held-out records were used.
        tokens: how many tokens were predicted, which is all but each record's first.
        base, expert, merged: negative log-likelihood per predicted token, in nats.
    """

    model: str
    records: int
    tokens: int
    base: float
    expert: float
    merged: float

    @property
    def kept(self) -> float | None:
        """The share of the expert's gain over the base model that the merge keeps; None if there is no gain."""
        return gain_kept(self.base, self.expert, self.merged)


@dataclass(frozen=True)
class Evaluation(Paragraphs):
    """How well a merged model does each expert's task; printed, it is a table.

    Attributes:
        tasks: the tasks, in the order of the recipe's experts.
    """

    tasks: tuple[TaskEvaluation, ...]

    def to_json(self) -> str:
        """The numbers as JSON; the share that is kept is null if the expert gains nothing over the base model."""
        return as_json({"tasks": [{**asdict(task), "kept": task.kept} for task in self.tasks]})

    def table(self) -> Table:
        """One row per task."""
        rows = []
        for task in self.tasks:
            losses = [f"{loss:.4f}" for loss in (task.base, task.expert, task.merged)]
            rows.append([task.model, str(task.records), str(task.tokens), *losses, as_percentage(task.kept)])
        return Table(["task of", "records", "tokens", "base", "expert", "merged", "gain kept"], rows)

    def parts(self) -> Iterator[str | Table]:
        """The tables, and what to say with them."""
        yield "Negative log-likelihood per token, lower is better"
        yield self.table()
        if idle := [task.model for task in self.tasks if task.kept is None]:
            yield f"{without_gain(idle)} Where records have short answers, `compare` scores these alone as well."


def evaluate(
    recipe: Recipe | Experiment, merged: str | os.PathLike[str], samples: int = 100, **options: Any
) -> Evaluation:
    """Compare a merged model with the base model and with each expert on that expert's task; see ``compare``.

    Args:
        recipe: the merge's recipe, or an opened one, for which ``options`` are ignored.
        merged: the folder that the merge was written to.
        samples: how many records per task.
        options: ``device`` ("cpu"), ``trust_remote_code`` (False), ``lora_merge_cache`` (None), ``transformers_cache``
            (None), ``quiet`` (False), and whatever else mergekit has options for.

    Raises:
        SltaError: an expert has no calibration source or no record is left in it, or a model cannot be loaded.
    """
    tasks = compare(recipe, [merged], samples, **options).tasks
    return Evaluation(
        tuple(
            TaskEvaluation(task.model, task.records, task.tokens, task.base.loss, task.expert.loss, task.merged[0].loss)
            for task in tasks
        )
    )
