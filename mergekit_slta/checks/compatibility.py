"""Whether models can be merged with each other, judged by their configurations and file headers."""

from __future__ import annotations

import contextlib
import filecmp
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergekit.architecture import ModelArchitecture, WeightInfo, arch_info_for_config
from mergekit.architecture.conversion import can_convert_checkpoint_keys

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import Model, listed
from mergekit_slta.models.skeleton import computation, meta_model, model_tensor_name

LAYER_NUMBER = re.compile(r"\.(\d+)\.")
TOKENIZER = "tokenizer.json"
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def architecture_problem(base: Model, expert: Model, *, mixed: bool = False) -> str | None:
    """Why an expert's configuration says that it was not fine-tuned from the base model.

    Args:
        base: the base model.
        expert: the expert.
        mixed: whether the architectures may have different names.
    """
    if not mixed and (expert.architecture, expert.config.model_type) != (base.architecture, base.config.model_type):
        return (
            f"The expert {expert} is a {expert.architecture} ({expert.config.model_type}), the base model {base} a "
            f"{base.architecture} ({base.config.model_type}): only models of one architecture can be merged."
        )
    sizes = [(name, size(expert, name), size(base, name)) for name in SIZES]
    sizes = [entry for entry in sizes if None not in entry]  # a configuration may leave a default size out
    differing = [f"{name} {own} instead of {wanted}" for name, own, wanted in sizes if own != wanted]
    if differing:
        return (
            f"The expert {expert} has {', '.join(differing)}: it was not fine-tuned from the base model {base}, "
            "leave it out."
        )
    return None


def other_settings(base: Model, expert: Model) -> list[str]:
    """The entries of the configurations that make an expert compute something else than the base model."""
    own, theirs = computation(base.config), computation(expert.config)
    return sorted(name for name in own.keys() & theirs.keys() if own[name] != theirs[name])


def size(model: Model, name: str) -> Any:
    """A size from the configuration of a model, or of its language model if it has several parts."""
    return getattr(model.config.get_text_config(), name, None)


def shape_problem(base: Model, expert: Model) -> str | None:
    """Which tensors of an expert have another shape than the base model's, apart from the vocabulary's size."""
    vocabularies = (size(base, "vocab_size"), size(expert, "vocab_size"))
    unequal = []
    for name, stored in (base.tensors or {}).items():
        other = expert.tensor(name)
        if other is None or other.shape == stored.shape:
            continue
        own, others = stored.shape, other.shape
        if (*own[:1], *others[:1]) != vocabularies or own[1:] != others[1:]:
            unequal.append((name, own, others))
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
    if not quantization:
        return None
    given = quantization if isinstance(quantization, Mapping) else vars(quantization)
    return (
        f"{model} is quantized ({given.get('quant_method', 'quantization_config')}): "
        "name the original checkpoint, or dequantize it first."
    )


def vocabulary_problem(base: Model, expert: Model) -> str | None:
    """How the vocabularies of an expert and the base model differ."""
    own, others = size(base, "vocab_size"), size(expert, "vocab_size")
    if own != others:
        return f"The expert {expert} has a vocabulary of {others} tokens, the base model {base} one of {own}"
    return moved_tokens_problem(base, expert)


def moved_tokens_problem(base: Model, expert: Model) -> str | None:
    """How an expert's token ids differ from the base model's, as far as their files are on this machine."""
    files = tokenizer_file(base), tokenizer_file(expert)
    if files[0] is None or files[1] is None or filecmp.cmp(files[0], files[1], shallow=False):
        return None
    own, theirs = tokens_of(files[0]), tokens_of(files[1])
    moved = [token for token, index in own.items() if theirs.get(token, index) != index]
    if not moved:
        return None
    return (
        f"The tokenizer of the expert {expert} has other ids than that of the base model {base} for {len(moved)} "
        f"tokens (such as {moved[0]!r})"
    )


def tokenizer_file(model: Model) -> Path | None:
    """The ``tokenizer.json`` of a model, if it is on this machine."""
    if model.reference.lora and brings_tokenizer(model):
        return Path(model.reference.lora.path) / TOKENIZER
    return model.folder / TOKENIZER if model.folder and (model.folder / TOKENIZER).is_file() else None


def brings_tokenizer(model: Model) -> bool:
    """Whether a model is an adapter whose folder holds a tokenizer."""
    return model.reference.lora is not None and (Path(model.reference.lora.path) / TOKENIZER).is_file()


def tokens_of(file: Path) -> dict[str, int]:
    """The vocabulary in a ``tokenizer.json``; empty if the file is damaged, which loading the tokenizer reports."""
    try:
        tokens = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return tokens if isinstance(tokens, dict) else {token: index for index, (token, *_) in enumerate(tokens)}


# The tensors that mergekit reads and writes


def missing_tensors(models: Sequence[Model], trust_remote_code: bool = False) -> list[str]:
    """The tensors that mergekit needs and checkpoints lack: one sentence for all models that lack the same."""
    lacking: dict[tuple[str, ...], list[str]] = {}
    for model in models:
        names = tuple(weight.name for weight in plan(model, models, trust_remote_code) if not can_load(model, weight))
        lacking.setdefault(names, []).append(str(model))
    return [
        f"{listed(incomplete)}: the checkpoint lacks {listed(list(names))}, which mergekit needs; it is incomplete, "
        "or of a variant of its architecture that mergekit cannot merge."
        for names, incomplete in lacking.items()
        if names
    ]


def plan(model: Model, models: Sequence[Model], trust_remote_code: bool) -> list[WeightInfo]:
    """The tensors that mergekit needs of a model: those that it defines for the architecture, or all of any model."""
    if model.tensors is None:
        return []
    architecture = known_architecture(model)
    if architecture is not None:
        return [weight for weight in architecture.all_weights(model.config) if not weight.optional]
    stored = dict.fromkeys(name for other in models for name in other.tensors or {})
    try:
        known = meta_model(model.config, trust_remote_code).state_dict()  # old checkpoints hold buffers too
    except SltaError:
        known = stored
    return [WeightInfo(name=name) for name in stored if model_tensor_name(name, known, model.prefix)]


def dropped_tensors(model: Model, trust_remote_code: bool = False) -> list[str]:
    """One sentence with the tensors that a checkpoint has and that mergekit would leave out of the merged model."""
    architecture = known_architecture(model)
    weights = architecture.all_weights(model.config) if architecture else []
    written = {name for weight in weights for name in names_of(weight)}
    left_out = [name for name in model.tensors or {} if not model_tensor_name(name, written, model.prefix)]
    if not left_out:
        return []
    try:
        parameters = dict(meta_model(model.config, trust_remote_code).named_parameters())
    except SltaError:  # transformers cannot build the model
        return []
    if architecture is None:
        dropped = partial_conversions(model, parameters)
    else:  # the buffers of old checkpoints do not count
        dropped = [name for name in left_out if model_tensor_name(name, parameters, model.prefix)]
    if not dropped:
        return []
    return [
        f"mergekit leaves {listed(dropped)} of {model} out of what it writes, so the merged model would get random "
        "values there: it cannot merge this variant of the architecture."
    ]


def known_architecture(model: Model) -> ModelArchitecture | None:
    """mergekit's definition of a model's architecture; None if it has none, about which it logs a message."""
    with silenced("mergekit.architecture"):
        return arch_info_for_config(model.config)


def partial_conversions(model: Model, parameters: Iterable[str]) -> list[str]:
    """The parameters that only some layers have and that are stored under other names.

    mergekit converts names only where all layers have the parameter.
    """
    templates = {name: LAYER_NUMBER.sub(".*.", name, count=1) for name in parameters}
    layers = Counter(template for name, template in templates.items() if template != name)
    partial = {template for template, count in layers.items() if count < max(layers.values())}
    converted = [name for name in templates if name not in (model.tensors or {}) and templates[name] in partial]
    return [name for name in converted if can_load(model, WeightInfo(name=name))]


def names_of(weight: WeightInfo) -> list[str]:
    """All names under which mergekit looks for a tensor."""
    return [weight.name, *(weight.aliases or ()), *(weight.tied_names or ())]


def can_load(model: Model, weight: WeightInfo) -> bool:
    """Whether mergekit finds a tensor in a checkpoint, or can put it together from others (a mixture's experts)."""
    names = [weight.name, *(weight.aliases or ())]
    tensors = model.tensors or {}
    if any(name in tensors for name in names_of(weight)):
        return True
    layers = {part for part in weight.name.split(".") if part.isdigit()}
    sources = {name for name in tensors if layers <= set(name.split("."))}
    return any(can_convert_checkpoint_keys(model.config.model_type, sources, name) for name in names)


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
