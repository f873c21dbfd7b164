"""The figure of a comparison of merged models: what each keeps of each expert's gain."""

from __future__ import annotations

import math
import os
from pathlib import Path

from mergekit_slta import files
from mergekit_slta.comparison.compare import Comparison
from mergekit_slta.reports.figures import Matrix, heat_map
from mergekit_slta.reports.words import percent
from mergekit_slta.tables import short_names


def write_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Draw a comparison as PNG: the share of each expert's gain that each merge keeps, and of the short answers.

    Args:
        comparison: what ``compare`` found.
        path: the file to write.

    Returns:
        Its path.

    Raises:
        OSError: the file cannot be written.
    """
    tasks = comparison.tasks
    names = short_names([task.model for task in tasks])
    kept = [[task.kept(index) for index in range(len(task.merged))] for task in tasks]
    shares = [[math.nan if share is None else share for share in row] for row in kept]
    matrices = [Matrix("The expert's gain that is kept", shares, names, comparison.merged)]
    if answered := [(name, task) for name, task in zip(names, tasks, strict=True) if task.answers]:
        scores = [(task.base, task.expert, *task.merged) for _, task in answered]
        exact = [[math.nan if score.exact is None else score.exact for score in row] for row in scores]
        columns = ["base", "expert", *comparison.merged]
        matrices = matrices if any(share is not None for row in kept for share in row) else []
        matrices.append(Matrix("Short answers given exactly", exact, [name for name, _ in answered], columns))
    picture = heat_map(
        matrices, x_label="model", y_label="task of", value_label="share", limits=(0.0, 1.0), numbers=percent
    )
    file = Path(path).expanduser()
    files.write(file, picture.png())
    return file
