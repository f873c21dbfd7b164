"""All that can be wrong with a recipe's text, a sentence for each fault; models are checked elsewhere."""

from __future__ import annotations

import importlib.resources
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from mergekit._data import chat_templates
from mergekit.common import ModelReference
from mergekit.config import ConditionalParameter, InputModelDefinition, MergeConfiguration
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from mergekit.tokenizer.config import TokenizerConfig
from pydantic import BaseModel, ValidationError

from mergekit_slta.errors import SltaError, one_line, suggestion
from mergekit_slta.recipe.settings import MethodSettings, expert_references, parameter_specs
from mergekit_slta.words import enumerated

FLOATS = ("bfloat16", "float16", "float32", "float64")
SHORTEST_TEMPLATE = 20  # mergekit takes a shorter text for a name
OF_MODEL = "the parameters of "
# Parameters of other methods, in recipes that are changed into one for a method of ours, which needs nothing for them.
OF_OTHERS = ("density", "epsilon", "gamma", "int8_mask", "lambda", "normalize", "rescale", "select_topk")


def faults(config: MergeConfiguration, content: Mapping[str, Any], settings: type[MethodSettings]) -> Iterator[str]:
    """Everything that is wrong with a recipe's text, whose parsed YAML is ``content``."""
    yield from _keys(content, settings)
    method = settings.method
    if not config.base_model:
        yield f"The recipe has no base_model: '{method}' needs, beside 'merge_method', the model before fine-tuning."
    if config.slices or config.modules:
        yield f"'{method}' merges whole models: list them under 'models', not under 'slices' or 'modules'."
    yield from _inputs(config)
    places = defaultdict[tuple[str, str], list[str]](list)  # of a fault: what comes before "in PLACES", and after it
    for where, table, model in parameter_tables(config):
        is_base = model is not None and model == config.base_model
        if is_base and not settings.runs_models:
            continue  # the method ignores the base model's entry, as the check notes
        specs = {spec.name: spec for spec in parameter_specs(settings, is_base)}
        for fault in _parameters(table, model is not None, specs, settings):
            places[fault].append(where)
    for (name, rest), (first, *others) in places.items():
        yield f"{name} in {enumerated([first, *(other.removeprefix(OF_MODEL) for other in others)])}{rest}"
    yield from _of_mergekit(config)


def normalize(config: MergeConfiguration) -> None:
    """Say in one way what a recipe may say in several, in place: the base model's tokenizer, names of parameters."""
    made = config.tokenizer
    if made and made.tokens and made.source == "base" and config.base_model:
        # mergekit would take the new tokens for the base model's own, and what pads its embedding for their rows.
        config.tokenizer = made.model_copy(update={"source": ModelReference(model=config.base_model.model)})
    for _, table, _ in parameter_tables(config) if config.merge_method == "actmat" else ():
        if isinstance(table, dict) and "scale" in table:
            table.setdefault("lambda", table.pop("scale"))


def parameter_tables(config: MergeConfiguration) -> Iterator[tuple[str, Mapping[str, Any], ModelReference | None]]:
    """Every ``parameters:`` table: its place for error messages, what it holds, and the model that it is of, if any."""
    yield "the recipe's parameters", config.parameters or {}, None
    for entry in config.models or ():
        yield f"{OF_MODEL}{entry.model}", entry.parameters or {}, entry.model


class Loader(yaml.SafeLoader):
    """Reads YAML, but refuses keys given twice, which its base class takes."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            earlier = first.setdefault((key.tag, str(key.value)), key)
            if earlier is not key and not key.tag.endswith(":merge"):
                line = earlier.start_mark.line + 1
                problem = f"the key '{key.value}' of line {line} is repeated (write it once: only the last would count)"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


def yaml_fault(error: Exception) -> str:
    """An error of the YAML parser: what it says and where, and the line with a caret below it."""
    if getattr(error, "problem", None) == "but found another document":
        return "holds several recipes, divided by '---': run mergekit-multi on it, or give each a file of its own."
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None or mark.buffer is None:
        return f"is not valid YAML: {one_line(error)}."
    return f"is not valid YAML: {error.problem}, in line {mark.line + 1}:\n{mark.get_snippet(indent=2, max_length=110)}"


def misshapen(error: ValidationError) -> str:
    """The first place of a recipe that holds something else than mergekit reads there, in a sentence."""
    first = error.errors()[0]
    place, rule = first["loc"], first["msg"].removeprefix("Input ").split(" or instance")[0]
    if "parameters" in place[:-2]:  # mergekit says of each kind of value that the parameter is not of it
        place, rule = place[: place.index("parameters") + 2], "should be one value, a list or filters"
    where = f"'{'.'.join(map(str, place))}'" if place else "it"
    if rule == "Field required":
        return f"{where} is missing."
    return f"{where} {rule.replace('dictionary', 'table')}, not {first['input']!r}."


def _inputs(config: MergeConfiguration) -> Iterator[str]:
    """No expert, and a model that is listed twice, also by another spelling."""
    if config.models and not expert_references(config):
        yield "The recipe has no expert: list a fine-tuned model beside the base model."
    listed = [entry.model for entry in config.models or []]
    for model in dict.fromkeys(listed):
        if listed.count(model) > 1:
            yield f"{model} is listed {listed.count(model)} times: list it once, with all its prompts in one file."
    models = list(dict.fromkeys(filter(None, (config.base_model, *listed))))
    for model, other in itertools.combinations(models, 2):
        paths = model.model.path, other.model.path
        if model.lora == other.lora and all(map(os.path.exists, paths)) and os.path.samefile(*paths):
            which = "the base model" if model == config.base_model else "the model"
            yield f"{other} is {which} {model}: spell it the same way, or leave it out."


def _parameters(
    table: Mapping[str, Any], of_model: bool, specs: Mapping[str, ParameterSpec], settings: type[MethodSettings]
) -> Iterator[tuple[str, str]]:
    """Unknown names (with the closest known one), wrong values, and lists where one value is needed.

    Yields:
        The beginning and the end of a sentence, which has the place of the table between them.
    """
    allowed = [name for name, spec in specs.items() if not of_model or spec.scope != ParameterScope.SHARED]
    for name, setting in table.items():
        if name in specs and name not in allowed:
            rest = "it is one value for the whole merge, so move it to the 'parameters' of the recipe."
            yield f"'{name}'", f" has no effect: {rest}"
        elif name == "weight" and name not in specs:
            rest = (
                "the prompts decide how much of each expert is taken, so leave it out; the base model's own entry "
                "under 'models' takes one."
            )
            yield f"'{name}'", f" has no effect: {rest}"
        elif name in OF_OTHERS and name not in specs:
            yield f"'{name}'", f" has no effect: '{settings.method}' does not use it, so delete it."
        elif name not in specs:
            rest = suggestion(name, allowed) or f"; the known ones are {', '.join(sorted(allowed))}."
            yield f"Unknown parameter '{name}'", rest
        elif settings.runs_models and not isinstance(setting, (str, int, float, bool)):
            fix = "; put all prompts into one file" if name == "calibration" else ""
            yield f"'{name}'", f" must be one value for the whole merge, not a list or a filter{fix}."
        elif type(specs[name].default) is int and any(isinstance(p, list) and len({*p}) > 1 for p in _values(setting)):
            rest = " is a whole number, and a list makes mergekit take fractions: write one value, or filters."
            yield f"'{name}'", rest
        else:
            values = [value for part in _values(setting) for value in (part if isinstance(part, list) else [part])]
            for value in {repr(value): value for value in values}.values():  # 1.0 and true are equal
                try:
                    specs[name].validate(value)
                except SltaError as error:
                    yield f"'{name}'", error.message.removeprefix(f"'{name}'")


def without_calibration(models: Sequence[str], base: str) -> str:
    """Say which models lack prompts, and what to give them."""
    kind = "base model" if [*models] == [base] else "model" if base in models else "expert"
    several = len(models) > 1
    return (
        f"The {kind}{'s' * several} {enumerated(models)} {'have' if several else 'has'} no 'calibration': give "
        f"{'each' if several else 'it'} a file or dataset with a few prompts (parameters: {{calibration: "
        "prompts.jsonl})."
    )


def _values(setting: Any) -> list[Any]:
    """The values in a setting, several where it has filters; a gradient is a list."""
    filtered = isinstance(setting, list) and all(isinstance(part, ConditionalParameter) for part in setting)
    return [getattr(part, "value", part) for part in (setting if filtered else [setting])]


def _of_mergekit(config: MergeConfiguration) -> Iterator[str]:
    """Settings that mergekit takes otherwise than they are meant, or refuses after it has merged."""
    for key, name in (("dtype", config.dtype), ("out_dtype", config.out_dtype)):
        if name is not None and name not in FLOATS:  # mergekit writes the name into config.json as it is
            yield f"'{key}: {name}' is not a data type for a merge: write {', '.join(FLOATS[:-1])} or {FLOATS[-1]}."
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    if isinstance(source, ModelReference) and source.lora:
        yield (
            f"mergekit takes from {source} the tokenizer of {source.model}: write {source.lora} as the source for the "
            f"adapter's tokenizer, or {source.model}."
        )
    template = config.chat_template or "auto"
    files = (Path(file.name) for file in importlib.resources.files(chat_templates).iterdir())
    known = ["auto", *sorted(file.stem for file in files if file.suffix == ".jinja")]
    if template not in known and not (len(template) >= SHORTEST_TEMPLATE and "{" in template):
        yield f"mergekit does not know 'chat_template: {template}': write {', '.join(known)}, or a template in Jinja."


def _keys(content: Mapping[str, Any], settings: type[MethodSettings]) -> Iterator[str]:
    """Keys of a recipe's YAML that look like a mistake and that mergekit silently ignores."""
    tables: list[tuple[str, Mapping[str, Any], type[BaseModel]]] = [("the recipe", content, MergeConfiguration)]
    tables += [(f"the entry of {entry['model']}", entry, InputModelDefinition) for entry in content.get("models") or ()]
    if isinstance(tokenizer := content.get("tokenizer"), dict):
        tables.append(("'tokenizer'", tokenizer, TokenizerConfig))
    parameters = {spec.name: spec for spec in parameter_specs(settings, settings.runs_models)}
    for where, table, model in tables:
        for key in [key for key in map(str, table) if key not in model.model_fields]:
            if key in parameters:
                whose = "the recipe's" if parameters[key].scope == ParameterScope.SHARED else "the model's"
                yield f"'{key}' in {where} has no effect: put it under {whose} 'parameters'."
            elif near := suggestion(key, model.model_fields, 0.75) or suggestion(key, parameters, 0.75):
                yield f"Unknown key '{key}' in {where}{near}"
