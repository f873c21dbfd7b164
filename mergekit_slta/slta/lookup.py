"""From a recipe to its statistics: use the file that fits, else measure, and resume after an interruption."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch

from mergekit_slta.data.sources import CalibrationData, source_name
from mergekit_slta.engine.batches import share
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.progress import layer_bar
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.submodules import fallbacks
from mergekit_slta.layers.trace import on_device
from mergekit_slta.levels import LEVELS
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import RecipeOrFile, published_name, published_names, require_calibration
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.calibrate import calibrate
from mergekit_slta.slta.matching import fingerprint, local_identity, match, model_contents
from mergekit_slta.slta.statistics import Solution, Statistics
from mergekit_slta.slta.statistics_file import CalibrationInfo, Info, resolve_statistics, versions
from mergekit_slta.slta.weights import TensorWeights

LOG = logging.getLogger(__name__)


def measure(
    recipe: RecipeOrFile,
    levels: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Statistics:
    """Measure the Gram matrices that the closed form needs, of a recipe's models on its calibration data.

    A file at ``path`` is used if it fits, and written if it is not there; then an interrupted measurement is resumed.
    It takes about one forward pass of each model per sample, in float32, with one decoder layer of each model in
    memory.

    Args:
        recipe: a recipe for ``slta`` or ``featcal`` whose experts have calibration data, or its file.
        levels: ``model``, ``layer``, ``attn_mlp``, ``head_mlp`` or ``linear``; by default the recipe's.
        path: the statistics file, which is created if it does not exist; or a published one,
            ``hf:ORG/REPO/FILE[@REVISION]``. By default the recipe's ``statistics``; without one nothing is written.
        options: see ``Options``.

    Returns:
        Per submodule the Gram matrices [N, T, T] float64 of N samples and T experts, in the recipe's order.

    Raises:
        SltaError: the recipe, a level, a model or the data is wrong, or an existing file does not fit the recipe.
    """
    experiment = opened(recipe, options)
    statistics = measured_statistics(experiment, levels, path)
    names = (statistics.info.base_model, *statistics.info.models)
    return replace(statistics, paths=dict(zip(names, map(str, experiment.recipe.references), strict=True)))


def measured_statistics(
    experiment: Experiment,
    levels: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    merge: tuple[Path, Partial] | None = None,
) -> Statistics:
    """``measure`` for an opened recipe.

    ``merge`` is, for a merge, the statistics file in its output, which is used if it fits and replaced if not, and the
    folder of its finished layers.
    """
    settings = experiment.settings
    chosen = settings if isinstance(settings, SltaSettings) else SltaSettings()
    named = [levels] if isinstance(levels, str) else levels or [chosen.level]
    experiment.require_levels(named)
    asked = [level for level in LEVELS if level in named]
    source = os.fspath(path) if path else chosen.statistics
    file = resolve_statistics(source, experiment.options.transformers_cache) if source else None
    ranks, exists = experiment.ranks, file is not None and file.is_file()
    if file is not None:
        ranks.require_equal(exists, file.parent)
    if file is not None and exists:
        statistics = _matched(experiment, file, asked)
        if merge:  # from here to its end it counts as unfinished
            merge[1].begin({"statistics": source}, ranks, replace=True)
        elif ranks.first:
            Partial(partial_folder(file)).remove()  # of a run that was killed after it had written the file
        return statistics
    require_calibration(experiment.recipe)
    data = experiment.load_data(experiment.recipe.tasks)
    info = _info(experiment, data)
    run = local_identity(experiment, info.fingerprint) | {"levels": asked}
    if merge:
        merge[1].begin(run, ranks, replace=True)
    if file is None and merge is not None:
        file, info = merge[0], info.model_copy(update={"files": run["files"]})
        if (known := _still_fits(experiment, file, info.files, asked)) is not None:
            LOG.info("Nothing is measured anew: %s holds the measurement of these models, data and settings.", file)
            return known
    if file is None:
        return _measured(experiment, info, data, asked, None)
    partial = merge[1] if merge else Partial(partial_folder(file))
    with contextlib.nullcontext() if merge else partial.held(ranks):
        if not merge:
            partial.begin(run, ranks)
        statistics = _measured(experiment, info, data, asked, partial)
        if ranks.first:
            statistics.save(file)
        ranks.wait()
        if ranks.first and not merge:
            partial.remove()
    return statistics


def _still_fits(experiment: Experiment, file: Path, stamps: str, levels: Sequence[str]) -> Statistics | None:
    """The statistics in a merge's output at some levels, if they fit and no file of the models has changed since."""
    known = None
    with contextlib.suppress(SltaError):  # of another merge, or damaged: this merge replaces it
        known = _matched(experiment, file, levels).at_levels(levels)
    fits = known is not None and known.info.files == stamps
    experiment.ranks.require_equal(fits, file.parent)
    return known if fits else None


def solved(experiment: Experiment, statistics: Statistics) -> tuple[Solution, TensorWeights]:
    """The merging weights that a recipe for ``slta`` asks for, by submodule and by tensor."""
    settings = experiment.recipe.settings_of(SltaSettings)
    solution = statistics.solve(
        settings.level, balance=settings.balance, ridge=settings.ridge, keep_weight=experiment.recipe.keep_weight
    )
    return solution, TensorWeights(experiment.decoder, settings.level, solution.submodules, experiment.layout)


def _matched(experiment: Experiment, path: Path, levels: Sequence[str]) -> Statistics:
    """Compare a file with the recipe, and select the recipe's experts and tasks under the recipe's names."""
    stored, recipe = Statistics.load(path), experiment.recipe
    require_calibration(recipe, statistics=True)
    given = all(task.calibration for task in recipe.tasks)
    data = experiment.load_data(recipe.tasks) if given else [None] * len(recipe.tasks)
    base, experts = model_contents(experiment)
    order = match(stored.info, path, experiment, base, experts, data, levels)
    for fallback in stored.info.fallbacks:
        if fallback.level in levels:
            LOG.warning("%s", fallback)
    chosen = stored.take(order, keep=recipe.keep is not None)
    names = [published_name(reference) for reference in recipe.references]
    if len(set(names)) < len(names):
        return chosen
    return replace(chosen, info=chosen.info.model_copy(update={"base_model": names[0], "models": tuple(names[1:])}))


def _measured(
    experiment: Experiment, info: Info, data: Sequence[CalibrationData], levels: Sequence[str], partial: Partial | None
) -> Statistics:
    """Run the models on the samples."""
    ranks = experiment.ranks
    decoder = on_device(experiment.decoder, experiment.device)
    tasks = [samples.token_ids for samples in data]
    models, prompts = [experiment.base, *experiment.experts], share(decoder, tasks, ranks)
    with layer_bar(f"Calibrating {', '.join(levels)}", models, len(decoder), prompts, experiment.quiet) as progress:
        grams = calibrate(decoder, models, tasks, levels, partial=partial, ranks=ranks, progress=progress)
    for model in models:
        model.refuse_changes()
    coarser = tuple(fallback for level in levels for fallback in fallbacks(decoder, level))
    return Statistics(
        grams,
        torch.tensor([task for task, samples in enumerate(tasks) for _ in samples]),
        torch.tensor([len(token_ids) for samples in tasks for token_ids in samples]),
        info.model_copy(update={"levels": tuple(levels), "fallbacks": coarser}),
    )


def _info(experiment: Experiment, data: Sequence[CalibrationData]) -> Info:
    """The metadata of a measurement, still without levels."""
    recipe, config = experiment.recipe, experiment.base.config
    names = published_names(recipe.references)
    calibration = [
        CalibrationInfo(source=source_name(samples.source), template=samples.template, sha256=samples.sha256)
        for samples in data
    ]
    return Info(
        format_version=2,
        levels=(),
        base_model=names[0],
        models=tuple(names[1:]),
        calibration=tuple(calibration[: len(recipe.experts)]),
        keep=calibration[-1] if recipe.keep else None,
        samples=experiment.settings.samples,
        max_tokens=experiment.settings.max_tokens,
        seed=experiment.settings.seed,
        inputs="base",
        architecture=(config.architectures or [""])[0],
        num_layers=len(experiment.decoder),
        dtype=experiment.base.dtype,
        versions=versions(),
        fingerprint=fingerprint(experiment, data),
    )


def partial_folder(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
