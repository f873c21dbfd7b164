"""The figure of a comparison of merged models: exact answers, and what each keeps of each expert's gain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mergekit_slta.figures import Matrix, Picture, heat_map
from mergekit_slta.words import percent

if TYPE_CHECKING:
    from mergekit_slta.comparison.compare import Comparison


def draw(comparison: Comparison) -> Picture | None:
    """Draw a comparison: short answers, and what each model keeps of each expert's gain, the best model first.

    Returns:
        The picture; None if there is nothing to draw, because no expert gains anything on its own task and no record
        has a short answer.
    """
    ranking = comparison.ranking
    shares = {
        "Short answers given exactly": [[score.exact for score in own.scores] for own in ranking],
        "Kept of the experts' gains": [list(own.shares) for own in ranking],
    }
    matrices = []
    for title, rows in shares.items():
        if any(share is not None for row in rows for share in row):
            values = [[math.nan if share is None else share for share in row] for row in rows]
            matrices.append(Matrix(title, values, [own.model for own in ranking], list(comparison.all_tasks)))
    if not matrices:
        return None
    return heat_map(matrices, x_label="task", y_label="model", value_label="share", limits=(0.0, 1.0), numbers=percent)
