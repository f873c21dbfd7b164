"""A recipe: mergekit's YAML, and the settings and experts that it gives to one of our methods."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from pydantic import ValidationError

from mergekit_slta.data.sources import source_key
from mergekit_slta.errors import SltaError, first_line, one_line, refuse, suggestion
from mergekit_slta.files import published_path
from mergekit_slta.recipe.settings import (
    SETTINGS,
    CalibratedExpert,
    CalibrationSettings,
    KeptBase,
    MethodSettings,
    Parameters,
    base_parameters,
    expert_parameters,
    expert_references,
)
from mergekit_slta.recipe.text import Loader, faults, misshapen, normalize, without_calibration, yaml_fault

Given = TypeVar("Given", bound=Parameters)
Kind = TypeVar("Kind", bound=MethodSettings)
SOURCES = {*CalibratedExpert.model_fields}  # the parameters of an expert that say what its data are
SHARED_WITH_BASE = {"template", "samples"}  # of these, what the recipe's own parameters give the base model's task too


class Task(NamedTuple):
    """A model, and prompts on which the merge should do what that model does."""

    reference: ModelReference  # an expert; or the base model, whose abilities on these prompts are to be kept
    calibration: str = ""  # the source of the prompts
    template: str = ""  # how a record becomes text
    evaluation: str = ""  # the source of the records for ``evaluate``, if not ``calibration``
    samples: int = 0  # how many prompts to use; 0 for a method without prompts
    weight: float = 1.0  # how much the base model's prompts count, κ; 1 for an expert

    def __str__(self) -> str:
        return str(self.reference)


class Recipe:
    """Which models to merge, on which data, by which method and parameters.

    Args:
        content: what a recipe's YAML holds, as a mapping: ``merge_method``, ``base_model``, ``models`` and so on.
            Paths, data types, and scalars and arrays of numpy and torch, are written as YAML writes them.

    Raises:
        SltaError: mergekit cannot read it. What is wrong with its text raises when ``base``, ``experts`` or
            ``settings`` is used.
    """

    config: MergeConfiguration  # the recipe as mergekit reads it
    text: str  # its YAML
    content: dict[str, Any]  # the parsed YAML
    references: list[ModelReference]  # the base model, if there is one, and the experts
    tokenizer_source: Any  # of the merged model; None if it is only copied from the base model

    def __init__(self, content: Mapping[str, Any]) -> None:
        if not isinstance(content, Mapping):
            raise SltaError(
                f"'content' is of type {type(content).__name__}: give a mapping, or a file to Recipe.load(path)."
            )
        try:
            text = yaml.safe_dump(plain(content), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise SltaError(f"'content' holds a value that YAML cannot write ({first_line(error)}).") from None
        vars(self).update(vars(self.parse(text, "This recipe")))

    def __repr__(self) -> str:
        return self.text.rstrip()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe from a YAML file.

        Returns:
            The recipe; printed, it is its YAML.

        Raises:
            SltaError: the file cannot be read, is not valid YAML, or is not a mergekit recipe.
        """
        try:
            text = Path(path).expanduser().read_bytes().decode()
        except OSError as error:
            raise SltaError(f"{path} cannot be read ({error.strerror}): name a recipe's file.") from error
        except UnicodeDecodeError as error:
            raise SltaError(f"{path} is not UTF-8 text ({one_line(error)}): save it as UTF-8.") from error
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, name: object, config: MergeConfiguration | None = None) -> Recipe:
        """Read a recipe's YAML; ``name`` stands for it in messages, ``config`` is what a program has made of it."""
        recipe = cls.__new__(cls)
        try:
            recipe.text, recipe.content = text, yaml.load(text, Loader)
        except Exception as error:  # YAML's tags may raise errors of any kind
            raise SltaError(*f"{name} {yaml_fault(error)}".split("\n")) from None
        if recipe.content is None:
            raise SltaError(f"{name} is empty: write a recipe, or have `mergekit-slta new` print one to start from.")
        try:
            read = MergeConfiguration.model_validate(recipe.content)
        except ValidationError as error:
            raise SltaError(f"{name} is no mergekit recipe: {misshapen(error)}") from None
        except Exception as error:  # from mergekit's own checks
            fault = first_line(error)
            fix = " (only an adapter follows a '+': rename folders with one)" if fault.startswith("Can't parse") else ""
            raise SltaError(f"{name} is no mergekit recipe: {fault}{fix}.") from None
        recipe.config = config = config or read
        normalize(config)
        recipe.references = [*([config.base_model] if config.base_model else []), *expert_references(config)]
        recipe.tokenizer_source = config.tokenizer.source if config.tokenizer else config.tokenizer_source or None
        return recipe

    def with_statistics(self, file: str, level: str | None = None) -> Recipe:
        """The same recipe with another statistics file and, if one is given, level, where its method takes a file."""
        method = SETTINGS.get(self.config.merge_method)
        if method is None or "statistics" not in method.model_fields:
            return self
        parameters = {**(self.content.get("parameters") or {}), "statistics": file}
        return Recipe({**self.content, "parameters": parameters | ({"level": level} if level else {})})

    def require_sound(self) -> None:
        """Refuse a recipe whose text is wrong, with all faults, or that is for another method."""
        kind, tables = self.settings_class(MethodSettings), expert_parameters(self.config)
        problems = [*faults(self.config, self.content, kind)]
        without = [str(model) for model, table in tables.items() if not table.get("calibration")]
        if problems and without and kind.runs_models and "statistics" not in (self.config.parameters or {}):
            problems.append(without_calibration(without, ""))  # alone, ``require_calibration`` refuses it
        refuse(problems)

    @cached_property
    def base(self) -> ModelReference:
        """The base model."""
        _ = self.settings  # refuses a text with faults
        assert self.config.base_model is not None
        return self.config.base_model

    @cached_property
    def experts(self) -> tuple[Task, ...]:
        """The experts in the recipe's order, each with its own task."""
        kind, tables = self.settings.expert, expert_parameters(self.config)
        return tuple(Task(model, **_table(kind, table).model_dump(include=SOURCES)) for model, table in tables.items())

    @cached_property
    def keep(self) -> Task | None:
        """The base model's task, None without one or with weight 0."""
        of_base = base_parameters(self.config) if isinstance(self.settings, CalibrationSettings) else {}
        shared = {key: value for key, value in (self.config.parameters or {}).items() if key in SHARED_WITH_BASE}
        keep = Task(self.base, **_table(KeptBase, shared | of_base).model_dump()) if of_base else None
        return keep if keep and keep.weight else None

    @property
    def keep_weight(self) -> float:
        """How much the base model's task counts, κ; 0 without one."""
        return self.keep.weight if self.keep else 0.0

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The experts' tasks, then the base model's if it has one."""
        return (*self.experts, *([self.keep] if self.keep else []))

    @cached_property
    def settings(self) -> MethodSettings:
        """The method's parameters for the whole merge."""
        self.require_sound()
        return _table(self.settings_class(MethodSettings), self.config.parameters or {})

    def settings_of(self, kind: type[Kind]) -> Kind:
        """The recipe's settings of that kind; an SltaError if it is for another method."""
        self.settings_class(kind)
        settings = self.settings
        assert isinstance(settings, kind)
        return settings

    def settings_class(self, kind: type[Kind]) -> type[Kind]:
        """The settings class of the recipe's method; an SltaError if it is not of that kind."""
        methods = {name: settings for name, settings in SETTINGS.items() if issubclass(settings, kind)}
        name = self.config.merge_method
        if name not in methods:
            others = f": this command knows {', '.join(methods)}; name a recipe for one of them, of the same models."
            raise SltaError(f"The recipe's merge_method is '{name}'{suggestion(name, methods) or others}")
        return methods[name]

    @cached_property
    def names(self) -> dict[ModelReference, str]:
        """The models' names for published files; where several would have one name, the later ones get a number."""
        names = [*map(published_name, self.references)]
        earlier = [names[:index].count(name) for index, name in enumerate(names)]
        numbered = (f"{name} ({count + 1})" if count else name for name, count in zip(names, earlier, strict=True))
        return dict(zip(self.references, numbered, strict=True))

    @property
    def tokenizer_owner(self) -> ModelReference:
        """The model whose token ids the merged model's tokenizer keeps: the base model unless the recipe names one."""
        source = self.tokenizer_source
        return ModelReference(model=source.model) if isinstance(source, ModelReference) else self.base


def plain(value: Any) -> Any:
    """What a Python program gives as YAML writes it: paths, data types and devices as strings, arrays as lists."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, (os.PathLike, torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    return value.tolist() if hasattr(value, "tolist") else value


def _table(kind: type[Given], parameters: Mapping[str, Any]) -> Given:
    """A table of parameters; a gradient or filters, which only mergekit evaluates, leave a default."""
    names = {field.alias or name for name, field in kind.model_fields.items()}
    scalar = (str, int, float, bool)
    return kind.model_validate(
        {key: value for key, value in parameters.items() if key in names and isinstance(value, scalar)}
    )


# What functions take for a recipe.
RecipeOrFile: TypeAlias = Recipe | str | os.PathLike[str]


def loaded(recipe: RecipeOrFile) -> Recipe:
    """The recipe, read from its file if that is given."""
    if isinstance(recipe, (str, os.PathLike)):
        return Recipe.load(recipe)
    if not isinstance(recipe, Recipe):
        raise SltaError(f"'recipe' is of type {type(recipe).__name__}: give a Recipe or its file.")
    return recipe


def published_name(reference: ModelReference) -> str:
    """A model's name for published files: the recipe's spelling, but only the last part of a private path."""
    parts = [part for part in (reference.model, reference.lora) if part is not None]
    return "+".join(published_path(part.path) + (f"@{part.revision}" if part.revision else "") for part in parts)


def published_names(recipe: Recipe) -> list[str]:
    """The models' names for the statistics, without numbers; an SltaError if two models have the same."""
    names = [published_name(reference) for reference in recipe.references]
    if len(set(names)) < len(names):
        raise SltaError(
            f"Two models would get the same name in the statistics ({', '.join(names)}): rename a folder, or give "
            "relative paths."
        )
    return names


EQUAL_DATA = "because with equal data every merging weight of slta is one over the number of experts"


def require_calibration(recipe: Recipe, statistics: bool = False) -> None:
    """Refuse tasks without data, and experts that name the same data, with which every merging weight would be 1/T.

    With a statistics file either all tasks or none need data. Malformed sources are not compared.
    """
    without = [str(task) for task in recipe.tasks if not task.calibration]
    problems = [without_calibration(without, str(recipe.base))] if without else []
    if statistics:
        partly = (
            f"Some models have a 'calibration', but not {', '.join(without)}: give it to all, to compare the "
            "statistics file with the data, or to none, to use the file unchecked."
        )
        problems = [partly] if 0 < len(without) < len(recipe.tasks) else []
    seen: dict[Any, Task] = {}
    for expert in recipe.experts:
        with contextlib.suppress(SltaError):  # reading a malformed source says what is wrong with it
            other = seen.setdefault(source_key(expert.calibration), expert) if expert.calibration else expert
            if other is not expert:
                problems.append(
                    f"The experts {other} and {expert} have the same calibration source '{expert.calibration}': give "
                    f"each the data of its own task, {EQUAL_DATA}."
                )
    refuse(problems)
