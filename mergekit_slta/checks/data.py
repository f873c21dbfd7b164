"""Checks of calibration data and of statistics files."""

from __future__ import annotations

from pathlib import Path

import torch
from mergekit.common import ModelReference

from mergekit_slta.checks.case import Case, attempt, failures
from mergekit_slta.checks.space import unwritable_folder
from mergekit_slta.checks.tokenizers import unknown_ids
from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import check_source
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.fingerprint import fingerprint_of
from mergekit_slta.models.headers import Model
from mergekit_slta.models.skeleton import hashed_computation
from mergekit_slta.recipe.recipe import calibration_problems, name_problems
from mergekit_slta.recipe.samples import repeated_data
from mergekit_slta.recipe.settings import CalibrationSettings, SltaSettings
from mergekit_slta.slta.matching import match
from mergekit_slta.slta.statistics import BaseContent, Statistics


def calibration_sources(case: Case) -> list[str]:
    """Experts with neither data nor statistics, and experts that share their data."""
    if case.reading.base is None:
        return []
    there = isinstance(case.statistics, Path) and case.statistics.exists()
    known = there or isinstance(case.statistics, SltaError)
    return calibration_problems(case.reading, known, case.method.takes_statistics)


def same_names(case: Case) -> list[str]:
    """Models that would get the same name in the statistics, where these are not there yet."""
    known = isinstance(case.statistics, SltaError) or (case.statistics is not None and case.statistics.exists())
    if known or case.reading.base is None or not case.method.takes_statistics:
        return []
    return name_problems(case.reading)


def same_samples(case: Case) -> list[str]:
    """Experts whose sources differ but give the same tokens."""
    return [] if calibration_sources(case) else repeated_data(case.samples.items())


def calibration_data(case: Case) -> list[str]:
    """Sources that cannot be read, records that cannot be turned into text, samples that the model cannot take."""
    problems = []
    for expert in case.reading.experts:
        drawn = case.drawn.get(expert)
        if isinstance(drawn, CalibrationData):
            problems += sample_problems(case, drawn) + unknown_ids(case, expert, drawn)
        elif drawn is not None:
            problems.append(drawn.message)
        elif expert.calibration:  # a dataset, or a file without a tokenizer
            wrong_template = attempt(template_fields, expert.template) if expert.template else None
            problems += failures([wrong_template]) or failures([attempt(check_source, expert.calibration)])
    return problems


def sample_problems(case: Case, drawn: CalibrationData) -> list[str]:
    """Samples that are longer than the base model's table of positions."""
    decoder, base = case.decoder, case.base
    if not isinstance(decoder, Decoder) or base is None:
        return []
    embedding = decoder.model.get_input_embeddings()
    others = [module for module in decoder.tower.modules() if module is not embedding]
    tables = [module.num_embeddings for module in others if isinstance(module, torch.nn.Embedding)]
    longest = max(map(len, drawn.token_ids))
    if longest <= min(tables, default=longest):
        return []
    return [
        f"Calibration source {drawn.source!r} has samples of {longest} tokens, but {base} has {min(tables)} "
        f"positions: set 'max_tokens: {min(tables)}' or less."
    ]


def statistics_file(case: Case) -> list[str]:
    """A statistics file that is unreadable, does not fit, lacks a level that cannot be added, or is not writable."""
    path, settings, reading = case.statistics, case.settings(SltaSettings), case.reading
    if reading.base is None or not isinstance(path, Path):
        return failures([path])
    if not path.exists():
        parent = unwritable_folder(path)
        problem = f"The statistics file {path} cannot be created: {parent} is not a writable folder, name another."
        return [problem] if parent else []
    found = attempt(Statistics.load, path)
    if isinstance(found, SltaError):
        return [found.message]
    base = case.opened.get(reading.base)
    content = _content(case, reading.base)
    known = None
    if content is not None and isinstance(base, Model):
        known = BaseContent(tensors=content, config=hashed_computation(base.config))
    experts = [_content(case, expert.reference) for expert in reading.experts]
    data = [case.experiment.samples.of(expert) if expert in case.samples else None for expert in reading.experts]
    try:
        match(found.info, path, reading, known, experts, data, [settings.level])
    except SltaError as error:
        return error.message.splitlines()
    return []


def _content(case: Case, reference: ModelReference) -> str | None:
    """Identify a model by samples of its tensors; None if that takes a download or unpickling."""
    model = case.opened.get(reference)
    if not isinstance(model, Model) or model.folder is None:
        return None
    adapter = Path(reference.lora.path) if reference.lora else None
    if not all(any(folder.glob("*.safetensors")) for folder in (model.folder, adapter) if folder):
        return None
    return fingerprint_of(model.folder, adapter, case.options.lora_merge_dtype)


def few_records(case: Case) -> list[str]:
    """Sources with fewer usable records than 'samples' asks for."""
    asked = case.settings(CalibrationSettings).samples
    return [
        f"Calibration source {data.source!r} has only {len(data.records)} of the {asked} usable records that 'samples' "
        "asks for."
        for data in case.samples.values()
        if len(data.records) < asked
    ]
