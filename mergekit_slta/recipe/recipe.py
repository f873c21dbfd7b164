"""What a recipe asks of us: the base model, the experts with their data, and the settings with their defaults."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from mergekit.common import ModelReference
from mergekit.config import (
    ConditionalParameter,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputSliceDefinition,
)
from mergekit.merge_methods import MergeMethodSpec
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from mergekit_slta.data.sources import source_key
from mergekit_slta.errors import SltaError
from mergekit_slta.levels import Edges, Level

Input: TypeAlias = InputModelDefinition | InputSliceDefinition
Parameters = Mapping[str, Any]
Settings = TypeVar("Settings", bound=BaseModel)


class CalibrationSettings(BaseModel):
    """The shared parameters of every merge method that looks at calibration data."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    samples: Annotated[int, Field(ge=1)] = 30
    max_tokens: Annotated[int, Field(ge=1)] = 512
    seed: int = 0
    batch_tokens: Annotated[int, Field(ge=0)] = 0
    report: str = ""


class SltaSettings(CalibrationSettings):
    """The shared parameters of ``merge_method: slta``."""

    level: Level = "attn_mlp"
    balance: bool = True
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    edges: Edges = "base"
    statistics: str = ""


EDGES_AVERAGED = ("average", "actmat")  # the anchors that average what lies outside the decoder layers


class FeatcalSettings(CalibrationSettings):
    """The shared parameters of ``merge_method: featcal``."""

    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.003
    anchor: Literal["base", "slta", "average", "actmat"] = "base"
    teacher: Annotated[float, Field(ge=0, le=1)] = 1.0
    head: bool = True
    scratch: str = ""

    @property
    def averages_edges(self) -> bool:
        """Whether what lies outside the decoder layers is the experts' average."""
        return self.anchor in EDGES_AVERAGED


class ActmatSettings(BaseModel):
    """The shared parameters of ``merge_method: actmat``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0


class ExpertSettings(BaseModel):
    """The parameters of one expert."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    calibration: str = ""
    template: str = ""


class ActmatExpertSettings(BaseModel):
    """The parameters of one expert of ``merge_method: actmat``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0


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
    settings: CalibrationSettings


def parameter_specs(shared: type[BaseModel], per_expert: type[BaseModel]) -> tuple[ParameterSpec, ...]:
    """The merge method's parameters as mergekit declares them, from the models that define them."""
    return tuple(
        ParameterSpec(name, _annotated(field), scope, default=field.default)
        for settings, scope in ((shared, ParameterScope.SHARED), (per_expert, ParameterScope.NON_BASE))
        for name, field in settings.model_fields.items()
    )


def _annotated(field: FieldInfo) -> Any:
    """A field's type with its bounds."""
    arguments = (field.annotation, *field.metadata, Field())
    return Annotated[arguments]


def calibrates(spec: MergeMethodSpec) -> bool:
    """Whether a merge method runs the base model on calibration data."""
    return any(parameter.name == "calibration" for parameter in spec.parameters)


# Reading a recipe


def from_config(config: MergeConfiguration) -> Recipe:
    """Read a recipe that has no problems.

    Raises:
        SltaError: it has.
    """
    problems = structure_problems(config, config.merge_method)
    if problems or config.base_model is None:
        raise SltaError("\n".join(problems) or "The recipe has no base_model.")
    experts = [
        Expert(reference, **_known(given, ExpertSettings).model_dump())
        for reference, given in expert_parameters(config).items()
    ]
    return Recipe(config.base_model, tuple(experts), shared_settings(config, CalibrationSettings))


def shared_settings(config: MergeConfiguration, settings: type[Settings]) -> Settings:
    """A recipe's parameters for the whole merge; those that ``settings`` does not have are passed over.

    Raises:
        SltaError: one has a wrong value.
    """
    return _known(shared_parameters(config), settings)


def _known(given: Parameters, settings: type[Settings]) -> Settings:
    try:
        return settings.model_validate({name: value for name, value in given.items() if name in settings.model_fields})
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise SltaError(
            f"'{name}' has a wrong value in the recipe: 'mergekit-slta check' says what it may be."
        ) from error


def model_inputs(config: MergeConfiguration) -> list[Input]:
    """Every mention of a model under ``models``, ``slices`` or ``modules``, in the recipe's order."""
    modules = list((config.modules or {}).values())
    models: list[Input] = [*(config.models or []), *(entry for module in modules for entry in module.models or [])]
    return models + [source for output in _slices(config) for source in output.sources]


def expert_references(config: MergeConfiguration) -> list[ModelReference]:
    """The models of a recipe but the base, each once, in the recipe's order."""
    return [
        model for model in dict.fromkeys(entry.model for entry in model_inputs(config)) if model != config.base_model
    ]


def shared_parameters(config: MergeConfiguration) -> dict[str, Any]:
    """The parameters for the whole merge of a recipe with one slice at most; a slice's own come first."""
    slices = _slices(config)
    return {**(config.parameters or {}), **(slices[0].parameters or {} if slices else {})}


def expert_parameters(config: MergeConfiguration) -> dict[ModelReference, dict[str, Any]]:
    """The parameters of every expert, for which mergekit looks under the expert first, then among the shared ones."""
    own = {entry.model: entry.parameters or {} for entry in reversed(model_inputs(config))}
    return {model: {**shared_parameters(config), **own[model]} for model in expert_references(config)}


def _slices(config: MergeConfiguration) -> list[OutputSliceDefinition]:
    modules = (config.modules or {}).values()
    return [*(config.slices or []), *(output for module in modules for output in module.slices or [])]


# What can be wrong with it


def recipe_problems(config: MergeConfiguration, spec: MergeMethodSpec) -> list[str]:
    """Everything that is wrong with a recipe as a text, one sentence each, in the order of the recipe."""
    problems = [] if config.base_model else [_NO_BASE.format(method=spec.name)]
    problems += structure_problems(config, spec.name) if calibrates(spec) else []
    problems += input_problems(config)
    for table in parameter_tables(config):
        problems += placement_problems(table, spec)
        problems += parameter_problems(table.parameters, spec, table.where)
    return problems


_NO_BASE = "The recipe has no base_model: '{method}' needs the model that the experts were fine-tuned from."


def structure_problems(config: MergeConfiguration, method: str) -> list[str]:
    """What keeps a recipe from being a merge of whole models, for a method that needs it to be."""
    if config.modules:
        return [f"'{method}' does not take 'modules': list the experts under 'models'."]
    slices = config.slices or []
    if len(slices) > 1:
        return [f"'{method}' merges whole models, not {len(slices)} slices: list the experts under 'models'."]
    if slices and slices[0].base_model not in (None, config.base_model):
        return ["The slice has a base_model of its own: write it at the top of the recipe."]
    if slices and config.base_model and config.base_model not in [source.model for source in slices[0].sources]:
        return [f"The slice lacks the base model {config.base_model}: list the experts under 'models'."]
    return []


def slice_problems(config: MergeConfiguration, num_layers: int) -> list[str]:
    """What keeps the recipe's one slice from being the whole depth of the models."""
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
        return ["The recipe has no expert: it names nothing but the base model."]
    problems = []
    listed = [entry.model for entry in config.models or []]
    for model in dict.fromkeys(listed):
        if listed.count(model) > 1:
            problems.append(f"{model} is listed {listed.count(model)} times: list it once.")
        if config.base_model and model != config.base_model and _same_folder(model, config.base_model):
            problems.append(f"{model} is the base model {config.base_model}: spell it alike, or leave it out.")
    return problems


def _same_folder(one: ModelReference, other: ModelReference) -> bool:
    if one.lora != other.lora or not (os.path.exists(one.model.path) and os.path.exists(other.model.path)):
        return False
    return os.path.samefile(one.model.path, other.model.path)


@dataclass(frozen=True)
class ParameterTable:
    """One ``parameters:`` of a recipe: where it stands, in words, and the model that it is under, if any."""

    where: str
    parameters: Parameters
    model: ModelReference | None = None
    is_base: bool = False


def parameter_tables(config: MergeConfiguration) -> Iterator[ParameterTable]:
    """All ``parameters:`` of a recipe."""
    yield ParameterTable("the recipe's parameters", config.parameters or {})
    for name, module in (config.modules or {}).items():
        yield ParameterTable(f"the parameters of the module {name}", module.parameters or {})
    for output in _slices(config):
        yield ParameterTable("the parameters of a slice", output.parameters or {})
    for entry in model_inputs(config):
        where, is_base = f"the parameters of {entry.model}", entry.model == config.base_model
        yield ParameterTable(where, entry.parameters or {}, entry.model, is_base)


def placement_problems(table: ParameterTable, spec: MergeMethodSpec) -> list[str]:
    """Parameters in a place where mergekit never looks for them, and says nothing."""
    if table.model is None:
        return []
    scopes = {parameter.name: parameter.scope for parameter in spec.parameters}
    problems = []
    for name in table.parameters:
        if scopes.get(name) == ParameterScope.SHARED:
            problems.append(
                f"'{name}' in {table.where} has no effect: it is one value for the whole merge, move it to the "
                "'parameters' of the recipe."
            )
        elif scopes.get(name) == ParameterScope.NON_BASE and table.is_base:
            problems.append(f"'{name}' in {table.where} has no effect: it belongs to an expert, not to the base model.")
    return problems


def parameter_problems(parameters: Parameters, spec: MergeMethodSpec, where: str) -> list[str]:
    """Unknown names (with the nearest known one), wrong values, and lists where one value is needed."""
    known = {parameter.name: parameter for parameter in spec.parameters}
    problems = []
    for name, setting in parameters.items():
        if name not in known:
            problems.append(f"Unknown parameter '{name}' in {where}{_hint(name, known)}")
        elif calibrates(spec) and not isinstance(setting, (str, int, float, bool)):
            problems.append(f"'{name}' in {where} must be one value for the whole merge, not a list or a filter.")
        else:
            values = dict.fromkeys(_values(setting))
            problems += filter(None, (_value_problem(known[name], value, where) for value in values))
    return problems


def _hint(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f", did you mean '{near[0]}'?" if near else f"; known are {', '.join(sorted(known))}."


def _values(setting: Any) -> Iterator[Any]:
    """The scalars of a setting: one, or those of a gradient or of filters."""
    if isinstance(setting, ConditionalParameter):
        yield from _values(setting.value)
    elif isinstance(setting, list):
        for part in setting:
            yield from _values(part)
    else:
        yield setting


def _value_problem(parameter: ParameterSpec, value: Any, where: str) -> str | None:
    try:
        parameter.validate(value)
    except ValidationError as error:
        rule = error.errors()[0]["msg"].removeprefix("Input ")
        return f"'{parameter.name}' in {where} {rule[0].lower()}{rule[1:]}, not {value!r}."
    except SltaError as error:
        return f"{error.message.rstrip('.')} (in {where})."
    return None


def key_problems(source: Any, spec: MergeMethodSpec) -> list[str]:
    """Keys of a recipe's YAML that mergekit drops without a word although they were meant to do something.

    Args:
        source: the recipe as YAML gives it.
        spec: the merge method's.
    """
    if not isinstance(source, Mapping):
        return []
    places: list[tuple[str, Any, type[BaseModel]]] = [("the recipe", source, MergeConfiguration)]
    places += [(f"the entry of {_name(entry)}", entry, InputModelDefinition) for entry in _entries(source, "models")]
    for output in _entries(source, "slices"):
        places.append(("a slice", output, OutputSliceDefinition))
        places += [
            (f"the entry of {_name(entry)}", entry, InputSliceDefinition) for entry in _entries(output, "sources")
        ]
    return [problem for where, table, model in places for problem in _dropped_keys(where, table, model, spec)]


def _dropped_keys(where: str, table: Mapping[str, Any], model: type[BaseModel], spec: MergeMethodSpec) -> list[str]:
    parameters = {parameter.name for parameter in spec.parameters}
    problems = []
    for key in map(str, table):
        if key in model.model_fields:
            continue
        if key in parameters:
            problems.append(f"'{key}' in {where} has no effect: put it under 'parameters'.")
        elif near := difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.75):
            problems.append(f"Unknown key '{key}' in {where}, did you mean '{near[0]}'?")
    return problems


def _entries(table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = table.get(key)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("model", "a model"))


def calibration_problems(recipe: Recipe, statistics_exist: bool = False, takes_statistics: bool = True) -> list[str]:
    """Experts without data, and experts that share it (with equal data every weight comes out as 1/T).

    A source that is malformed is compared with no other: reading it says what is wrong.
    """
    problems = []
    seen: dict[Any, Expert] = {}
    without = [str(expert) for expert in recipe.experts if not expert.calibration]
    if statistics_exist and 0 < len(without) < len(recipe.experts):
        problems.append(
            f"Some experts have a 'calibration', but not {', '.join(without)}: give it to all, so that the statistics "
            "file is compared with the data, or to none, to use the file as it is."
        )
    for expert in recipe.experts:
        if not expert.calibration:
            if not statistics_exist:
                other = ", or name a statistics file" if takes_statistics else ""
                problems.append(
                    f"The expert {expert} has no 'calibration': give it a file or dataset with a few prompts of its "
                    f"task (parameters: {{calibration: prompts.jsonl}}){other}."
                )
            continue
        try:
            key = source_key(expert.calibration)
        except SltaError:
            continue
        if key in seen:
            problems.append(
                f"The experts {seen[key]} and {expert} have the same calibration source '{expert.calibration}': "
                "give each the data of its own task."
            )
        seen.setdefault(key, expert)
    return problems
