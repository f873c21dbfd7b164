"""Read mergekit's configuration of a merge, in which models stand under ``models``, ``slices`` or ``modules``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import InputModelDefinition, InputSliceDefinition, MergeConfiguration, OutputSliceDefinition


def output_slices(config: MergeConfiguration) -> list[OutputSliceDefinition]:
    """The slices of a recipe and of its modules."""
    modules = (config.modules or {}).values()
    return [*(config.slices or []), *(output for module in modules for output in module.slices or [])]


def model_inputs(config: MergeConfiguration) -> list[InputModelDefinition | InputSliceDefinition]:
    """Every mention of a model under ``models``, ``slices`` or ``modules``, in the recipe's order."""
    of_modules = (entry for module in (config.modules or {}).values() for entry in module.models or [])
    of_slices = (source for output in output_slices(config) for source in output.sources)
    return [*(config.models or []), *of_modules, *of_slices]


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
    given = {entry.model: entry.parameters or {} for entry in reversed(model_inputs(config))}
    return {model: {**shared_parameters(config), **given[model]} for model in expert_references(config)}


def base_parameters(config: MergeConfiguration) -> dict[str, Any]:
    """The base model's own parameters, of which mergekit takes none; none if it is not listed, or without any."""
    given = (entry.parameters for entry in model_inputs(config) if entry.model == config.base_model)
    return dict(next(filter(None, given), {}))


def parameter_tables(config: MergeConfiguration) -> Iterator[tuple[str, Mapping[str, Any], ModelReference | None]]:
    """Every ``parameters:`` table: its place for error messages, what it holds, and the model that it is of, if any."""
    yield "the recipe's parameters", config.parameters or {}, None
    for name, module in (config.modules or {}).items():
        yield f"the parameters of the module {name}", module.parameters or {}, None
    for output in output_slices(config):
        yield "the parameters of a slice", output.parameters or {}, None
    for entry in model_inputs(config):
        yield f"the parameters of {entry.model}", entry.parameters or {}, entry.model
