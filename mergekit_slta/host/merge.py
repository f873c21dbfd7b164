"""Merge a recipe as mergekit-yaml does, with a check first."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import click
import transformers
from mergekit.merge import run_merge

from mergekit_slta.checks import examine
from mergekit_slta.engine.ranks import Ranks, join, leave
from mergekit_slta.host import patches, registry
from mergekit_slta.models.spellings import ONE_AT_A_TIME
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.options import MergeOptions
from mergekit_slta.recipe.recipe import Recipe


def merge(recipe: Recipe, out: str | os.PathLike[str], **options: Unpack[MergeOptions]) -> Path:
    """Merge a recipe's models, as mergekit-yaml does, with a check first that names all problems at once.

    Takes recipes for mergekit's other methods too. Under torchrun all processes calibrate, and the first one merges.
    Threads may call it: one merges at a time, and the others wait.

    Args:
        recipe: the recipe.
        out: the folder to write to.
        options: mergekit-yaml's options by their names, but for logging and threads; see ``MergeOptions``.

    Returns:
        The folder of the merged model.

    Raises:
        SltaError: the recipe, a model, the data or the disk does not allow the merge.
    """
    patches.install()
    method = registry.METHODS.get(recipe.config.merge_method)
    with ONE_AT_A_TIME, joined_ranks() as ranks:
        experiment = Experiment(recipe, ranks=ranks, **options)
        if method is not None:
            notes = ranks.together(lambda: examine.examine(experiment, out_path=out))
            for note in notes if not experiment.quiet else ():
                click.echo(f"Note: {note}", err=True)
            if ranks.count > 1:
                experiment.open()
                method.merge(experiment).share()
        if ranks.first:
            experiment.ranks = Ranks()
            with registry.examined(experiment):
                experiment.open()
                config = copy.deepcopy(recipe.config)  # mergekit's planner rewrites it
                run_merge(config, str(out), options=experiment.options, config_source=recipe.text)
    return Path(out)


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The processes that torchrun started; all but the first are silent."""
    ranks = join()
    if not ranks.first:
        logging.disable(logging.WARNING)
        transformers.utils.logging.disable_progress_bar()
    try:
        yield ranks
    finally:
        leave()
