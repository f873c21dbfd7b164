"""From a recipe to its statistics: reuse what has been measured, measure the rest, resume after an interruption."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.data.sources import source_name
from mergekit_slta.engine.batches import share
from mergekit_slta.engine.partial import Partial, remove
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.files import cache_folder, digest
from mergekit_slta.layers.submodules import fallbacks
from mergekit_slta.layers.trace import on_device
from mergekit_slta.levels import LEVELS
from mergekit_slta.recipe.experiment import Experiment, opened
from mergekit_slta.recipe.recipe import RecipeOrFile, published_name, published_names, require_calibration
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.calibrate import calibrate
from mergekit_slta.slta.matching import fingerprint, local_identity, match, model_contents
from mergekit_slta.slta.solution import Solution
from mergekit_slta.slta.statistics import CalibrationInfo, Info, Statistics, resolve_statistics, versions
from mergekit_slta.slta.weights import TensorWeights

LOG = logging.getLogger(__name__)
REUSED = "Nothing is measured anew: %s holds the measurement of the same models, data and settings."


def measure(
    recipe: RecipeOrFile,
    levels: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    lora_merge_cache: str | None = None,
    transformers_cache: str | None = None,
    quiet: bool = False,
) -> Statistics:
    """Measure the Gram matrices that the closed form needs, of a recipe's models on its calibration data.

    Earlier measurements are reused: the file at ``path``, or the levels that the cache folder holds of the same models,
    data and settings. An interrupted measurement is resumed. It takes about one forward pass of each model per sample,
    in float32, with one decoder layer of each model in memory.

    Args:
        recipe: a recipe for ``slta`` or ``featcal`` whose experts have calibration data, or its file.
        levels: ``model``, ``layer``, ``attn_mlp``, ``head_mlp`` or ``linear``; by default the recipe's.
        path: the statistics file, which is created if it does not exist; or a published one,
            ``hf:ORG/REPO/FILE[@REVISION]``. By default the recipe's ``statistics``, or a file per level in the cache
            folder.
        device: where to compute: "cpu", "cuda", or a GPU such as "cuda:1".
        trust_remote_code: run the Python code that comes with a model (dangerous).
        lora_merge_cache: the folder to merge LoRA adapters in; without one, adapters are refused.
        transformers_cache: the folder for downloaded files; the Hub's own cache by default.
        quiet: no progress bars and no notes.

    Returns:
        Per submodule the Gram matrices [N, T, T] float64 of N samples and T experts, in the recipe's order.

    Raises:
        SltaError: the recipe, a level, a model or the data is wrong, or an existing file does not fit the recipe.
    """
    experiment = opened(recipe, device, trust_remote_code, lora_merge_cache, transformers_cache, quiet)
    found = measured_statistics(experiment, levels, path)
    names = (found.info.base_model, *found.info.models)
    return replace(found, paths=dict(zip(names, map(str, experiment.recipe.references), strict=True)))


def measured_statistics(
    experiment: Experiment,
    levels: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    measuring: bool = True,
) -> Statistics:
    """``measure`` for an opened recipe; with ``measuring`` false, what is not measured yet is refused."""
    settings, ranks = experiment.settings, experiment.ranks
    chosen = settings if isinstance(settings, SltaSettings) else SltaSettings()
    asked = [levels] if isinstance(levels, str) else list(levels or [chosen.level])
    experiment.require_levels(asked)
    source = os.fspath(path) if path else chosen.statistics
    file = resolve_statistics(source, experiment.transformers_cache) if source else None
    if file is not None and _exists(file, ranks):
        statistics = _matched(experiment, file, asked)
        if ranks.first:
            remove(partial_folder(file))  # of a run that was killed after it had written the file
        return statistics
    require_calibration(experiment.recipe)
    data = experiment.load_data(experiment.recipe.tasks)
    info = _info(experiment, data)
    identity = local_identity(experiment, info.fingerprint)
    cached = {level: cache_folder() / f"{digest([identity, level])}.safetensors" for level in LEVELS if level in asked}
    known = {level: Statistics.load(own) for level, own in cached.items() if _exists(own, ranks)}
    if not (missing := [level for level in cached if level not in known]):
        if measuring and ranks.count == 1 and not experiment.quiet:
            LOG.info(REUSED, ", ".join(map(str, cached.values())))
        return _saved(experiment, _together(known.values(), info), {file: asked} if file else {})
    if not measuring:
        raise SltaError(
            f"The recipe's statistics at level {', '.join(missing)} are not in {cache_folder()}: measure them with "
            "'mergekit-slta calibrate', and name the file under 'statistics' in the recipe."
        )
    files = {file: asked} if file else {cached[level]: [level] for level in missing}
    partial = Partial(partial_folder(next(iter(files))), identity | {"levels": missing})
    partial.enter(ranks)
    try:
        measured = _measured(experiment, info, data, missing, partial)
        statistics = _saved(experiment, _together([*known.values(), measured], info), files)
        remove(partial.folder)
    finally:
        partial.release()
    return statistics


def solved(experiment: Experiment, statistics: Statistics) -> tuple[Solution, TensorWeights]:
    """The merging weights that a recipe for ``slta`` asks for, by submodule and by tensor."""
    settings = experiment.recipe.settings_of(SltaSettings)
    solution = statistics.solve(
        settings.level, balance=settings.balance, ridge=settings.ridge, keep_weight=experiment.recipe.keep_weight
    )
    return solution, TensorWeights(experiment.decoder, settings.level, solution.submodules, experiment.layout)


def _exists(path: Path, ranks: Ranks) -> bool:
    exists = path.is_file()
    ranks.require_equal(exists, path.parent)
    return exists


def _saved(experiment: Experiment, statistics: Statistics, files: Mapping[Path, Sequence[str]]) -> Statistics:
    """Write some levels of statistics to each of several files."""
    if experiment.ranks.first:
        for file, levels in files.items():
            statistics.at_levels(levels).save(file)
    experiment.ranks.wait()
    return statistics


def _together(measured: Iterable[Statistics], info: Info) -> Statistics:
    """Statistics of the same samples at different levels as one, under the names in ``info``."""
    parts = list(measured)
    coarser = [fallback for part in parts for fallback in part.info.fallbacks]
    described = {
        "levels": tuple(level for level in LEVELS if any(level in part.info.levels for part in parts)),
        "fallbacks": tuple(sorted(coarser, key=lambda fallback: LEVELS.index(fallback.level))),
        "versions": parts[0].info.versions,
    }
    grams = {name: gram for part in parts for name, gram in part.grams.items()}
    return replace(parts[0], grams=grams, info=info.model_copy(update=described))


def _matched(experiment: Experiment, path: Path, levels: Sequence[str]) -> Statistics:
    """Compare a file with the recipe, and select the recipe's experts and tasks under the recipe's names."""
    found, recipe = Statistics.load(path), experiment.recipe
    require_calibration(recipe, statistics=True)
    given = all(task.calibration for task in recipe.tasks)
    data = experiment.load_data(recipe.tasks) if given else [None] * len(recipe.tasks)
    base, experts = model_contents(experiment)
    order = match(found.info, path, experiment, base, experts, data, levels)
    for fallback in found.info.fallbacks:
        if fallback.level in levels:
            LOG.warning("%s", fallback)
    chosen = found.take(order, keep=recipe.keep is not None)
    names = [published_name(reference) for reference in recipe.references]
    if len(set(names)) < len(names):
        return chosen
    return replace(chosen, info=chosen.info.model_copy(update={"base_model": names[0], "models": tuple(names[1:])}))


def _measured(
    experiment: Experiment, info: Info, data: Sequence[CalibrationData], levels: Sequence[str], partial: Partial
) -> Statistics:
    """Run the models on the samples."""
    ranks = experiment.ranks
    decoder = on_device(experiment.decoder, experiment.device)
    tasks = [samples.token_ids for samples in data]
    with tqdm(
        total=share(decoder, tasks, ranks) * len(decoder),
        desc=f"Calibrating {', '.join(levels)}",
        unit="sample",
        unit_scale=1 / len(decoder),
        leave=False,
        disable=experiment.quiet,
    ) as bar:
        grams = calibrate(
            decoder,
            [experiment.base, *experiment.experts],
            tasks,
            levels,
            partial=partial,
            ranks=ranks,
            progress=bar.update,
        )
    for model in (experiment.base, *experiment.experts):
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
