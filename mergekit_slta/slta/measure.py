"""From a recipe to its statistics: reuse what has been measured, measure the rest, resume after an interruption."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.data.sources import source_name
from mergekit_slta.engine.partial import Partial, remove
from mergekit_slta.engine.passes import ProgressBar
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import share
from mergekit_slta.errors import SltaError, logger
from mergekit_slta.files import cache_folder, digest
from mergekit_slta.layers.submodules import fallbacks
from mergekit_slta.levels import LEVELS
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.skeleton import hashed_computation
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe, calibration_problems, name_problems, published_names
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.calibrate import Grams, calibrate
from mergekit_slta.slta.fingerprints import fingerprint, model_contents
from mergekit_slta.slta.matching import level_problems, match
from mergekit_slta.slta.statistics import (
    PUBLISHED_PREFIX,
    CalibrationInfo,
    Fingerprint,
    Info,
    Statistics,
    resolve_statistics,
    versions,
)

LOG = logger(__name__)
REUSED = "Nothing is measured anew: %s holds the measurement of the same models, data and settings."


def measure(
    recipe: Recipe,
    levels: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Statistics:
    """Measure what the closed form needs of a recipe's models, on its calibration data.

    Earlier measurements are reused: the file at ``path``, or one in the cache folder of the same models, data, settings
    and levels, which is copied to ``path``. An interrupted measurement is resumed. It takes about one forward pass of
    each model per sample, in float32, with one decoder layer of each model in memory.

    Args:
        recipe: a recipe for ``slta`` or ``featcal`` whose experts have calibration data.
        levels: ``model``, ``layer``, ``attn_mlp``, ``head_mlp`` or ``linear``; by default the recipe's.
        path: the statistics file, which is created or completed with missing levels; or a published one,
            ``hf:ORG/REPO/FILE[@REVISION]``. By default the recipe's ``statistics``, or a file in the cache folder.
        options: ``device`` ("cpu"), ``trust_remote_code`` (False), ``lora_merge_cache`` (None), ``transformers_cache``
            (None), ``quiet`` (False), and whatever else mergekit has options for.

    Returns:
        Per submodule the Gram matrices [N, T, T] float64 of N samples and T experts, in the recipe's order.

    Raises:
        SltaError: the recipe, a level, a model or the data is wrong, or an existing file does not fit the recipe.
    """
    return measured_statistics(Experiment(recipe, **options), levels, path)


def measured_statistics(
    experiment: Experiment,
    levels: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    measuring: bool = True,
) -> Statistics:
    """``measure`` for an opened recipe.

    Args:
        experiment, levels, path: as for ``measure``.
        measuring: measure what is not measured yet, rather than refuse.
    """
    settings = experiment.settings
    levels = [levels] if isinstance(levels, str) else list(levels or [settings.measured_level])
    experiment.require_levels(levels)
    source = os.fspath(path) if path else settings.statistics if isinstance(settings, SltaSettings) else ""
    published = source.startswith(PUBLISHED_PREFIX)
    file = resolve_statistics(source, experiment.transformers_cache) if source else None
    if file is not None and _exists(file, experiment.ranks):
        return _Measurement(experiment, file, measuring).reuse(levels, published)
    if problems := calibration_problems(experiment.recipe, takes_statistics=settings.takes_statistics):
        raise SltaError(*problems)
    data = experiment.load_data(experiment.recipe.experts)
    content = fingerprint(experiment, data)
    cached = cache_folder() / f"{digest([content.model_dump(mode='json'), sorted(levels)])}.safetensors"
    measurement = _Measurement(experiment, file or cached, measuring)
    if file is None and _exists(cached, experiment.ranks):
        if measuring and experiment.ranks.count == 1 and not experiment.quiet:
            LOG.warning(REUSED, cached)
        return measurement.reuse(levels, published)
    measurement.refuse_unless_measuring(levels)
    info = _info(experiment, levels, data, content)
    if file is not None and measurement.take(cached, info):
        return measurement.reuse(levels, published)
    return measurement.measure(info, experiment.experts, data, levels)


def _exists(path: Path, ranks: Ranks) -> bool:
    exists = path.is_file()
    ranks.require_equal(exists, path.parent)
    return exists


@dataclass(frozen=True)
class _Measurement:
    """An experiment and its statistics file, which may not exist yet."""

    experiment: Experiment
    path: Path
    measuring: bool

    def refuse_unless_measuring(self, levels: Sequence[str]) -> None:
        """Refuse to measure levels where only what has been measured is asked for."""
        if not self.measuring:
            raise SltaError(
                f"The recipe's statistics at level {', '.join(levels)} are not in {self.path}: measure them with "
                "'mergekit-slta calibrate', and name the file under 'statistics' in the recipe."
            )

    def take(self, cached: Path, info: Info) -> bool:
        """Whether the file now holds what the cache folder has of the same measurement, under this recipe's names."""
        ranks = self.experiment.ranks
        if ranks.first and cached.is_file() and not partial_folder(self.path).exists():
            found = Statistics.load(cached)
            measured = {"versions": found.info.versions, "fallbacks": found.info.fallbacks}
            replace(found, info=info.model_copy(update=measured)).save(self.path)
            if not self.experiment.quiet:
                LOG.warning(REUSED, cached)
        ranks.wait()
        return _exists(self.path, ranks)

    def reuse(self, levels: Sequence[str], published: bool) -> Statistics:
        """Compare the file with the recipe, add missing levels to it, and select the recipe's experts."""
        found, recipe = Statistics.load(self.path), self.experiment.recipe
        if problems := calibration_problems(recipe, statistics_exist=True):
            raise SltaError(*problems)
        given = all(expert.calibration for expert in recipe.experts)
        data = self.experiment.load_data(recipe.experts) if given else None
        base, experts = model_contents(self.experiment)
        matched = match(found.info, self.path, recipe, base, experts, data or [None] * len(experts))
        problems = matched.problems + level_problems(found.info, self.path, recipe, levels, published)
        if problems:
            raise SltaError(*problems)
        if any(content.whole is None for content in found.info.fingerprint.contents):
            LOG.warning(
                "%s is of an older version, which identifies models by samples of their tensors alone: it misses edits "
                "of a few rows or of the base model's configuration. Measure into another file to be sure.",
                self.path,
            )
        order = [index for index in matched.order if index is not None]  # none is missing, or there was a problem
        missing = [level for level in levels if level not in found.info.levels]
        for fallback in found.info.fallbacks:
            if fallback.level in levels:
                LOG.warning("%s", fallback)
        if missing and data is not None:
            self.refuse_unless_measuring(missing)
            found = self._add_levels(found, order, data, missing)
        elif not published and Partial.is_left_over(partial_folder(self.path), found.info.levels):
            self._finish()  # clean up after a process that was killed when it had written the file
        return _named(found.take(order), recipe)

    def _add_levels(
        self, found: Statistics, order: Sequence[int], data: Sequence[CalibrationData], levels: Sequence[str]
    ) -> Statistics:
        position = [order.index(index) for index in range(len(order))]
        experts, data = [self.experiment.experts[i] for i in position], [data[i] for i in position]
        known = [level for level in LEVELS if level in found.info.levels or level in levels]
        info = found.info.model_copy(update={"levels": tuple(known)})
        return self.measure(info, experts, data, levels, known=found.grams)

    def measure(
        self,
        info: Info,
        experts: Sequence[Checkpoint],
        data: Sequence[CalibrationData],
        levels: Sequence[str],
        known: Grams | None = None,
    ) -> Statistics:
        """Measure levels, and write the statistics file with them and with the known ones."""
        content = info.fingerprint.model_dump(mode="json")
        content |= {"levels": list(levels), "config": hashed_computation(self.experiment.base.config)}
        if isinstance(content["base"], dict):
            del content["base"]["config"]
        partial = Partial(partial_folder(self.path), content)
        partial.enter(self.experiment.ranks)
        try:
            grams = self._calibrate(experts, data, levels, partial)
            new = [fallback for level in levels for fallback in fallbacks(self.experiment.decoder, level)]
            info = info.model_copy(update={"fallbacks": (*info.fallbacks, *new)})
            task = torch.tensor([index for index, samples in enumerate(data) for _ in samples.token_ids])
            tokens = torch.tensor([len(ids) for samples in data for ids in samples.token_ids])
            statistics = Statistics({**(known or {}), **grams}, task, tokens, info)
            if self.experiment.ranks.first:
                statistics.save(self.path)
            self._finish()
        finally:
            partial.release()
        return statistics

    def _calibrate(
        self, experts: Sequence[Checkpoint], data: Sequence[CalibrationData], levels: Sequence[str], partial: Partial
    ) -> Grams:
        experiment, ranks = self.experiment, self.experiment.ranks
        decoder = experiment.decoder.to(experiment.device)
        tasks = [samples.token_ids for samples in data]
        batch_tokens = experiment.settings.batch_tokens
        with ProgressBar(
            total=share(decoder, tasks, batch_tokens, ranks) * len(decoder),
            desc=f"Calibrating {', '.join(levels)}",
            unit="sample",
            unit_scale=1 / len(decoder),
            leave=False,
            disable=experiment.quiet,
        ) as bar:
            return calibrate(
                decoder,
                [experiment.base, *experts],
                tasks,
                levels,
                batch_tokens=batch_tokens,
                partial=partial,
                ranks=ranks,
                progress=bar.update,
            )

    def _finish(self) -> None:
        self.experiment.ranks.wait()
        remove(partial_folder(self.path))


def _named(statistics: Statistics, recipe: Recipe) -> Statistics:
    """Statistics under the recipe's names: what was measured may have been measured under others."""
    names = published_names(recipe)
    if len(set(names)) < len(names):
        return statistics
    info = statistics.info.model_copy(update={"base_model": names[0], "models": tuple(names[1:])})
    return replace(statistics, info=info)


def _info(
    experiment: Experiment, levels: Sequence[str], data: Sequence[CalibrationData], fingerprint: Fingerprint
) -> Info:
    recipe, config = experiment.recipe, experiment.base.config
    if problems := name_problems(recipe):
        raise SltaError(*problems)
    names = published_names(recipe)
    return Info(
        format_version=1,
        levels=tuple(level for level in LEVELS if level in levels),
        base_model=names[0],
        models=tuple(names[1:]),
        calibration=tuple(
            CalibrationInfo(
                source=source_name(samples.source),
                template=samples.template,
                sha256=samples.sha256,
            )
            for samples in data
        ),
        samples=experiment.settings.samples,
        max_tokens=experiment.settings.max_tokens,
        seed=experiment.settings.seed,
        inputs="base",
        architecture=(config.architectures or [""])[0],
        num_layers=config.get_text_config().num_hidden_layers,
        dtype=experiment.base.dtype,
        versions=versions(),
        fingerprint=fingerprint,
    )


def partial_folder(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
