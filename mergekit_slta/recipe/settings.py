"""The parameters and properties of every merge method, one class for each, and what a recipe gives each model.

Other rooms read a method's properties here (does it run models? the experts too?).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from mergekit.common import ModelReference
from mergekit.config import InputModelDefinition, InputSliceDefinition, MergeConfiguration
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, WrapValidator
from pydantic.fields import FieldInfo

from mergekit_slta.data.sources import READERS
from mergekit_slta.errors import SltaError
from mergekit_slta.levels import Level


class Parameters(BaseModel):
    """A table of a recipe's parameters, each with its type, its default and, for the documentation, its meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CalibratedExpert(Parameters):
    """The parameters of an expert of a method that uses calibration data."""

    calibration: str = Field(
        default="",
        description=f"prompts of the expert's task: {', '.join(f'`{extension}`' for extension in READERS)}, "
        "or `hf:DATASET[?config=…&split=…]`",
    )
    template: str = Field(
        default="",
        description='how a row becomes text, such as `"{question} {answer}"`; by default its `messages`, its `text`, '
        "or a known pair such as `prompt` and `completion`",
    )
    evaluation: str = Field(
        default="",
        description="prompts for `evaluate`, written like `calibration`; by default those that the merge did not use",
    )
    samples: Annotated[int, Field(ge=1)] = Field(default=30, description="how many prompts of the task to use")


class KeptBase(CalibratedExpert):
    """The parameters of the base model where it is a task of its own: what it does on these prompts is to be kept."""

    calibration: str = Field(
        default="",
        description="prompts on which the merge should do what the base model does; written like an expert's",
    )
    weight: Annotated[FiniteFloat, Field(ge=0)] = Field(
        default=1.0, description="κ, how much the base model's prompts count compared with an expert's; at least 0"
    )


class MethodSettings(Parameters):
    """The parameters of a merge method for the whole merge."""

    method: ClassVar[str]  # its name in recipes
    in_words: ClassVar[str]  # what it does, as a model card goes on after its name and a colon
    expert: ClassVar[type[Parameters]]  # the class of one expert's parameters
    runs_models: ClassVar[bool] = False  # on prompts, for which it needs whole models and one value per parameter
    runs_experts: ClassVar[bool] = False  # on prompts' tokens; for slta at level ``model``, see ``require_levels``


class CalibrationSettings(MethodSettings):
    """The parameters of every method that uses calibration data."""

    runs_models: ClassVar[bool] = True
    expert: ClassVar[type[Parameters]] = CalibratedExpert
    max_tokens: int = Field(default=512, ge=1, description="tokens of a prompt with its answer; the rest is cut")
    seed: int = Field(default=0, description="seed of the random choice of prompts")
    report: str = Field(default="", description="a folder for an HTML report of the merge")


class SltaSettings(CalibrationSettings):
    method: ClassVar[str] = "slta"
    in_words: ClassVar[str] = (
        "every submodule gets one merging weight for each expert, solved in closed form from a few prompts of the "
        "expert's task. At every level but `model`, embeddings, final norm and output head are the base model's."
    )
    level: Level = Field(
        default="attn_mlp", description="the size of a submodule: `model`, `layer`, `attn_mlp`, `head_mlp` or `linear`"
    )
    balance: bool = Field(
        default=True,
        description="an expert's prompts count the same; `false`: long prompts and large changes count more",
    )
    ridge: FiniteFloat = Field(default=0.0, ge=0, description="pulls the weights towards zero; at least 0")
    statistics: str = Field(
        default="",
        description="a statistics file to use or to write; `hf:ORG/REPO/FILE[@REVISION]` reads a published one",
    )


# With less, float32 loses what the prompts say: on four short ones, gpt2's error grows from 0.075 to 0.084 with 0.0001.
SMALLEST_FEATCAL_RIDGE = 3e-4


class FeatcalSettings(CalibrationSettings):
    method: ClassVar[str] = "featcal"
    in_words: ClassVar[str] = (
        "nearly every linear map is solved by least squares, layer by layer, so that its outputs are near those of "
        "each expert on a few prompts of the expert's task. Embeddings, norms, routers, and routed experts that few "
        "tokens reach are merged without prompts."
    )
    runs_experts: ClassVar[bool] = True
    ridge: Annotated[FiniteFloat, Field(ge=SMALLEST_FEATCAL_RIDGE)] | Literal["auto"] = Field(
        default="auto",
        description="how strongly each matrix is pulled towards a merge without prompts: a number from 0.0003 "
        "on, the least that float32 bears, or `auto`, which searches nine values from there to 3 by cross-validation",
    )


# The ridges of ``actmat`` by default, and where the experts are LoRA adapters, whose changes lie in few directions
# (tests/benchmarks/adapters.py).
ACTMAT_RIDGE, ACTMAT_RIDGE_OF_ADAPTERS = 0.03, 3.0
SMALLEST_ACTMAT_RIDGE = 1e-4  # of what float32 bears (actmat/covariance.py)


def are_adapters(base: Any, *experts: Any) -> bool:
    """Whether all experts are adapters of the base model, so that their changes lie in few directions."""
    return all(getattr(expert, "lora", None) and expert.model == base.model for expert in experts)


class ActmatExpert(Parameters):
    weight: Annotated[FiniteFloat, Field(ge=0)] = Field(
        default=1.0, description="how much the expert counts, compared with the others; 0 leaves it out"
    )


class ActmatSettings(MethodSettings):
    """The parameters of ``merge_method: actmat``, which may differ between tensors."""

    method: ClassVar[str] = "actmat"
    in_words: ClassVar[str] = (
        "every linear map of the layers is solved by least squares without prompts; the experts' changes stand in for "
        "the inputs. Other tensors are averaged."
    )
    expert: ClassVar[type[Parameters]] = ActmatExpert
    ridge: Annotated[FiniteFloat, Field(ge=SMALLEST_ACTMAT_RIDGE)] | Literal["auto"] = Field(
        default="auto",
        description=f"pulls every matrix towards the experts' mean; at least {SMALLEST_ACTMAT_RIDGE:g}; `auto` is "
        f"{ACTMAT_RIDGE:g}, and {ACTMAT_RIDGE_OF_ADAPTERS:g} if all experts are adapters",
    )
    lambda_: FiniteFloat = Field(
        default=1.0, alias="lambda", description="multiplies the merged change; `scale`, its older name, is read too"
    )


class SftmExpert(Parameters):
    weight: FiniteFloat = Field(default=1.0, description="multiplies the expert's change")
    density: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="η, the share of the expert's changes to take, the largest first; above 0, at most 1"
    )


class SftmSettings(MethodSettings):
    """The parameters of ``merge_method: sftm``, which may differ between tensors."""

    method: ClassVar[str] = "sftm"
    in_words: ClassVar[str] = (
        "of each expert's change, the largest entries (by default a fifth) are summed so that the singular features of "
        "each remain, times `lambda` (by default 0.6); without prompts."
    )
    expert: ClassVar[type[Parameters]] = SftmExpert
    lambda_: FiniteFloat = Field(
        default=0.6, alias="lambda", description="multiplies the merged change of all but norms (γ in the paper)"
    )
    rank: Annotated[int, Field(ge=0)] = Field(
        default=0, description="how many singular vectors of a matrix's change to take; 0 takes all"
    )


# A new merge method gets a class above and is entered here.
SETTINGS: dict[str, type[MethodSettings]] = {
    kind.method: kind for kind in (SltaSettings, FeatcalSettings, ActmatSettings, SftmSettings)
}


def parameter_specs(settings: type[MethodSettings], of_base: bool = False) -> tuple[ParameterSpec, ...]:
    """A method's parameters as mergekit declares them; or with those of the base model's entry, which are ours."""
    scopes = ((settings, ParameterScope.SHARED), (KeptBase if of_base else settings.expert, ParameterScope.NON_BASE))
    return tuple(
        _spec(field.alias or name, field, scope)
        for table, scope in scopes
        for name, field in table.model_fields.items()
    )


def _spec(name: str, field: FieldInfo, scope: ParameterScope) -> ParameterSpec:
    def in_a_sentence(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            valid = validate(value)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].removeprefix("Input ").split(", unable")[0]
            rule = rule.replace("a valid boolean", "true or false")
            raise SltaError(f"'{name}' {rule[0].lower()}{rule[1:]}, not {value!r}.") from None
        if isinstance(value, bool) and valid is not value:  # pydantic takes it for 0 or 1
            raise SltaError(f"'{name}' should be a number, not {value!r}.")
        return valid

    arguments = (field.annotation, *field.metadata, WrapValidator(in_a_sentence))
    return ParameterSpec(name, Annotated[arguments], scope, default=field.default, description=field.description)


# What a recipe gives each model


def model_inputs(config: MergeConfiguration) -> list[InputModelDefinition | InputSliceDefinition]:
    """Every mention of a model in the recipe's order, also under ``slices`` and ``modules`` of mergekit's methods."""
    parts = [config, *(config.modules or {}).values()]
    of_slices = (source for part in parts for output in part.slices or () for source in output.sources)
    return [*(entry for part in parts for entry in part.models or ()), *of_slices]


def expert_references(config: MergeConfiguration) -> list[ModelReference]:
    """The models of a recipe except the base model, each once, in the recipe's order."""
    named = dict.fromkeys(entry.model for entry in model_inputs(config))
    return [model for model in named if model != config.base_model]


def expert_parameters(config: MergeConfiguration) -> dict[ModelReference, dict[str, Any]]:
    """Each expert's parameters: those of the whole merge, overridden by its own."""
    by_model = {entry.model: entry.parameters or {} for entry in reversed(model_inputs(config))}
    return {model: {**(config.parameters or {}), **by_model[model]} for model in expert_references(config)}


def base_parameters(config: MergeConfiguration) -> dict[str, Any]:
    """The base model's own parameters, of which mergekit takes none; none if it is not listed, or without any."""
    tables = (entry.parameters for entry in model_inputs(config) if entry.model == config.base_model)
    return dict(next(filter(None, tables), {}))
