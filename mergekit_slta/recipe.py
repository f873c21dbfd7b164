"""What a recipe asks of us: the base model, the experts with their data, and the settings with their defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from mergekit.common import ModelReference
from mergekit.config import InputModelDefinition, InputSliceDefinition, MergeConfiguration
from mergekit.merge_methods import MergeMethodSpec
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from mergekit_slta.data import source_key
from mergekit_slta.errors import SltaError
from mergekit_slta.submodules import Edges, Level


class SltaSettings(BaseModel):
    """The shared parameters of ``merge_method: slta``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    level: Level = "attn_mlp"
    samples: Annotated[int, Field(ge=1)] = 30
    max_tokens: Annotated[int, Field(ge=1)] = 512
    seed: int = 0
    balance: bool = True
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    edges: Edges = "base"
    batch_tokens: Annotated[int, Field(ge=0)] = 0
    statistics: str = ""


class ExpertSettings(BaseModel):
    """The parameters of one expert."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    calibration: str = ""
    template: str = ""


@dataclass(frozen=True)
class Expert:
    """A fine-tuned model and the task data that it is calibrated on."""

    reference: ModelReference
    calibration: str = ""
    template: str = ""

    def __str__(self) -> str:
        return str(self.reference)


@dataclass(frozen=True)
class Recipe:
    """The base model, the experts in the recipe's order, and the settings."""

    base: ModelReference
    experts: tuple[Expert, ...]
    settings: SltaSettings


def parameter_specs(shared: type[BaseModel], per_expert: type[BaseModel]) -> tuple[ParameterSpec, ...]:
    """The merge method's parameters as mergekit declares them, from the models that define them."""
    return tuple(
        ParameterSpec(name, _annotated(field), scope, default=field.default)
        for settings, scope in ((shared, ParameterScope.SHARED), (per_expert, ParameterScope.NON_BASE))
        for name, field in settings.model_fields.items()
    )


def _annotated(field: FieldInfo) -> Any:
    """A field's type with its bounds."""
    return Annotated[(field.annotation, *field.metadata, Field())]


def recipe_problems(config: MergeConfiguration, spec: MergeMethodSpec) -> list[str]:
    """Everything that is wrong with a recipe as a text, one sentence each, in the order of the recipe."""
    if config.base_model is None:
        return [f"The recipe has no base_model: '{spec.name}' needs the model that the experts were fine-tuned from."]
    inputs, problems = _full_depth_inputs(config, spec.name)
    problems += parameter_problems(config.parameters or {}, spec, "parameters")
    experts = [entry for entry in inputs if entry.model != config.base_model]
    if inputs and not experts:
        problems.append("The recipe has no expert: 'models' names nothing but the base model.")
    for entry in inputs:
        problems += parameter_problems(entry.parameters or {}, spec, f"the parameters of {entry.model}")
    return problems


def _full_depth_inputs(
    config: MergeConfiguration, method: str
) -> tuple[list[InputModelDefinition | InputSliceDefinition], list[str]]:
    """The recipe's models, be they under ``models`` or one slice of full depth."""
    if config.modules:
        return [], [f"'{method}' does not take 'modules': list the experts under 'models'."]
    if config.models:
        return list(config.models), []
    slices = config.slices or []
    if len(slices) != 1:
        return [], [f"'{method}' merges whole models, not {len(slices)} slices: list the experts under 'models'."]
    return list(slices[0].sources), []


def slice_problems(config: MergeConfiguration, num_layers: int) -> list[str]:
    """What keeps the recipe's one slice from being the whole depth of the models."""
    return [
        f"The slice of {source.model} takes layers {source.layer_range[0]}-{source.layer_range[1]} of {num_layers}: "
        "only whole models can be calibrated, list the experts under 'models'."
        for output in config.slices or []
        for source in output.sources
        if tuple(source.layer_range) != (0, num_layers)
    ]


def parameter_problems(parameters: Mapping[str, Any], spec: MergeMethodSpec, where: str) -> list[str]:
    """Unknown names (with the nearest known one), wrong values, and lists where one value is needed."""
    known = {parameter.name: parameter for parameter in spec.parameters}
    problems = []
    for name, value in parameters.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean '{near[0]}'?" if near else f"; known are {', '.join(sorted(known))}."
            problems.append(f"Unknown parameter '{name}' in {where}{hint}")
        elif isinstance(value, list) or not isinstance(value, (str, int, float, bool)):
            problems.append(f"'{name}' in {where} must be one value for the whole merge, not a list or a filter.")
        elif problem := _value_problem(known[name], value):
            problems.append(f"'{name}' in {where}: {problem}.")
    return problems


def _value_problem(parameter: ParameterSpec, value: Any) -> str | None:
    try:
        parameter.validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"]
        return f"{message[0].lower()}{message[1:]}, not {value!r}"
    return None


def calibration_problems(recipe: Recipe, statistics_exist: bool) -> list[str]:
    """Experts without data, and experts that share it (with equal data every weight comes out as 1/T)."""
    problems = []
    seen: dict[Any, Expert] = {}
    for expert in recipe.experts:
        if not expert.calibration:
            if not statistics_exist:
                problems.append(
                    f"The expert {expert} has no 'calibration': give it a file or dataset with a few prompts of its "
                    "task (parameters: {calibration: prompts.jsonl}), or name a statistics file."
                )
            continue
        key = source_key(expert.calibration)
        if key in seen:
            problems.append(
                f"The experts {seen[key]} and {expert} have the same calibration source '{expert.calibration}': "
                "give each the data of its own task."
            )
        seen.setdefault(key, expert)
    return problems


def from_config(config: MergeConfiguration) -> Recipe:
    """Read a recipe that has no problems.

    Raises:
        SltaError: it has.
    """
    inputs, problems = _full_depth_inputs(config, config.merge_method)
    if problems or config.base_model is None:
        raise SltaError("\n".join(problems) or "The recipe has no base_model.")
    shared = config.parameters or {}
    experts = []
    for entry in inputs:
        if entry.model != config.base_model:
            own = {name: value for name, value in shared.items() if name in ExpertSettings.model_fields}
            settings = ExpertSettings.model_validate(own | (entry.parameters or {}))
            experts.append(Expert(entry.model, settings.calibration, settings.template))
    shared = {name: value for name, value in shared.items() if name in SltaSettings.model_fields}
    return Recipe(config.base_model, tuple(experts), SltaSettings.model_validate(shared))
