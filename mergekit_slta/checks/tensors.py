"""The tensors that mergekit reads and writes, found without reading any."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mergekit.architecture import ModelArchitecture, WeightInfo, arch_info_for_config
from mergekit.architecture.conversion import can_convert_checkpoint_keys

from mergekit_slta.errors import SltaError, refuse
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.submodules import resolve_name
from mergekit_slta.models.headers import Model, listed
from mergekit_slta.models.skeleton import converted_as, model_tensor_name
from mergekit_slta.models.spellings import other_names

LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def mergeable_tensors(models: Sequence[Model]) -> None:
    """Refuse the base model and experts with tensors that mergekit would miss, or leave out of the merged model."""
    no_missing_tensors(models)
    no_dropped_tensors(models[0])


def no_missing_tensors(models: Sequence[Model]) -> None:
    """Refuse checkpoints that lack tensors that mergekit needs: one sentence for all models that lack the same.

    Raises:
        SltaError: some lack tensors.
    """
    lacking: dict[tuple[str, ...], list[str]] = {}
    for model in models:
        missing = [weight.name for weight in planned_weights(model, models) if not can_load(model, weight)]
        found = renamed(models[0], model, missing)
        lacking.setdefault(tuple(name for name in missing if name not in found), []).append(str(model))
    refuse(
        f"{listed(incomplete)}: the checkpoint lacks {listed(names)}, which mergekit needs; it is incomplete, "
        "or of a variant of its architecture that mergekit cannot merge."
        for names, incomplete in lacking.items()
        if names
    )


def renamed(base: Model, model: Model, names: Sequence[str]) -> Mapping[str, str]:
    """The names in a checkpoint of tensors that it does not have by these names."""
    return other_names(base.built, model.tensors, names) if names and base.built else {}


def planned_weights(model: Model, models: Sequence[Model]) -> list[WeightInfo]:
    """The tensors that mergekit needs of a model: those that it defines for the architecture, or all of any model."""
    if known := defined(model):
        return [weight for weight in known if not weight.optional]
    stored = dict.fromkeys(name for other in models for name in other.tensors)
    own = model.built.state_dict() if model.built else stored  # old checkpoints hold buffers too
    return [WeightInfo(name=name) for name in stored if model_tensor_name(name, own, model.prefix)]


def defined(model: Model) -> list[WeightInfo]:
    """The tensors of mergekit's definition of a model's architecture; none if it has no definition."""
    architecture = known_architecture(model)
    return architecture.all_weights(model.config) if architecture else []


def no_dropped_tensors(model: Model) -> None:
    """Refuse a checkpoint with tensors that the model needs and that mergekit would leave out of the merged model."""
    parameters = dict(model.built.named_parameters()) if model.built else {}
    if written := {name for weight in defined(model) for name in names_of(weight)}:
        asked = [name for name in written if name not in model.tensors]
        found = {*renamed(model, model, asked).values()}
        left_out = [name for name in model.tensors if not model_tensor_name(name, written, model.prefix)]
        dropped = [name for name in left_out if name not in found and model_tensor_name(name, parameters, model.prefix)]
    else:
        dropped = unconverted(model, parameters)
    if dropped:
        raise SltaError(
            f"mergekit leaves {listed(dropped)} of {model} out of what it writes, so the merged model would get random "
            "values there: it cannot merge this variant of the architecture."
        )


def whole_mixtures(base: Model, decoder: Decoder) -> None:
    """Refuse a mixture whose experts mergekit merges one by one, for a method that solves them together."""
    if any(resolve_name(decoder, weight.name)[1] is not None for weight in defined(base)):
        raise SltaError(
            f"'featcal' solves the experts of a mixture together, but mergekit merges those of {base} one by one: use "
            "'merge_method: slta' or 'actmat'."
        )


def lost_tensors(base: Model) -> Iterator[str]:
    """The weights of the base model that the merged model will not have, because transformers ignores them."""
    ignored = getattr(base.built, "_keys_to_ignore_on_load_unexpected", None) or ()
    weights = [name for name in base.tensors if name.endswith(".weight")]  # old checkpoints hold buffers too
    if lost := [name for name in weights if any(re.search(pattern, name) for pattern in ignored)]:
        yield (
            f"{listed(lost)} of {base} will be missing from the merged model, because mergekit writes only tensors "
            "that transformers knows: copy them yourself if a program needs them, such as for multi-token prediction."
        )


def known_architecture(model: Model) -> ModelArchitecture | None:
    """mergekit's definition of a model's architecture; None if it has none, about which it logs a message."""
    log = logging.getLogger("mergekit.architecture")
    log.disabled = True
    try:
        return arch_info_for_config(model.config)
    finally:
        log.disabled = False


def unconverted(model: Model, parameters: Iterable[str]) -> list[str]:
    """Parameters, one of each layer's, that are stored under other names and that mergekit does not convert.

    It converts names only where all layers have the parameter, and knows conversions of the whole model's type only,
    not of its language tower's.
    """
    templates = {name: LAYER_NUMBER.sub(".*.", name, count=1) for name in parameters}
    layers = Counter(template for name, template in templates.items() if template != name)
    partial = {template for template, count in layers.items() if count < max(layers.values())}
    missing: dict[str, str] = {}
    for name in (name for name in templates if name not in model.tensors):
        missing.setdefault(templates[name], name)
    return [
        name
        for template, name in missing.items()
        if can_load(model, WeightInfo(name=name), converted_as(model.config))
        and (template in partial or not can_load(model, WeightInfo(name=name)))
    ]


def names_of(weight: WeightInfo) -> list[str]:
    """All names under which mergekit looks for a tensor."""
    return [weight.name, *(weight.aliases or ()), *(weight.tied_names or ())]


def can_load(model: Model, weight: WeightInfo, conversions: Iterable[str] = ()) -> bool:
    """Whether mergekit finds a tensor in a checkpoint, or can put it together from others (a mixture's experts).

    Args:
        model: the model.
        weight: the tensor.
        conversions: the keys of transformers' conversions to try; by default the one that mergekit tries.
    """
    names = [weight.name, *(weight.aliases or ())]
    tensors = model.tensors
    if any(name in tensors for name in names_of(weight)):
        return True
    layers = {part for part in weight.name.split(".") if part.isdigit()}
    sources = {name for name in tensors if layers <= set(name.split("."))}
    keys = list(conversions) or [model.config.model_type]
    return any(can_convert_checkpoint_keys(key, sources, name) for key in keys for name in names)
