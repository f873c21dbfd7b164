"""A merge from the check to the model card, of which mergekit's own ``run_merge`` is one step."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import transformers
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_slta.checks import examine
from mergekit_slta.engine.ranks import Ranks, joined
from mergekit_slta.errors import SltaError, files_named, one_line, refuse, suggestion
from mergekit_slta.host.afterword import afterword
from mergekit_slta.host.registry import METHODS
from mergekit_slta.models.loaders import ONE_AT_A_TIME
from mergekit_slta.output import card
from mergekit_slta.output.companions import entry_files, finish_folder
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe

LOG = logging.getLogger(__name__)


def run(
    stock: Callable[..., None],
    config: MergeConfiguration,
    out: str,
    options: Mapping[str, Any],
    source: str | None = None,
    content: Any = None,
) -> None:
    """Merge a recipe of any method; one for mergekit's own methods is mergekit's affair.

    One merge runs at a time, and the loaders of an earlier one are forgotten: mergekit keeps them for the whole
    process, and they go on reading files that were replaced. Under torchrun all processes run the models, and the first
    one merges.

    Args:
        stock: mergekit's ``run_merge``.
        config: the recipe.
        out: the folder to write to.
        options: mergekit's options by their names.
        source: the recipe's YAML, which mergekit copies to the folder.
        content: the parsed YAML, where it is known.

    Raises:
        SltaError: the recipe, a model, the data or the disk does not allow the merge.
    """
    with ONE_AT_A_TIME:
        LoaderCache.loaders.clear()
        if config.merge_method not in METHODS:
            known = {method.spec.name for method in merge_methods.registered_methods()}
            if config.merge_method not in known and (near := suggestion(config.merge_method, known)):
                raise SltaError(f"mergekit does not know the merge_method '{config.merge_method}'{near}")
            stock(config, out, MergeOptions(**options), source)
            return
        with joined_ranks() as ranks, files_named("mend that and run the command again"):
            _run(stock, Experiment(Recipe.from_config(config, content), ranks=ranks, **options), out, source)


def _run(stock: Callable[..., None], experiment: Experiment, out: str, source: str | None) -> None:
    recipe, options, folder = experiment.recipe, experiment.options, Path(out)
    notes = experiment.ranks.together(lambda: examine.examine(experiment, out_path=out))
    for note in notes if not experiment.quiet else ():
        click.echo(f"Note: {note}", err=True)
    experiment.open()
    models = (experiment.base, *experiment.experts)
    for model in models:
        model.open()  # from now on changes of its files are noticed
    experiment.adapt_loaders()
    method = METHODS[recipe.config.merge_method]
    merge = method.kind(experiment)
    merge.prepare()
    if not experiment.ranks.first:
        return
    before = entry_files(folder, options.copy_tokenizer)
    if options.write_model_card:
        source = source or recipe.text  # as it is before mergekit rewrites it
    with method.merging(merge):
        stock(copy.deepcopy(recipe.config), os.path.abspath(out), options, source)  # its last part is the card's title
    LoaderCache.loaders.clear()  # what was adapted is of this merge alone
    for model in models:
        model.refuse_changes()
    unfinished = finish_folder(experiment, folder)
    for file, _ in before.items() & entry_files(folder, options.copy_tokenizer).items():
        # Programs would read it instead of what was just written.
        LOG.warning("%s is of an earlier merge: now %s.", file, file.replace(f"{file}.old"))
    card.renew_beside(folder, merge.solution)
    merge.finish()
    if source and options.write_model_card:
        try:
            card.write_card(folder, recipe.config, source, merge.solution)
        except Exception as error:  # the model is written: nothing about its card may make the merge fail
            LOG.warning("The model card says only what mergekit knows (%s).", one_line(error))
    for line in afterword(experiment, merge, out) if not experiment.quiet else ():
        click.echo(line, err=True)
    refuse(unfinished)


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The processes that torchrun started; all but the first are silent."""
    with joined() as ranks:
        if not ranks.first:
            logging.disable(logging.WARNING)
            transformers.utils.logging.disable_progress_bar()
        yield ranks
