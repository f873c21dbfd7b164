"""From a recipe to its statistics: read the file that it names if that is there, else run the models."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import click

from mergekit_slta import files
from mergekit_slta.data.sources import CalibrationData
from mergekit_slta.engine.partial import Partial, run_of
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import printable, refuse
from mergekit_slta.levels import LEVELS
from mergekit_slta.models.fingerprint import hashed_computation
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import RecipeOrFile, require_calibration
from mergekit_slta.recipe.settings import CalibrationSettings, SltaSettings
from mergekit_slta.slta.grams import calibrate
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.statistics_file import Info, resolve_statistics
from mergekit_slta.words import enumerated

LOG = logging.getLogger(__name__)


def measure(
    recipe: RecipeOrFile,
    levels: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Statistics:
    """Measure the Gram matrices that the closed form needs, of a recipe's models on its prompts.

    A fitting file at ``path`` is used; otherwise the file is written, and an interrupted measurement resumes. Measuring
    takes about one forward pass of each model per prompt, in float32, with one decoder layer of each model in memory.

    Args:
        recipe: a recipe for ``slta`` or ``featcal`` whose experts have calibration data, or its file.
        levels: ``model``, ``layer``, ``attn_mlp``, ``head_mlp``, ``linear``; by default the recipe's, or ``attn_mlp``.
        path: the statistics file, which is created if it does not exist; or a published one,
            ``hf:ORG/REPO/FILE[@REVISION]``. By default the recipe's ``statistics``; without one nothing is written.
        options: see ``Options``.

    Returns:
        Per submodule the Gram matrices [N, T, T] float64 of N prompts and T experts, in the recipe's order.

    Raises:
        SltaError: the recipe, a level, a model or the data is wrong, or an existing file does not fit the recipe.
    """
    experiment = opened(recipe, options)
    statistics = statistics_of(experiment, levels, path)
    names = (statistics.info.base_model, *statistics.info.models)
    return replace(statistics, paths=dict(zip(names, map(str, experiment.recipe.references), strict=True)))


def statistics_of(
    experiment: Experiment,
    levels: str | Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    partial: Partial | None = None,
) -> Statistics:
    """The statistics of an opened recipe: of the file if it is there, else measured, and written to the file.

    By default at the recipe's level; several are in the order of ``LEVELS``.
    ``partial`` is a merge's folder of finished layers, which this process holds; by default one beside the file.
    """
    ranks, recipe = experiment.ranks, experiment.recipe
    settings = recipe.settings_of(CalibrationSettings)
    default = getattr(settings, "level", SltaSettings().level)
    named = [levels] if isinstance(levels, str) else levels or [default]
    experiment.require_levels(named)
    levels = [level for level in LEVELS if level in named]
    source = os.fspath(path or "") or getattr(settings, "statistics", "")
    file = resolve_statistics(source, experiment.options.transformers_cache) if source else None
    own = Partial(file.with_name(f"{file.name}.partial")) if file is not None and partial is None else None
    if file is not None:
        ranks.require_equal(file.is_file(), file.parent)
    if file is not None and file.is_file():
        statistics = _read_fitting(experiment, file, levels)
        if not experiment.quiet:
            click.echo(f"Note: {source} already holds the statistics of this recipe, so nothing is measured.", err=True)
        if partial is not None:
            partial.begin({"method": recipe.config.merge_method}, ranks, quiet=True)
        if own and ranks.first and run_of(own.folder) is not None:  # a kill has left it
            with own.held(Ranks()):
                own.remove()
        return statistics
    with own.held(ranks) if own else contextlib.nullcontext():
        statistics = calibrate(experiment, levels, partial or own)
        if file is not None and ranks.first:
            statistics.save(file)
        ranks.wait()
        if own and ranks.first:
            own.remove()
    return statistics


# A file that exists


def _read_fitting(experiment: Experiment, path: Path, levels: Sequence[str]) -> Statistics:
    """Compare a file with the recipe, and select the recipe's experts and tasks under the recipe's names."""
    stored, recipe = Statistics.load(path), experiment.recipe
    info = stored.info
    require_calibration(recipe, statistics=True)
    data = experiment.load_data(recipe.tasks) if all(task.calibration for task in recipe.tasks) else []
    order = _match_experts(experiment, info, data)
    refuse(_misfits(experiment, info, path, levels, order, data))
    parameters = recipe.config.parameters or {}
    measured_with = info.model_dump(include={"max_tokens", "seed"})
    other = [f"{name} {value}" for name, value in measured_with.items() if parameters.get(name, value) != value]
    if other and not data:
        LOG.warning("%s was measured with %s, and that holds instead of the recipe's.", path, " and ".join(other))
    for fallback in info.fallbacks:
        if fallback.level in levels:
            LOG.warning("%s", printable(str(fallback)))
    if info.keep and not recipe.keep:
        LOG.warning(
            "%s also has prompts for the base model: to use them, give its entry in 'models' a 'weight' above 0.", path
        )
    statistics = stored.take([index for index in order if index is not None], keep=recipe.keep is not None)
    base, *experts = recipe.names.values()
    info = statistics.info.model_copy(update={"base_model": base, "models": tuple(experts)})
    return replace(statistics, info=info)


def _match_experts(experiment: Experiment, info: Info, data: Sequence[CalibrationData]) -> list[int | None]:
    """For each of the recipe's experts its index in the file, by content; None for one that was not measured."""
    unused, order = dict(enumerate(info.fingerprint.experts)), list[int | None]()
    for expert, model in enumerate(experiment.checkpoints[1:]):
        equal = [index for index, fingerprint in unused.items() if fingerprint == model.fingerprint]
        # Of copies of one expert, the one that was measured on these samples.
        same_data = [index for index in equal if data and info.calibration[index].sha256 == data[expert].sha256]
        order.append(next(iter(same_data or equal), None))
        unused = {index: fingerprint for index, fingerprint in unused.items() if index != order[-1]}
    return order


def _misfits(
    experiment: Experiment,
    info: Info,
    path: Path,
    levels: Sequence[str],
    order: Sequence[int | None],
    data: Sequence[CalibrationData],
) -> Iterator[str]:
    """Everything in which a file does not fit the recipe: models, levels, and samples and settings if it names data."""
    recipe, base, measured = experiment.recipe, experiment.base, info.fingerprint.base
    config = hashed_computation(base.config)
    # Another version of transformers may add or drop entries.
    same_version = info.versions.get("transformers") == files.versions()["transformers"]
    entries = measured.config.keys() | config.keys() if same_version else measured.config.keys() & config.keys()
    changed = sorted(entry for entry in entries if measured.config.get(entry) != config.get(entry))
    if measured.tensors != base.fingerprint:
        yield (
            f"The base model {recipe.base} is not the one that {path} was measured on ('{info.base_model}'), "
            "because its content differs: use that base model or other statistics."
        )
    elif changed:
        yield (
            f"The configuration of the base model {recipe.base} is not the one that {path} was measured with "
            f"(different {', '.join(changed)}): change it back, or measure into another file."
        )
    for expert, index in zip(recipe.experts, order, strict=True):
        if index is None:
            yield (
                f"The expert {expert} is not one of the models that {path} was measured on "
                f"({', '.join(info.models)}), because its content differs: use those, or measure into another file."
            )
    if recipe.keep and info.keep is None:
        yield (
            f"{path} was measured without prompts for the base model, but the recipe gives some: measure into another "
            "file, or leave the base model out of 'models'."
        )
    calibration = [*(None if index is None else info.calibration[index] for index in order), info.keep]
    different = [
        f"'{task.calibration}' of {task}"
        for task, measured, drawn in zip(recipe.tasks, calibration, data, strict=False)
        if measured is not None and drawn.sha256 != measured.sha256
    ]
    if different:
        yield (
            f"{enumerated(different)} gives other tokens than {path} was measured on (samples {info.samples}, "
            f"max_tokens {info.max_tokens}, seed {info.seed}): use the same prompts and settings, leave 'calibration' "
            "out to use the file as it is, or measure into another file."
        )
    if missing := [level for level in levels if level not in info.levels]:
        options = " ".join(f"--level {level}" for level in (*info.levels, *missing))
        yield (
            f"{path} lacks the level {', '.join(missing)} (it holds {', '.join(info.levels)}): use a level that it "
            f"holds, or measure another file with 'mergekit-slta calibrate RECIPE -o FILE {options}'."
        )
