"""Merge a recipe from Python."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Unpack

from mergekit.merge import run_merge

from mergekit_slta.host import patches  # noqa: F401 - mergekit must know the methods where start-up files are off
from mergekit_slta.host.run import run
from mergekit_slta.recipe.options import MergeOptions
from mergekit_slta.recipe.recipe import RecipeOrFile, loaded


def merge(recipe: RecipeOrFile, out: str | os.PathLike[str], **options: Unpack[MergeOptions]) -> Path:
    """Merge a recipe's models, as mergekit-yaml does, with a check first that names all problems at once.

    Takes recipes for mergekit's other methods too. Under torchrun all processes calibrate, and the first one merges.
    Threads may call it: one merges at a time, and the others wait.

    Args:
        recipe: the recipe, or its file.
        out: the folder to write to.
        options: mergekit-yaml's options by their names, but for logging and threads; see ``MergeOptions``.

    Returns:
        The folder of the merged model.

    Raises:
        SltaError: the recipe, a model, the data or the disk does not allow the merge.
    """
    given = loaded(recipe)
    run(inspect.unwrap(run_merge), given.config, os.fspath(out), options, given.text, given.content)
    return Path(out)
