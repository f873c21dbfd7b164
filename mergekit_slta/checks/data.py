"""Checks of calibration data and of statistics files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mergekit.common import ModelReference

from mergekit_slta.checks.space import unwritable_folder
from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import check_source, is_dataset
from mergekit_slta.errors import SltaError, all_of
from mergekit_slta.models.fingerprint import fingerprint_of
from mergekit_slta.models.skeleton import hashed_computation
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Task, published_names, require_calibration
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.matching import match
from mergekit_slta.slta.statistics import BaseContent, Statistics, resolve_statistics


def calibration(experiment: Experiment, drawing: bool) -> None:
    """Refuse data that cannot be used, or a statistics file that cannot be used or written.

    Datasets of the Hub are not asked for: only the spelling of their names is checked.

    Args:
        experiment: the opened recipe.
        drawing: whether to draw samples, for which the base model must be there.
    """
    settings = experiment.settings
    file = None
    if isinstance(settings, SltaSettings) and settings.statistics:
        file = resolve_statistics(settings.statistics, experiment.transformers_cache)
        if not file.exists() and (parent := unwritable_folder(file)):
            raise SltaError(
                f"The statistics file {file} cannot be created: {parent} is not a writable folder, name another."
            )
    there = file is not None and file.exists()
    tasks = [task for task in experiment.recipe.tasks if task.calibration]
    checks: list[Callable[[], object]] = [partial(_source, experiment, task, drawing) for task in tasks]
    checks.append(partial(require_calibration, experiment.recipe, statistics=there))
    if isinstance(settings, SltaSettings) and not there:
        checks.append(partial(published_names, experiment.recipe))
    all_of(checks)
    if not drawing:
        return
    local = [task for task in tasks if not is_dataset(task.calibration)]
    drawn = dict(zip(local, experiment.load_data(local), strict=True))
    if there and file is not None:
        _fits(experiment, file, drawn)


def _source(experiment: Experiment, task: Task, drawing: bool) -> None:
    """Refuse a source that gives no samples that the models can read, or a dataset that is misspelt."""
    if drawing and not is_dataset(task.calibration):
        experiment.load_data([task])
        return
    if task.template:
        template_fields(task.template)
    check_source(task.calibration)


def _fits(experiment: Experiment, file: Path, drawn: dict[Task, CalibrationData]) -> None:
    """Refuse a statistics file that does not fit the recipe, as far as it can be known without a download."""
    recipe, base = experiment.recipe, experiment.model(experiment.recipe.base)
    found, content = Statistics.load(file), _content(experiment, recipe.base)
    match(
        found.info,
        file,
        recipe,
        None if content is None else BaseContent(tensors=content, config=hashed_computation(base.config)),
        [_content(experiment, expert.reference) for expert in recipe.experts],
        [drawn.get(task) for task in recipe.tasks],
        [experiment.settings.measured_level],
    )


def _content(experiment: Experiment, reference: ModelReference) -> str | None:
    """Identify a model by samples of its tensors; None if that takes a download or unpickling."""
    folder, adapter = experiment.model(reference).folder, Path(reference.lora.path) if reference.lora else None
    if folder is None or not all(any(own.glob("*.safetensors")) for own in (folder, adapter) if own):
        return None
    return fingerprint_of(folder, adapter, experiment.options.lora_merge_dtype)
