"""Checks of calibration data and of statistics files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from mergekit.common import ModelReference

from mergekit_slta.checks.space import require_writable
from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import CalibrationData, is_dataset, parse_dataset, read_records
from mergekit_slta.errors import SltaError, all_of
from mergekit_slta.evaluation.evaluate import MORE
from mergekit_slta.models.fingerprint import fingerprint_of, hashed_computation
from mergekit_slta.models.hub import HUB_ERRORS, reason
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Task, published_names, require_calibration
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.matching import match
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.statistics_file import BaseContent, resolve_statistics
from mergekit_slta.words import counted


def calibration(experiment: Experiment) -> None:
    """Refuse data that cannot be used, or a statistics file that cannot be used or written.

    Datasets of the Hub are not downloaded; where the Hub can be reached, it is asked whether it has them.
    """
    recipe, settings = experiment.recipe, experiment.settings
    given = settings.statistics if isinstance(settings, SltaSettings) else ""
    file = resolve_statistics(given, experiment.options.transformers_cache) if given else None
    measured = file is not None and file.exists()
    tasks = [task for task in recipe.tasks if task.calibration]
    local = [task for task in tasks if not is_dataset(task.calibration)]
    checks: list[Callable[[], object]] = [partial(_source, experiment, task) for task in tasks]
    checks.append(partial(require_calibration, recipe, statistics=measured))
    if file is not None and not measured:
        checks.append(partial(require_writable, f"The statistics file {file}", file))
    if isinstance(settings, SltaSettings) and not measured:
        checks.append(partial(published_names, recipe.references))
    all_of(checks)
    drawn = dict(zip(local, experiment.load_data(local), strict=True))
    if file is not None and measured:
        _fits(experiment, file, drawn)


def _source(experiment: Experiment, task: Task) -> None:
    """Refuse a file that gives no samples that the models can read, a dataset that is misspelt, or a wrong template."""
    if task.template:
        template_fields(task.template)
    if is_dataset(task.calibration):
        _require_dataset(task.calibration)
    else:
        read_records(task.calibration)  # known without the base model's tokenizer
        experiment.load_data([task])


def none_to_evaluate(experiment: Experiment, task: Task) -> Iterator[str]:
    """Say that calibration leaves a task no record for ``evaluate``, or what is wrong with its test data.

    No merge needs these, so they are no problem. Datasets are not downloaded.
    """
    source = task.evaluation or task.calibration
    if not task.calibration or is_dataset(task.calibration) or is_dataset(source):
        return
    try:
        left = experiment.held_out(task, 1).records
    except SltaError as error:
        yield from error.sentences
        return
    if not left:
        count = counted(len(experiment.samples(task).records), "record")
        has = f"has only {count}: all calibrate" if source == task.calibration else "has only records that calibrate"
        yield f"Calibration source {source!r} of {task} {has}, none is left for `evaluate`. {MORE}"


def _require_dataset(source: str) -> None:
    """Refuse a dataset that the Hub does not have; without a network it may be in the cache."""
    name, _, _ = parse_dataset(source)
    if os.path.isdir(name):
        return
    try:
        huggingface_hub.dataset_info(name, timeout=10)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SltaError(f"Calibration source {source!r} cannot be used: on the Hub, {reason(error)}.") from error
    except HUB_ERRORS:
        pass


def _fits(experiment: Experiment, file: Path, drawn: dict[Task, CalibrationData]) -> None:
    """Refuse a statistics file that does not fit the recipe, as far as it can be known without a download."""
    recipe = experiment.recipe
    base, *experts = (_content_of(experiment, model) for model in recipe.references)
    config = experiment.model(recipe.base).config
    match(
        Statistics.load(file).info,
        file,
        experiment,
        None if base is None else BaseContent(tensors=base, config=hashed_computation(config)),
        experts,
        [drawn.get(task) for task in recipe.tasks],
        [recipe.settings_of(SltaSettings).level],
    )


def _content_of(experiment: Experiment, reference: ModelReference) -> str | None:
    """Identify a model by samples of its tensors; None if that takes a download or unpickling."""
    folder, adapter = experiment.model(reference).folder, Path(reference.lora.path) if reference.lora else None
    if folder is None or not all(any(place.glob("*.safetensors")) for place in (folder, adapter) if place):
        return None
    return fingerprint_of(folder, adapter)
