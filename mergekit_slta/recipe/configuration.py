"""Read mergekit's configuration of a merge, in which models stand under ``models``, ``slices`` or ``modules``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from mergekit.common import ModelReference
from mergekit.config import InputModelDefinition, InputSliceDefinition, MergeConfiguration, OutputSliceDefinition

Input: TypeAlias = InputModelDefinition | InputSliceDefinition


def output_slices(config: MergeConfiguration) -> list[OutputSliceDefinition]:
    """The slices of a recipe and of its modules."""
    modules = (config.modules or {}).values()
    return [*(config.slices or []), *(output for module in modules for output in module.slices or [])]


def model_inputs(config: MergeConfiguration) -> list[Input]:
    """Every mention of a model under ``models``, ``slices`` or ``modules``, in the recipe's order."""
    modules = list((config.modules or {}).values())
    models: list[Input] = [*(config.models or []), *(entry for module in modules for entry in module.models or [])]
    return models + [source for output in output_slices(config) for source in output.sources]


def expert_references(config: MergeConfiguration) -> list[ModelReference]:
    """The models of a recipe except the base model, each once, in the recipe's order."""
    named = dict.fromkeys(entry.model for entry in model_inputs(config))
    return [model for model in named if model != config.base_model]


def shared_parameters(config: MergeConfiguration) -> dict[str, Any]:
    """The parameters for the whole merge of a recipe with at most one slice, whose own parameters take precedence."""
    slices = output_slices(config)
    return {**(config.parameters or {}), **(slices[0].parameters or {} if slices else {})}


def expert_parameters(config: MergeConfiguration) -> dict[ModelReference, dict[str, Any]]:
    """Each expert's parameters: the shared ones, overridden by its own."""
    own = {entry.model: entry.parameters or {} for entry in reversed(model_inputs(config))}
    return {model: {**shared_parameters(config), **own[model]} for model in expert_references(config)}


def base_parameters(config: MergeConfiguration) -> dict[str, Any]:
    """The base model's own parameters, of which mergekit takes none; none if it is not listed, or without any."""
    given = (entry.parameters for entry in model_inputs(config) if entry.model == config.base_model)
    return dict(next(filter(None, given), {}))


class ParameterTable(NamedTuple):
    """One ``parameters:`` table of a recipe: its place for error messages, and the model that it belongs to, if any."""

    where: str
    parameters: Mapping[str, Any]
    model: ModelReference | None = None


def parameter_tables(config: MergeConfiguration) -> Iterator[ParameterTable]:
    yield ParameterTable("the recipe's parameters", config.parameters or {})
    for name, module in (config.modules or {}).items():
        yield ParameterTable(f"the parameters of the module {name}", module.parameters or {})
    for output in output_slices(config):
        yield ParameterTable("the parameters of a slice", output.parameters or {})
    for entry in model_inputs(config):
        yield ParameterTable(f"the parameters of {entry.model}", entry.parameters or {}, entry.model)
