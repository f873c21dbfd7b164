"""Identify an experiment's models and samples by content, to compare a statistics file with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.files import digest
from mergekit_slta.models.skeleton import hashed_computation
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.statistics import BaseContent, Fingerprint, settings_fingerprint, tokens_fingerprint


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
        settings=settings_fingerprint(settings.samples, settings.max_tokens, settings.seed),
    )


def local_identity(experiment: Experiment, content: Fingerprint) -> dict[str, Any]:
    """The key of files in the user's own cache: the content, and the stamps of the models' files on this machine.

    It also differs after an edit of a few rows, which the content's sample of the bytes does not show. Where processes
    have disks of their own, the first one's count.
    """
    models = [experiment.base, *experiment.experts]
    files = digest([sorted(model.stamps.values()) for model in models])
    return content.model_dump(mode="json") | {"models": experiment.ranks.gather(int(files[:12], 16))[0]}
