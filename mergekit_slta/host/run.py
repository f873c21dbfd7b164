"""Register the merge methods, and merge, from the check to the model card; mergekit's ``run_merge`` is one step."""

from __future__ import annotations

import copy
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import click
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_slta import files
from mergekit_slta.checks import examine
from mergekit_slta.checks.tokenizers import endless
from mergekit_slta.engine.loop import exact_products, progress_bar
from mergekit_slta.engine.partial import Partial, run_of
from mergekit_slta.engine.ranks import Ranks, joined
from mergekit_slta.errors import SltaError, as_note, files_named, interruptible, one_line, printable, refuse, suggestion
from mergekit_slta.files import PARTIAL_OF_MERGE, RECIPE_OF_MERGE
from mergekit_slta.host.methods import ActmatMerge, FeatcalMerge, Merge, Method, SftmMerge, SltaMerge
from mergekit_slta.models.architecture import ONE_AT_A_TIME, adapt_loaders
from mergekit_slta.output import card, manifest
from mergekit_slta.output.companions import entry_files, finish_folder, open_to_others, set_aside
from mergekit_slta.recipe.experiment import Experiment, device_of, merge_options
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.words import listed

LOG = logging.getLogger(__name__)

# A new merge method is entered here.
MERGES: tuple[type[Merge], ...] = (SltaMerge, FeatcalMerge, ActmatMerge, SftmMerge)
METHODS = {kind.spec.name: Method(kind) for kind in MERGES}


def register() -> None:
    """Make the merge methods known to mergekit; a second call changes nothing."""
    known = {method.spec.name for method in merge_methods.registered_methods()}
    for name, method in METHODS.items():
        if name not in known:
            merge_methods.register(method)


def run(
    stock: Callable[..., None],  # mergekit's ``run_merge``
    merge_config: MergeConfiguration,
    out_path: str | os.PathLike[str],
    options: MergeOptions,
    config_source: str | None = None,  # the recipe's YAML, which mergekit copies to the folder
) -> None:
    """Merge a recipe of any method; one for mergekit's own methods is mergekit's affair.

    One merge runs at a time, and the loaders of an earlier one are forgotten: mergekit keeps them for the whole
    process, and they go on reading files that were replaced. Under torchrun all processes run the models, and the first
    one merges.
    """
    out, merge_config = os.fspath(out_path), copy.deepcopy(merge_config)  # mergekit changes it
    with ONE_AT_A_TIME:
        LoaderCache.loaders.clear()
        if (name := merge_config.merge_method) not in METHODS:
            known = {method.spec.name for method in merge_methods.registered_methods()}
            if name not in known:
                fix = suggestion(name, known) or f": it knows {', '.join(sorted(known))}."
                raise SltaError(f"mergekit does not know the merge_method '{name}'{fix}")
            partial = Partial(Path(out) / PARTIAL_OF_MERGE)
            ours = partial.folder.parent.exists()  # an earlier merge by one of our methods, or one that is running
            with partial.held(Ranks()) if ours else nullcontext():
                if ours:
                    partial.refuse_layers_of_others({"method": name})
                stock(merge_config, out, merge_options(options.model_dump(), merge_config.dtype), config_source)
                open_to_others(Path(out))
                if ours:
                    card.renew_beside(Path(out), None)
                    partial.remove()
            return
        # Of the text mergekit's own reader silently drops repeated and misspelt keys.
        recipe = Recipe.parse(config_source or merge_config.to_yaml(), "The recipe", merge_config)
        try:
            device = device_of(options.device, options.multi_gpu)
            with joined(device) as ranks, files_named("correct that and run the command again"):
                _merge(stock, Experiment(recipe, ranks=ranks, **options.model_dump()), out)
        finally:
            LoaderCache.loaders.clear()  # they map files, and what was adapted is of this merge alone


def _merge(stock: Callable[..., None], experiment: Experiment, out: str) -> None:
    """Check a recipe, run its models, and merge them into a folder that no other process uses meanwhile."""
    folder, recipe, ranks = Path(out), experiment.recipe, experiment.ranks
    # This already draws the prompts; the run takes them from ``experiment.drawn``.
    with ranks.one_refusal():
        notes = examine.examine(experiment, out_path=out, downloading=True)
    for note in notes if not experiment.quiet else ():
        click.echo(as_note(note), err=True)
    partial, method = Partial(folder / PARTIAL_OF_MERGE), METHODS[recipe.config.merge_method]
    merge, unfinished = method.kind(), list[str]()
    then = "resumes after the finished layers" if recipe.settings.runs_models else "starts over"
    with partial.held(ranks), interruptible(then):
        experiment.open()
        with ranks.one_refusal():
            adapt_loaders(experiment.layout, *(one.model for one in experiment.checkpoints))
            earlier = manifest.read(folder) if ranks.first and not experiment.quiet else None
            had = manifest.differences(earlier, manifest.describe(experiment)) if earlier else []
            if had:
                click.echo(as_note(f"{folder} holds another merge, which had {listed(had)}; it is replaced."), err=True)
            elif earlier and run_of(partial.folder) is None:
                click.echo(as_note(f"{folder} already holds this merge, which is made again."), err=True)
        if ranks.first and (aside := set_aside(experiment, folder)):
            LOG.warning("Added .old to the names of files in %s that the merge replaces: %s.", folder, ", ".join(aside))
        merge.prepare(experiment, partial)
        if ranks.first:
            unfinished = _write(stock, experiment, method, merge, folder)
            partial.remove()
    if earlier and (now := manifest.read(folder)):
        alike = "the same as" if now.sha256 == earlier.sha256 else "not the same as"
        rounded = f", made on {earlier.machine}, which rounds differently" * (earlier.machine not in ("", now.machine))
        line = f"A sample of the weights in {folder} is {alike} that of the earlier merge"
        click.echo(printable(f"{line}{rounded * (now.sha256 != earlier.sha256)}."), err=True)
    for line in afterword(experiment, merge, out) if ranks.first and not experiment.quiet else ():
        click.echo(line, err=True)
    refuse(unfinished)


def _write(stock: Callable[..., None], experiment: Experiment, method: Method, merge: Merge, folder: Path) -> list[str]:
    """Have mergekit write the merged tensors, and add files of the base model, statistics, manifest and card.

    Returns a sentence for each thing that the user must do in the folder.
    """
    earlier, recipe = entry_files(experiment, folder), experiment.recipe
    bars, total = sys.stderr.isatty(), len(experiment.model(recipe.base).tensors)
    options = experiment.options if bars else experiment.options.model_copy(update={"quiet": True})  # they fill a log
    with (
        progress_bar("Merging", [recipe.base], total, experiment.quiet or bars) as progress,
        method.merging(experiment, merge, progress),
        exact_products(),
    ):
        config = copy.deepcopy(recipe.config)
        if isinstance(merge, FeatcalMerge) and recipe.tokenizer_source is None:
            # Few of the models' tensors are needed. Without a type to change them to, mergekit maps them unread.
            config.out_dtype, config.dtype = config.out_dtype or config.dtype, None
        # The last part of the folder's path is the card's title.
        stock(config, os.path.abspath(folder), options, recipe.text)
    for model in experiment.checkpoints:
        model.refuse_changes()
    # Programs would read what an earlier merge wrote beside, or instead of, what was just written.
    unchanged = earlier.items() & entry_files(experiment, folder).items()
    stale = {file: file.replace(f"{file}.earlier") for file, _ in unchanged}  # a user's own may be .old
    unfinished = finish_folder(experiment, folder)
    for file in filter(Path.exists, list(stale)):  # it was copied again
        stale.pop(file).unlink()
    if stale:
        names = sorted(str(file.relative_to(folder)) for file in stale)
        LOG.warning("Added .earlier to the names of files of an earlier merge in %s: %s.", folder, listed(names))
    card.renew_beside(folder, merge.solution, getattr(recipe.settings, "statistics", ""))
    manifest.write(manifest.describe(experiment, merge.solution, folder), folder)
    if experiment.options.write_model_card:
        try:
            files.write(folder / card.CARD, card.merge_card(folder, recipe, merge.solution, merge.caveat).encode())
        except (SltaError, OSError) as error:  # the model is written: no text of a card may make the merge fail
            LOG.warning("The model card lacks the section of mergekit-slta (%s).", one_line(error))
    return unfinished


# The words after a merge


def afterword(experiment: Experiment, merge: Merge, out: str) -> Iterator[str]:
    """What is kept of each model, if the method knows it, the report's page, and the command that says more."""
    if merge.result:
        yield merge.result
    if merge.page:
        yield f"Report: {merge.page}"
    yield from map(as_note, endless(experiment))
    copied = Path(out) / RECIPE_OF_MERGE
    if copied.is_file():
        has_data = experiment.recipe.settings.runs_models and all(task.calibration for task in experiment.recipe.tasks)
        command = ["mergekit-slta", "evaluate" if has_data else "verify", str(copied), out]
        yield f"To {command[1]} it: {shlex.join([*command, *experiment.same_options()])}"
