"""The figure of a comparison of merged models: exact answers, and what each keeps of each expert's gain."""

from __future__ import annotations

import math
import os
from pathlib import Path

from mergekit_slta import files
from mergekit_slta.comparison.compare import Comparison
from mergekit_slta.reports.figures import Matrix, heat_map
from mergekit_slta.reports.words import percent


def write_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> Path | None:
    """Draw a comparison as PNG: short answers, and what each model keeps of each expert's gain, the best model first.

    Args:
        comparison: what ``compare`` found.
        path: the file to write.

    Returns:
        Its path; None if there is nothing to draw, because no expert gains anything on its own task and no record has a
        short answer.

    Raises:
        OSError: the file cannot be written.
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
    picture = heat_map(
        matrices, x_label="task", y_label="model", value_label="share", limits=(0.0, 1.0), numbers=percent
    )
    file = Path(path).expanduser()
    files.write(file, picture.png())
    return file
