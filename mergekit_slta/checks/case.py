"""The recipe that the checks examine, with its models and data as far as they can be opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_slta.checks.compatibility import architecture_problem
from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.data.sources import is_dataset
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.headers import Model
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Expert, Reading
from mergekit_slta.recipe.settings import MethodSettings, SltaSettings
from mergekit_slta.slta.statistics import resolve_statistics

Kind = TypeVar("Kind", bound=MethodSettings)


@dataclass(frozen=True)
class Case:
    """The experiment that the checks examine, and the folder of its merged model, if that is known."""

    experiment: Experiment
    out_path: Path | None = None

    @property
    def config(self) -> MergeConfiguration:
        return self.experiment.recipe.config

    @property
    def options(self) -> MergeOptions:
        return self.experiment.options

    @property
    def reading(self) -> Reading:
        return self.experiment.recipe.reading

    @property
    def method(self) -> type[MethodSettings]:
        return self.experiment.recipe.method

    def settings(self, kind: type[Kind]) -> Kind:
        """The recipe's settings, for a check that only methods of that kind have."""
        settings = self.reading.settings
        assert isinstance(settings, kind)
        return settings

    @cached_property
    def opened(self) -> dict[ModelReference, Model | SltaError]:
        """The base model and the experts, or why one cannot be opened."""
        return {name: attempt(self.experiment.model, name) for name in self.experiment.recipe.references}

    @property
    def models(self) -> list[Model]:
        """The models that can be opened."""
        return [model for model in self.opened.values() if isinstance(model, Model)]

    @property
    def base(self) -> Model | None:
        """The base model, if there is one and it can be opened."""
        return next((model for model in self.models if model.reference == self.reading.base), None)

    @property
    def pairs(self) -> list[tuple[Model, Model]]:
        """The base model with each expert, for all that can be opened."""
        base = self.base
        return [(base, model) for model in self.models if model is not base] if base else []

    @property
    def siblings(self) -> list[tuple[Model, Model]]:
        """The base model with each expert of its architecture and sizes."""
        return [(base, expert) for base, expert in self.pairs if not self.architecture_problem(base, expert)]

    def architecture_problem(self, base: Model, expert: Model) -> str | None:
        """Why an expert's architecture is wrong; --allow-crimes allows another one if no model has to be run."""
        return architecture_problem(base, expert, mixed=self.options.allow_crimes and not self.method.runs_models)

    @property
    def adapted(self) -> list[Model]:
        """The models that are LoRA adapters."""
        return [model for model in self.models if model.reference.lora is not None]

    @property
    def aligns_vocabularies(self) -> bool:
        """Whether mergekit gives all models one tokenizer."""
        return self.experiment.recipe.tokenizer_source is not None

    @cached_property
    def decoder(self) -> Decoder | SltaError | None:
        """The base model's decoder, or why it has none; None where no model is run."""
        if not self.method.runs_models or self.base is None:
            return None
        return attempt(lambda: self.experiment.decoder)

    @cached_property
    def statistics(self) -> Path | SltaError | None:
        """The statistics file that the recipe names, whether it exists or not."""
        if not self.method.takes_statistics or not (name := self.settings(SltaSettings).statistics):
            return None
        return attempt(resolve_statistics, name, self.options.transformers_cache)

    @cached_property
    def drawn(self) -> dict[Expert, CalibrationData | SltaError]:
        """The calibration samples of every expert whose source is a file, or why they cannot be drawn."""
        if not self.method.runs_models or self.base is None:
            return {}
        files = [expert for expert in self.reading.experts if expert.calibration and not is_dataset(expert.calibration)]
        return {expert: attempt(self.experiment.samples.of, expert) for expert in files}

    @property
    def samples(self) -> dict[Expert, CalibrationData]:
        """The calibration samples that could be drawn."""
        return {expert: data for expert, data in self.drawn.items() if isinstance(data, CalibrationData)}


# A check returns the problems that it finds in a case, one sentence each. Its docstring names them.
Check = Callable[[Case], list[str]]


def of_models(problem: Callable[[Model], str | None]) -> Check:
    """Make a check of every model from a function that says what is wrong with one."""
    return lambda case: [said for model in case.models if (said := problem(model))]


def of_siblings(problem: Callable[[Model, Model], str | None]) -> Check:
    """Make a check of every pair of ``Case.siblings`` from a function that says what is wrong with one."""
    return lambda case: [said for base, expert in case.siblings if (said := problem(base, expert))]


def of_decoder(check: Callable[[Case, Decoder], list[str]]) -> Check:
    """Make a check of cases that run a decoder; other cases have no problem."""
    return lambda case: check(case, case.decoder) if isinstance(case.decoder, Decoder) else []


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the SltaError that it raised."""
    try:
        return function(*arguments)
    except SltaError as error:
        return error


def failures(results: Iterable[object]) -> list[str]:
    """The messages of the errors that ``attempt`` has returned."""
    return [result.message for result in results if isinstance(result, SltaError)]
