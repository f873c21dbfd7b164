"""From a recipe to its statistics: use the file that fits, else measure, and resume after an interruption."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import click
import torch

from mergekit_slta.data.sources import CalibrationData, source_name
from mergekit_slta.engine.loop import layer_bar
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.streams import share
from mergekit_slta.errors import SltaError
from mergekit_slta.levels import LEVELS
from mergekit_slta.models.fingerprint import hashed_computation
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import Recipe, RecipeOrFile, published_name, published_names, require_calibration
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.calibrate import calibrate
from mergekit_slta.slta.statistics import Solution, Statistics
from mergekit_slta.slta.statistics_file import (
    BaseContent,
    CalibrationInfo,
    Fingerprint,
    Info,
    resolve_statistics,
    settings_fingerprint,
    tokens_fingerprint,
    versions,
)
from mergekit_slta.slta.weights import TensorWeights

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
        levels: ``model``, ``layer``, ``attn_mlp``, ``head_mlp`` or ``linear``; by default the recipe's.
        path: the statistics file, which is created if it does not exist; or a published one,
            ``hf:ORG/REPO/FILE[@REVISION]``. By default the recipe's ``statistics``; without one nothing is written.
        options: see ``Options``.

    Returns:
        Per submodule the Gram matrices [N, T, T] float64 of N prompts and T experts, in the recipe's order.

    Raises:
        SltaError: the recipe, a level, a model or the data is wrong, or an existing file does not fit the recipe.
    """
    experiment = opened(recipe, options)
    statistics = measured_statistics(experiment, levels, path)
    names = (statistics.info.base_model, *statistics.info.models)
    return replace(statistics, paths=dict(zip(names, map(str, experiment.recipe.references), strict=True)))


def measured_statistics(
    experiment: Experiment, levels: str | Sequence[str] | None = None, path: str | os.PathLike[str] | None = None
) -> Statistics:
    """``measure`` for an opened recipe."""
    asked, ranks = _levels(experiment, levels), experiment.ranks
    source, file = _named_file(experiment, path)
    if file is not None and file.is_file():
        statistics = _matched(experiment, file, asked)
        _say_known(experiment, source)
        if ranks.first:
            Partial(partial_folder(file)).remove()  # of a run that was killed after it had written the file
        return statistics
    data, info, run = _described(experiment, asked)
    if file is None:
        return _run_models(experiment, info, data, asked, None)
    partial = Partial(partial_folder(file))
    with partial.held(ranks):
        partial.begin(run, ranks)
        statistics = _run_models(experiment, info, data, asked, partial, file)
        if ranks.first:
            partial.remove()
    return statistics


def statistics_of_merge(experiment: Experiment, beside: Path, partial: Partial) -> Statistics:
    """The statistics for a merge: of the recipe's file, else of the file in the output, else from ``_run_models``.

    Args:
        experiment: the recipe.
        beside: the file in the output, which is used if it fits, and replaced if not.
        partial: the folder of finished layers in the output; from now on the merge counts as unfinished.
    """
    asked, ranks = _levels(experiment), experiment.ranks
    source, file = _named_file(experiment)
    if file is not None and file.is_file():
        statistics = _matched(experiment, file, asked)
        _say_known(experiment, source)
        partial.begin({"statistics": source}, ranks, replace=True)
        return statistics
    data, info, run = _described(experiment, asked)
    partial.begin(run, ranks, replace=True)
    if file is None:
        info = info.model_copy(update={"files": run["files"]})
        if (known := _still_fits(experiment, beside, info.files, asked)) is not None:
            _say_known(experiment, beside)
            return known
    return _run_models(experiment, info, data, asked, partial, file or beside)


def _levels(experiment: Experiment, levels: str | Sequence[str] | None = None) -> list[str]:
    """The levels to measure, by default the recipe's, in the order of ``LEVELS``."""
    settings = experiment.settings
    chosen = settings.level if isinstance(settings, SltaSettings) else SltaSettings().level
    named = [levels] if isinstance(levels, str) else levels or [chosen]
    experiment.require_levels(named)
    return [level for level in LEVELS if level in named]


def _named_file(experiment: Experiment, path: str | os.PathLike[str] | None = None) -> tuple[str, Path | None]:
    """The statistics file of this path, or else the recipe's: how it is named, and where it is; it need not exist."""
    settings = experiment.settings
    source = os.fspath(path or "") or (settings.statistics if isinstance(settings, SltaSettings) else "")
    if not source:
        return "", None
    file = resolve_statistics(source, experiment.options.transformers_cache)
    experiment.ranks.require_equal(file.is_file(), file.parent)
    return source, file


def _described(experiment: Experiment, levels: Sequence[str]) -> tuple[list[CalibrationData], Info, dict[str, Any]]:
    """The samples, the metadata of a measurement, and what identifies the run for its folder of finished layers."""
    require_calibration(experiment.recipe)
    data = experiment.load_data(experiment.recipe.tasks)
    info = _info(experiment, data)
    content = info.fingerprint.model_dump(mode="json") | {"levels": levels}
    return data, info, experiment.local_identity(content)


def _say_known(experiment: Experiment, source: str | Path) -> None:
    if not experiment.quiet:
        click.echo(f"Note: {source} already holds the statistics of this recipe, so nothing is measured.", err=True)


def _still_fits(experiment: Experiment, file: Path, stamps: str, levels: Sequence[str]) -> Statistics | None:
    """The statistics in a merge's output at some levels, if they fit and no file of the models has changed since."""
    known = None
    with contextlib.suppress(SltaError):  # of another merge, or damaged: this merge replaces it
        known = _matched(experiment, file, levels).at_levels(levels)
    fits = known is not None and known.info.files == stamps
    experiment.ranks.require_equal(fits, file.parent)
    return known if fits else None


def solve_arguments(recipe: Recipe) -> dict[str, Any]:
    """The arguments of ``Statistics.solve`` for the merge that a recipe for ``slta`` describes."""
    settings = recipe.settings_of(SltaSettings)
    return settings.model_dump(include={"level", "balance", "ridge"}) | {"keep_weight": recipe.keep_weight}


def solved(experiment: Experiment, statistics: Statistics) -> tuple[Solution, TensorWeights]:
    """The merging weights that a recipe for ``slta`` asks for, by submodule and by tensor."""
    solution = statistics.solve(**solve_arguments(experiment.recipe))
    return solution, TensorWeights(experiment.decoder, solution.level, solution.submodules, experiment.layout)


def _matched(experiment: Experiment, path: Path, levels: Sequence[str]) -> Statistics:
    """Compare a file with the recipe, and select the recipe's experts and tasks under the recipe's names."""
    stored, recipe = Statistics.load(path), experiment.recipe
    require_calibration(recipe, statistics=True)
    given = all(task.calibration for task in recipe.tasks)
    data = experiment.load_data(recipe.tasks) if given else [None] * len(recipe.tasks)
    set_there, info = recipe.config.parameters or {}, stored.info
    values = {name: getattr(info, name) for name in ("samples", "max_tokens", "seed")}
    if not given and (
        other := [f"{name} {value}" for name, value in values.items() if set_there.get(name, value) != value]
    ):
        LOG.warning("%s was measured with %s, which hold instead of the recipe's.", path, " and ".join(other))
    base, experts = model_contents(experiment)
    order = match(stored.info, path, experiment, base, experts, data, levels)
    for fallback in stored.info.fallbacks:
        if fallback.level in levels:
            LOG.warning("%s", fallback)
    if stored.info.keep and not recipe.keep:
        LOG.warning("%s also has prompts for the base model: to use them, give its entry in 'models' a 'weight'.", path)
    chosen = stored.take(order, keep=recipe.keep is not None)
    names = [published_name(reference) for reference in recipe.references]
    if len(set(names)) < len(names):
        return chosen
    return replace(chosen, info=chosen.info.model_copy(update={"base_model": names[0], "models": tuple(names[1:])}))


def _run_models(
    experiment: Experiment,
    info: Info,
    data: Sequence[CalibrationData],
    levels: Sequence[str],
    partial: Partial | None,
    file: Path | None = None,
) -> Statistics:
    """Run the models on the samples, and write the statistics to the file."""
    ranks = experiment.ranks
    decoder = experiment.running_decoder
    tasks = [samples.token_ids for samples in data]
    models, prompts = [experiment.base, *experiment.experts], share(decoder, tasks, ranks)
    with layer_bar(f"Calibrating {', '.join(levels)}", models, len(decoder), prompts, experiment.quiet) as progress:
        grams = calibrate(decoder, models, tasks, levels, partial=partial, ranks=ranks, progress=progress)
    for model in models:
        model.refuse_changes()
    coarser = tuple(fallback for level in levels for fallback in decoder.fallbacks(level))
    statistics = Statistics(
        grams,
        torch.tensor([task for task, samples in enumerate(tasks) for _ in samples]),
        torch.tensor([len(token_ids) for samples in tasks for token_ids in samples]),
        info.model_copy(update={"levels": tuple(levels), "fallbacks": coarser}),
    )
    if file is not None and ranks.first:
        statistics.save(file)
    ranks.wait()
    return statistics


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
        samples=most_samples(recipe),
        max_tokens=experiment.settings.max_tokens,
        seed=experiment.settings.seed,
        inputs="base",
        architecture=(config.architectures or [""])[0],
        num_layers=len(experiment.decoder),
        dtype=experiment.base.dtype,
        versions=versions(),
        fingerprint=fingerprint(experiment, data),
    )


def most_samples(recipe: Recipe) -> int:
    """The most prompts of an expert's task, as the file tells them; the hashes of the tokens tell the rest."""
    return max(expert.samples for expert in recipe.experts)


def partial_folder(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


# The content of models, data and settings


def match(
    info: Info,
    path: Path,
    experiment: Experiment,
    base: BaseContent | None,
    experts: Sequence[str | None],
    data: Sequence[CalibrationData | None],
    levels: Sequence[str],
) -> list[int]:
    """Compare a file with a recipe: models by content, in any order; data and settings if the recipe names data.

    Args:
        info, path: the file's metadata, and its path.
        base: the base model's content; None if only a download would show it.
        experts: the experts' fingerprints in the recipe's order; None likewise.
        data: the samples of the recipe's tasks; None for samples that are not drawn.
        levels: the levels that the recipe needs.

    Returns:
        For each of the experts with a fingerprint its index in the file.

    Raises:
        SltaError: everything in which the file does not fit, a sentence each.
    """
    recipe = experiment.recipe
    problems = list(_base_problems(info, path, str(recipe.base), base)) if base else []
    unused, order = dict(enumerate(info.fingerprint.experts)), list[int | None]()
    for expert, content, samples in zip(recipe.experts, experts, data, strict=False):  # the base model's come last
        equal = [index for index, known in unused.items() if known == content]
        # Of copies of one expert, the one that was measured on these samples.
        same_data = [index for index in equal if samples and info.calibration[index].sha256 == samples.sha256]
        order.append(next(iter(same_data or equal), None))
        if equal:
            del unused[(same_data or equal)[0]]
        elif content is not None:
            problems.append(
                f"The expert {expert} is not one of the models that {path} was measured on "
                f"({', '.join(info.models)}), because its content differs: use those, or measure into another file."
            )
    if recipe.keep and info.keep is None:
        problems.append(
            f"{path} was measured without prompts for the base model, but the recipe gives some: measure into another "
            "file, or leave the base model out of 'models'."
        )
    if all(task.calibration for task in recipe.tasks):
        known = [None if index is None else info.calibration[index] for index in order]
        may_differ = [
            (task, measured, samples)
            for task, measured, samples in zip(recipe.tasks, [*known, info.keep], data, strict=False)
            if measured is not None and (samples is None or samples.sha256 != measured.sha256)
        ]
        own = {"samples": most_samples(recipe)} | recipe.settings.model_dump(include={"max_tokens", "seed"})
        settings = [
            f"The recipe has {name} {value}, but {path} was measured with {getattr(info, name)}: set this value, or "
            "measure into another file."
            for name, value in own.items()
            if may_differ and value != getattr(info, name)  # of no account where the same samples are drawn
        ]
        # Other settings draw other samples, so the data can be compared only if the settings are equal.
        problems += settings or [
            f"The calibration data '{task.calibration}' of {task} gives other tokens than "
            f"'{measured.source}', on which {path} was measured: use the same prompts, leave "
            "'calibration' out to use the file as it is, or measure into another file."
            for task, measured, samples in may_differ
            if samples is not None
        ]
    if missing := [level for level in levels if level not in info.levels]:
        asked = " ".join(f"--level {level}" for level in (*info.levels, *missing))
        problems.append(
            f"{path} lacks the level {', '.join(missing)} (it holds {', '.join(info.levels)}): use a level that it "
            f"holds, or measure another file with 'mergekit-slta calibrate RECIPE -o FILE {asked}'."
        )
    if problems:
        raise SltaError(*problems)
    return [index for index in order if index is not None]


def _base_problems(info: Info, path: Path, name: str, base: BaseContent) -> Iterator[str]:
    known = info.fingerprint.base
    # Another version of transformers may add or drop entries.
    same_version = info.versions.get("transformers") == versions()["transformers"]
    names = known.config.keys() | base.config.keys() if same_version else known.config.keys() & base.config.keys()
    changed = sorted(name for name in names if known.config.get(name) != base.config.get(name))
    if known.tensors != base.tensors:
        yield (
            f"The base model {name} is not the one that {path} was measured on ('{info.base_model}'), "
            "because its content differs: use that base model or other statistics."
        )
    elif changed:
        yield (
            f"The configuration of the base model {name} is not the one that {path} was measured with "
            f"(different {', '.join(changed)}): change it back, or measure into another file."
        )


def model_contents(experiment: Experiment) -> tuple[BaseContent, list[str]]:
    """Identify the base model and the experts."""
    config = hashed_computation(experiment.base.config)
    base = BaseContent(tensors=experiment.base.fingerprint(), config=config)
    return base, [expert.fingerprint() for expert in experiment.experts]


def fingerprint(experiment: Experiment, data: Sequence[CalibrationData]) -> Fingerprint:
    """Identify the models, the samples and the settings."""
    settings = experiment.settings
    base, experts = model_contents(experiment)
    return Fingerprint(
        base=base,
        experts=tuple(experts),
        tokens=tokens_fingerprint([samples.sha256 for samples in data]),
        settings=settings_fingerprint(most_samples(experiment.recipe), settings.max_tokens, settings.seed),
    )
