"""What is wrong with a recipe's text, one sentence for each problem; models are checked elsewhere."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import (
    ConditionalParameter,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputSliceDefinition,
)
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import BaseModel

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.configuration import ParameterTable, expert_references, model_inputs, parameter_tables
from mergekit_slta.recipe.settings import MethodSettings, parameter_specs


def recipe_problems(config: MergeConfiguration, settings: type[MethodSettings]) -> list[str]:
    """Everything that is wrong with a recipe for a method, in the order of the recipe."""
    problems = []
    if not config.base_model:
        problems.append(
            f"The recipe has no base_model: '{settings.method}' needs the model that the experts were fine-tuned from."
        )
    problems += structure_problems(config, settings.method) if settings.runs_models else []
    problems += input_problems(config)
    specs = {spec.name: spec for spec in parameter_specs(settings)}
    for table in parameter_tables(config):
        problems += placement_problems(table, specs) if table.model is not None else []
        problems += parameter_problems(table, specs, one_value=settings.runs_models)
    return problems


def structure_problems(config: MergeConfiguration, method: str) -> list[str]:
    """Why a recipe is not a merge of whole models, for a method that merges only these."""
    if config.modules:
        return [f"'{method}' does not take 'modules': list the experts under 'models'."]
    slices = config.slices or []
    if len(slices) > 1:
        return [f"'{method}' merges whole models, not {len(slices)} slices: list the experts under 'models'."]
    if slices and slices[0].base_model not in (None, config.base_model):
        return ["The slice has its own base_model: move it to the top of the recipe."]
    if slices and config.base_model and config.base_model not in [source.model for source in slices[0].sources]:
        return [f"The slice lacks the base model {config.base_model}: list the experts under 'models'."]
    return []


def slice_problems(config: MergeConfiguration, num_layers: int) -> list[str]:
    """Why the recipe's one slice does not cover all layers of the models."""
    return [
        f"The slice of {source.model} takes layers {source.layer_range[0]}-{source.layer_range[1]} of {num_layers}: "
        "only whole models can be calibrated, list the experts under 'models'."
        for output in config.slices or []
        for source in output.sources
        if tuple(source.layer_range) != (0, num_layers)
    ]


def input_problems(config: MergeConfiguration) -> list[str]:
    """No expert, an expert that is listed twice, and a base model that is listed under another spelling."""
    if model_inputs(config) and not expert_references(config):
        return ["The recipe has no expert: list a fine-tuned model beside the base model."]
    problems = []
    listed = [entry.model for entry in config.models or []]
    for model in dict.fromkeys(listed):
        if listed.count(model) > 1:
            problems.append(f"{model} is listed {listed.count(model)} times: list it once.")
        if config.base_model and model != config.base_model and _same_folder(model, config.base_model):
            problems.append(f"{model} is the base model {config.base_model}: spell it the same way, or leave it out.")
    return problems


def _same_folder(one: ModelReference, other: ModelReference) -> bool:
    paths = one.model.path, other.model.path
    return one.lora == other.lora and all(map(os.path.exists, paths)) and os.path.samefile(*paths)


def placement_problems(table: ParameterTable, specs: Mapping[str, ParameterSpec]) -> list[str]:
    """Parameters that stand under a model where mergekit silently ignores them."""
    problems = []
    for name in [name for name in table.parameters if name in specs]:
        if specs[name].scope == ParameterScope.SHARED:
            problems.append(
                f"'{name}' in {table.where} has no effect: it is one value for the whole merge, so move it to the "
                "'parameters' of the recipe."
            )
        elif table.is_base:
            problems.append(f"'{name}' in {table.where} has no effect: move it to an expert.")
    return problems


def parameter_problems(table: ParameterTable, specs: Mapping[str, ParameterSpec], one_value: bool) -> list[str]:
    """Unknown names (with the closest known one), wrong values, and lists where one value is needed."""
    problems = []
    for name, setting in table.parameters.items():
        if name not in specs:
            near = difflib.get_close_matches(name.lower(), specs, n=1)
            hint = f", did you mean '{near[0]}'?" if near else f"; the known ones are {', '.join(sorted(specs))}."
            problems.append(f"Unknown parameter '{name}' in {table.where}{hint}")
        elif one_value and not isinstance(setting, (str, int, float, bool)):
            problems.append(f"'{name}' in {table.where} must be one value for the whole merge, not a list or a filter.")
        else:
            for value in {repr(value): value for value in _values(setting)}.values():  # 1.0 and true are equal
                try:
                    specs[name].validate(value)
                except SltaError as error:
                    problems.append(error.message.replace(f"'{name}'", f"'{name}' in {table.where}", 1))
    return problems


def _values(setting: Any) -> Iterator[Any]:
    """The single values in a setting, which may be a value, a gradient or filters."""
    if isinstance(setting, ConditionalParameter):
        yield from _values(setting.value)
    elif isinstance(setting, list):
        for part in setting:
            yield from _values(part)
    else:
        yield setting


def key_problems(source: Any, settings: type[MethodSettings]) -> list[str]:
    """Keys of a recipe's YAML that look like a mistake and that mergekit silently ignores.

    Args:
        source: the parsed YAML.
        settings: the method's settings.
    """
    if not isinstance(source, Mapping):
        return []
    tables: list[tuple[Mapping[str, Any], type[BaseModel]]] = [(source, MergeConfiguration)]
    tables += [(entry, InputModelDefinition) for entry in _entries(source, "models")]
    for output in _entries(source, "slices"):
        tables.append((output, OutputSliceDefinition))
        tables += [(entry, InputSliceDefinition) for entry in _entries(output, "sources")]
    parameters = {spec.name for spec in parameter_specs(settings)}
    problems = []
    for table, model in tables:
        places = {MergeConfiguration: "the recipe", OutputSliceDefinition: "a slice"}
        where = places.get(model) or f"the entry of {table.get('model', 'a model')}"
        for key in [key for key in map(str, table) if key not in model.model_fields]:
            if key in parameters:
                problems.append(f"'{key}' in {where} has no effect: put it under 'parameters'.")
            elif near := difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.75):
                problems.append(f"Unknown key '{key}' in {where}, did you mean '{near[0]}'?")
    return problems


def _entries(table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The tables in the list under a key; none if the key holds something else."""
    entries = table.get(key)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
