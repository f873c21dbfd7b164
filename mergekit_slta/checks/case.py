"""A recipe under examination, opened as far as it can be, and what the checks of it are made with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge_methods import MergeMethodSpec
from mergekit.options import MergeOptions
from transformers import PreTrainedTokenizerBase

from mergekit_slta.checks.compatibility import architecture_problem, silenced
from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.data.sources import is_dataset
from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.scratch import Needs, needs
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.headers import Model, open_model
from mergekit_slta.recipe.recipe import (
    CalibrationSettings,
    Expert,
    calibrates,
    expert_parameters,
    expert_references,
    shared_parameters,
)
from mergekit_slta.recipe.samples import Samples
from mergekit_slta.slta.statistics import resolve_statistics


@dataclass(frozen=True)
class Case:
    """A recipe under examination; what it names is opened once, when it is first looked at."""

    config: MergeConfiguration
    options: MergeOptions
    spec: MergeMethodSpec
    source: Any
    out_path: Path | None

    @property
    def calibrates(self) -> bool:
        return calibrates(self.spec)

    @property
    def runs_experts(self) -> bool:
        """Whether the experts read samples themselves, rather than what the base model makes of them."""
        return self.shared("teacher") is not None

    @property
    def aligns_vocabularies(self) -> bool:
        """Whether mergekit gives all models one tokenizer."""
        return bool(self.config.tokenizer or self.config.tokenizer_source)

    @cached_property
    def opened(self) -> dict[ModelReference, Model | SltaError]:
        """The base model and the experts, or why one cannot be opened."""
        references = expert_references(self.config)
        if self.config.base_model is not None:
            references.insert(0, self.config.base_model)
        return {reference: attempt(self._open, reference) for reference in references}

    def _open(self, reference: ModelReference) -> Model:
        return open_model(reference, self.options.trust_remote_code, self.options.transformers_cache)

    @property
    def base(self) -> Model | None:
        """The base model, if there is one and it can be opened."""
        return next((model for model in self.models if model.reference == self.config.base_model), None)

    @property
    def models(self) -> list[Model]:
        """The models that can be opened."""
        return [model for model in self.opened.values() if isinstance(model, Model)]

    @property
    def pairs(self) -> list[tuple[Model, Model]]:
        """The base model with each expert, as far as they can be opened."""
        base = self.base
        return [(base, model) for model in self.models if model is not base] if base else []

    @property
    def adapted(self) -> list[Model]:
        """The models that are LoRA adapters."""
        return [model for model in self.models if model.reference.lora is not None]

    @property
    def siblings(self) -> list[tuple[Model, Model]]:
        """The base model with each expert of its architecture and sizes."""
        return [(base, expert) for base, expert in self.pairs if not self.architecture_problem(base, expert)]

    def architecture_problem(self, base: Model, expert: Model) -> str | None:
        """Why an expert is of another architecture, unless mixing was asked for and nothing has to be run."""
        return architecture_problem(base, expert, mixed=self.options.allow_crimes and not self.calibrates)

    @cached_property
    def decoder(self) -> Decoder | SltaError | None:
        """The base model's decoder without weights, or why it has none; None where nothing is to be run."""
        if not self.calibrates or self.base is None:
            return None
        return attempt(Decoder, self.base.config, self.options.trust_remote_code)

    def shared(self, name: str) -> Any:
        """A shared parameter; the default where the recipe's value is none that the method takes."""
        for parameter in self.spec.shared_parameters:
            if parameter.name == name:
                with contextlib.suppress(Exception):  # whatever is wrong with the value is said elsewhere
                    return parameter.validate(shared_parameters(self.config).get(name, parameter.default))
                return parameter.default
        return None

    @cached_property
    def needs(self) -> Needs | SltaError | None:
        """What a feature merge takes while it runs, or why it cannot; None if the recipe is for another method."""
        if self.shared("scratch") is None or not isinstance(self.decoder, Decoder):
            return None
        most = self.shared("samples") * self.shared("max_tokens")
        drawn = sum(len(ids) for data in self.samples.values() for ids in data.token_ids)
        tokens = drawn + most * (len(self.experts) - len(self.samples))
        compare = bool(self.shared("report"))
        found: Needs | SltaError = attempt(needs, self.decoder, len(self.experts), tokens, self.shared("head"), compare)
        return found

    @cached_property
    def experts(self) -> list[Expert]:
        """The experts with their calibration, those left out whose calibration or template is no text."""
        experts = []
        for reference, given in expert_parameters(self.config).items():
            calibration, template = given.get("calibration", ""), given.get("template", "")
            if isinstance(calibration, str) and isinstance(template, str):
                experts.append(Expert(reference, calibration, template))
        return experts

    @cached_property
    def statistics(self) -> Path | SltaError | None:
        """The statistics file that the recipe names, be it there or not."""
        name = self.shared("statistics")
        return attempt(resolve_statistics, name, self.options.transformers_cache) if name else None

    @cached_property
    def drawn(self) -> dict[Expert, CalibrationData | SltaError]:
        """The calibration samples of every expert whose source is a file, or why there are none."""
        if not self.calibrates or self.base is None:
            return {}
        files = [expert for expert in self.experts if expert.calibration and not is_dataset(expert.calibration)]
        with silenced("mergekit_slta.data.draw"):  # it warns again when the data are used
            return {expert: attempt(self._samples.of, expert) for expert in files}

    @property
    def samples(self) -> dict[Expert, CalibrationData]:
        """The calibration samples of the experts that there are some of."""
        return {expert: data for expert, data in self.drawn.items() if isinstance(data, CalibrationData)}

    def tokenizer(self, reference: ModelReference) -> PreTrainedTokenizerBase:
        """A model's own tokenizer, loaded once."""
        return self._samples.tokenizer(reference)

    @property
    def calibration_settings(self) -> CalibrationSettings:
        """How many samples, of which length, drawn by which seed."""
        asked = {name: self.shared(name) for name in ("samples", "max_tokens", "seed")}
        return CalibrationSettings.model_validate({k: value for k, value in asked.items() if value is not None})

    @cached_property
    def _samples(self) -> Samples:
        """What draws the samples of a recipe with a base model."""
        assert self.config.base_model is not None
        options, settings = self.options, self.calibration_settings
        return Samples(self.config.base_model, settings, options.trust_remote_code, options.transformers_cache)


# A check names what there is to say about a case, one sentence each.
Check = Callable[[Case], list[str]]


def of_models(problem: Callable[[Model], str | None]) -> Check:
    """The check of every model for a problem that it may have by itself."""
    return lambda case: [said for model in case.models if (said := problem(model))]


def of_siblings(problem: Callable[[Model, Model], str | None]) -> Check:
    """The check of every expert of the base model's architecture and sizes for a problem beside the base model."""
    return lambda case: [said for base, expert in case.siblings if (said := problem(base, expert))]


def of_decoder(check: Callable[[Case, Decoder], list[str]]) -> Check:
    """The check of what is run, which has nothing to say where nothing is, or where it cannot be."""
    return lambda case: check(case, case.decoder) if isinstance(case.decoder, Decoder) else []


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the SltaError that it raised."""
    try:
        return function(*arguments)
    except SltaError as error:
        return error


def failures(results: Iterable[object]) -> list[str]:
    """What the errors among the results of attempts say."""
    return [result.message for result in results if isinstance(result, SltaError)]
