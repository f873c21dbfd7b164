"""Identify an experiment's models and samples by content, to compare a statistics file with it."""

from __future__ import annotations

from collections.abc import Sequence

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.models.skeleton import hashed_computation
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.statistics import BaseContent, Content, Fingerprint, settings_fingerprint, tokens_fingerprint


def model_contents(experiment: Experiment) -> tuple[BaseContent, list[Content]]:
    """Identify the base model and the experts; the first rank reads them first and keeps the hashes for the others."""
    ranks, cache = experiment.ranks, experiment.transformers_cache
    if not ranks.first:
        ranks.wait()
    base, *experts = (
        {"sample": model.fingerprint(cache), "whole": model.fingerprint(cache, whole=True)}
        for model in (experiment.base, *experiment.experts)
    )
    if ranks.first:
        ranks.wait()
    config = hashed_computation(experiment.base.config)
    return BaseContent(**base, config=config), [Content(**expert) for expert in experts]


def fingerprint(experiment: Experiment, data: Sequence[CalibrationData]) -> Fingerprint:
    """Identify the models, the samples and the settings."""
    settings = experiment.settings
    base, experts = model_contents(experiment)
    return Fingerprint(
        base=base,
        experts=tuple(experts),
        tokens=tokens_fingerprint([samples.sha256 for samples in data]),
        settings=settings_fingerprint(settings.samples, settings.max_tokens, settings.seed),
    )
