"""Whether models can be merged with each other, judged by their configurations and file headers."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mergekit.architecture import ModelArchitecture, WeightInfo, arch_info_for_config
from mergekit.architecture.conversion import can_convert_checkpoint_keys

from mergekit_slta.models.headers import Model, listed
from mergekit_slta.models.padding import both_have, is_vocabulary
from mergekit_slta.models.skeleton import computation, converted_as, model_tensor_name
from mergekit_slta.models.spellings import other_names, unread

LAYER_NUMBER = re.compile(r"\.(\d+)\.")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def architecture_problem(base: Model, expert: Model, *, mixed: bool = False) -> str | None:
    """Why an expert's configuration says that it was not fine-tuned from the base model.

    Args:
        base: the base model.
        expert: the expert.
        mixed: whether the architectures may have different names.
    """
    if not mixed and (expert.architecture, expert.config.model_type) != (base.architecture, base.config.model_type):
        kinds = (
            f"The expert {expert} is a {expert.architecture} ({expert.config.model_type}), the base model {base} a "
            f"{base.architecture} ({base.config.model_type})"
        )
        if language_type(expert) != language_type(base) or is_multimodal(expert) == is_multimodal(base):
            return f"{kinds}: only models of one architecture can be merged."
        if known_architecture(expert) and known_architecture(base):
            return (
                f"{kinds}: mergekit defines the two apart and cannot plan a merge of both, although one is the "
                f"language tower of the other. Save the expert as a {base.architecture}, its tensors in the place of "
                "the base model's."
            )
    sizes = [(name, expert.size(name), base.size(name)) for name in SIZES]
    sizes = [entry for entry in sizes if None not in entry]  # a configuration may leave a default size out
    differing = [f"{name} {own} instead of {wanted}" for name, own, wanted in sizes if own != wanted]
    if differing:
        return (
            f"The expert {expert} has {', '.join(differing)}: it was not fine-tuned from the base model {base}, "
            "leave it out."
        )
    return None


def language_type(model: Model) -> str:
    """The type of the language model, which may be a part of the model."""
    return str(model.config.get_text_config().model_type)


def is_multimodal(model: Model) -> bool:
    """Whether the language model is a part of the model."""
    return model.config.get_text_config() is not model.config


def other_settings(base: Model, expert: Model) -> list[str]:
    """The entries of the configurations that make an expert compute something else than the base model."""
    own, theirs = computation(base.config), computation(expert.config)
    return sorted(name for name in own.keys() & theirs.keys() if own[name] != theirs[name])


def shape_problem(base: Model, expert: Model) -> str | None:
    """Which tensors of an expert have another shape than the base model's, apart from the vocabulary's size."""
    shapes = [(name, stored.shape, other.shape) for name, stored, other in both_have(base, expert)]
    unequal = [(name, own, others) for name, own, others in shapes if own != others]
    unequal = [entry for entry in unequal if not is_vocabulary(base, expert, *entry[1:])]
    if not unequal:
        return None
    name, own, others = unequal[0]
    more = f", and so do {len(unequal) - 1} more" if len(unequal) > 1 else ""
    return (
        f"The tensor {name} of the expert {expert} has the shape {list(others)} instead of {list(own)}{more}: "
        f"it was not fine-tuned from the base model {base}, leave it out."
    )


def tied_problem(base: Model, expert: Model) -> str | None:
    """Why two models of which only one ties its output head to its embedding cannot be merged."""
    tied = [model for model in (base, expert) if getattr(model.config, "tie_word_embeddings", False)]
    if len(tied) != 1:
        return None
    untied = expert if tied[0] is base else base
    return (
        f"{tied[0]} ties its output head to its embedding and {untied} does not (tie_word_embeddings): the merged "
        f"head would fit neither, save {expert} with the setting of the base model {base}."
    )


def quantization_problem(model: Model) -> str | None:
    """Why a quantized model cannot be merged: its tensors hold codes, which cannot be averaged."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization:
        given = quantization if isinstance(quantization, Mapping) else vars(quantization)
        return (
            f"{model} is quantized ({given.get('quant_method', 'quantization_config')}): "
            "name the original checkpoint, or dequantize it first."
        )
    weights = {name: stored for name, stored in (model.tensors or {}).items() if name.endswith("weight")}
    for name, stored in weights.items():
        if len(stored.shape) > 1 and stored.nbytes < 2 * stored.count:
            return (
                f"{model} stores {name} in 8 bits or fewer, so it is quantized: name the original checkpoint, or "
                "dequantize it first."
            )
    return None


# The tensors that mergekit reads and writes


def missing_tensors(models: Sequence[Model]) -> list[str]:
    """The tensors that mergekit needs and checkpoints lack: one sentence for all models that lack the same."""
    lacking: dict[tuple[str, ...], list[str]] = {}
    for model in models:
        missing = [weight.name for weight in plan(model, models) if not can_load(model, weight)]
        found = renamed(models[0], model, missing)
        lacking.setdefault(tuple(name for name in missing if name not in found), []).append(str(model))
    return [
        f"{listed(incomplete)}: the checkpoint lacks {listed(names)}, which mergekit needs; it is incomplete, "
        "or of a variant of its architecture that mergekit cannot merge."
        for names, incomplete in lacking.items()
        if names
    ]


def renamed(base: Model, model: Model, names: Sequence[str]) -> Mapping[str, str]:
    """What a checkpoint calls tensors that it does not have by these names."""
    return other_names(base.built, model.tensors or (), names) if names and base.built else {}


def plan(model: Model, models: Sequence[Model]) -> list[WeightInfo]:
    """The tensors that mergekit needs of a model: those that it defines for the architecture, or all of any model."""
    if model.tensors is None:
        return []
    architecture = known_architecture(model)
    if architecture is not None:
        return [weight for weight in architecture.all_weights(model.config) if not weight.optional]
    stored = dict.fromkeys(name for other in models for name in other.tensors or {})
    known = model.built.state_dict() if model.built else stored  # old checkpoints hold buffers too
    return [WeightInfo(name=name) for name in stored if model_tensor_name(name, known, model.prefix)]


def dropped_tensors(model: Model) -> list[str]:
    """One sentence with the tensors that a checkpoint has and that mergekit would leave out of the merged model."""
    architecture = known_architecture(model)
    weights = architecture.all_weights(model.config) if architecture else []
    written = {name for weight in weights for name in names_of(weight)}
    left_out = [name for name in model.tensors or {} if not model_tensor_name(name, written, model.prefix)]
    asked = [name for name in written if name not in (model.tensors or {})]
    found = set(renamed(model, model, asked).values())
    left_out = [name for name in left_out if name not in found]
    if not left_out or model.built is None:
        return []
    parameters = dict(model.built.named_parameters())
    if architecture is None:
        dropped = unconverted(model, parameters)
    else:  # the buffers of old checkpoints do not count
        dropped = [name for name in left_out if model_tensor_name(name, parameters, model.prefix)]
    if not dropped:
        return []
    return [
        f"mergekit leaves {listed(dropped)} of {model} out of what it writes, so the merged model would get random "
        "values there: it cannot merge this variant of the architecture."
    ]


def unknown_tensors(model: Model) -> list[str]:
    """The weights of a checkpoint that neither transformers' model nor mergekit's definition of it has.

    Buffers that old checkpoints hold, such as rotary frequencies and causal masks, do not count.
    """
    if model.built is None or not model.tensors:
        return []
    written = {name for weight in plan(model, [model]) for name in names_of(weight)}
    stored = [
        name
        for name, header in model.tensors.items()
        if name.endswith(".weight") or (name.endswith("bias") and len(header.shape) == 1)
    ]
    return [name for name in unread(model.built, stored) if not model_tensor_name(name, written, model.prefix)]


def known_architecture(model: Model) -> ModelArchitecture | None:
    """mergekit's definition of a model's architecture; None if it has none, about which it logs a message."""
    with silenced("mergekit.architecture"):
        return arch_info_for_config(model.config)


def unconverted(model: Model, parameters: Iterable[str]) -> list[str]:
    """Parameters, one of each layer's, that are stored under other names and that mergekit does not convert.

    It converts names only where all layers have the parameter, and knows conversions of the whole model's type only,
    not of its language tower's.
    """
    templates = {name: LAYER_NUMBER.sub(".*.", name, count=1) for name in parameters}
    layers = Counter(template for name, template in templates.items() if template != name)
    partial = {template for template, count in layers.items() if count < max(layers.values())}
    missing: dict[str, str] = {}
    for name in (name for name in templates if name not in (model.tensors or {})):
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
    tensors = model.tensors or {}
    if any(name in tensors for name in names_of(weight)):
        return True
    layers = {part for part in weight.name.split(".") if part.isdigit()}
    sources = {name for name in tensors if layers <= set(name.split("."))}
    keys = list(conversions) or [model.config.model_type]
    return any(can_convert_checkpoint_keys(key, sources, name) for key in keys for name in names)


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
