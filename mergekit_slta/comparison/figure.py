"""The figure of a comparison of merged models: what each keeps of each expert's gain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mergekit_slta.errors import SltaError
from mergekit_slta.figures import Matrix, Picture, heat_map
from mergekit_slta.tables import short_names
from mergekit_slta.words import percent

if TYPE_CHECKING:
    from mergekit_slta.comparison.compare import Comparison


def draw(comparison: Comparison) -> Picture:
    """Draw a comparison: what each merge keeps of each expert's gain and of the base model, and short answers.

    Raises:
        SltaError: there is nothing to draw.
    """
    columns = ["base", "expert", *comparison.merged]
    tasks = dict(zip(short_names([task.model for task in comparison.tasks]), comparison.tasks, strict=True))
    kept = {name: [task.kept(index) for index in range(len(task.merged))] for name, task in tasks.items()}
    if keep := comparison.keep:
        kept["the base model"] = [keep.kept(index) for index in range(len(keep.merged))]
    exact = {
        name: [score.exact for score in (task.base, task.expert, *task.merged)]
        for name, task in tasks.items()
        if task.answers
    }
    matrices = []
    for title, shares, names in (
        ("What is kept of the experts' gains" + " and of the base model" * bool(keep), kept, comparison.merged),
        ("Short answers given exactly", exact, columns),
    ):
        if any(share is not None for row in shares.values() for share in row):
            values = [[math.nan if share is None else share for share in row] for row in shares.values()]
            matrices.append(Matrix(title, values, list(shares), names))
    if not matrices:
        raise SltaError("No expert gains anything on its own task, and no record has a short answer: nothing to draw.")
    return heat_map(
        matrices, x_label="model", y_label="task of", value_label="share", limits=(0.0, 1.0), numbers=percent
    )
