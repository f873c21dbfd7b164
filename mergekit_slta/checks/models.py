"""Whether models can be merged with each other, judged by their configurations and file headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mergekit.common import ModelReference

from mergekit_slta.checks.adapters import require_mergeable
from mergekit_slta.checks.tensors import known_architecture
from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import Model, both_have
from mergekit_slta.models.skeleton import computation
from mergekit_slta.recipe.experiment import Experiment

SAME_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def one_model(experiment: Experiment, reference: ModelReference) -> None:
    """Refuse a model that cannot be opened, is quantized, or is an adapter that mergekit cannot merge."""
    model = experiment.model(reference)
    not_quantized(model)
    if reference.lora is not None:
        require_mergeable(model, reference.lora, experiment.options.lora_merge_cache)


def not_quantized(model: Model) -> None:
    """Refuse a quantized model: its tensors hold codes, which cannot be averaged."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization:
        given = quantization if isinstance(quantization, Mapping) else vars(quantization)
        raise SltaError(
            f"{model} is quantized ({given.get('quant_method', 'quantization_config')}): "
            "name the original checkpoint, or dequantize it first."
        )
    weights = {name: stored for name, stored in (model.tensors or {}).items() if name.endswith("weight")}
    for name, stored in weights.items():
        if len(stored.shape) > 1 and stored.nbytes < 2 * stored.count:
            raise SltaError(
                f"{model} stores {name} in 8 bits or fewer, so it is quantized: name the original checkpoint, or "
                "dequantize it first."
            )


def one_family(experiment: Experiment, reference: ModelReference) -> None:
    """Refuse an expert that was not fine-tuned from the base model, by its architecture, sizes and shapes.

    --allow-crimes allows another architecture if no model has to be run.
    """
    base, expert = experiment.model(experiment.recipe.base), experiment.model(reference)
    if not (experiment.options.allow_crimes and not experiment.recipe.method.runs_models):
        _same_architecture(base, expert)
    sizes = [(name, expert.size(name), base.size(name)) for name in SAME_SIZES]
    sizes = [entry for entry in sizes if None not in entry]  # a configuration may leave a default size out
    if differing := [f"{name} {own} instead of {wanted}" for name, own, wanted in sizes if own != wanted]:
        raise SltaError(
            f"The expert {expert} has {', '.join(differing)}: it was not fine-tuned from the base model {base}, "
            "leave it out."
        )
    _same_shapes(base, expert)
    _both_tied(base, expert)


def _same_architecture(base: Model, expert: Model) -> None:
    if (expert.architecture, expert.config.model_type) == (base.architecture, base.config.model_type):
        return
    kinds = (
        f"The expert {expert} is a {expert.architecture} ({expert.config.model_type}), the base model {base} a "
        f"{base.architecture} ({base.config.model_type})"
    )
    if language_type(expert) != language_type(base) or is_multimodal(expert) == is_multimodal(base):
        raise SltaError(f"{kinds}: only models of one architecture can be merged.")
    if known_architecture(expert) and known_architecture(base):
        raise SltaError(
            f"{kinds}: mergekit defines the two apart and cannot plan a merge of both, although one is the "
            f"language tower of the other. Save the expert as a {base.architecture}, its tensors in the place of "
            "the base model's."
        )


def language_type(model: Model) -> str:
    """The type of the language model, which may be a part of the model."""
    return str(model.config.get_text_config().model_type)


def is_multimodal(model: Model) -> bool:
    """Whether the language model is a part of the model."""
    return model.config.get_text_config() is not model.config


def _same_shapes(base: Model, expert: Model) -> None:
    """Refuse tensors of another shape than the base model's, apart from the vocabulary's size."""
    shapes = [(name, stored.shape, other.shape) for name, stored, other in both_have(base, expert)]
    unequal = [(name, own, others) for name, own, others in shapes if own != others]
    sizes = (base.vocabulary, expert.vocabulary)
    unequal = [entry for entry in unequal if (*entry[1][:1], *entry[2][:1]) != sizes or entry[1][1:] != entry[2][1:]]
    if unequal:
        name, own, others = unequal[0]
        more = f", and so do {len(unequal) - 1} more" if len(unequal) > 1 else ""
        raise SltaError(
            f"The tensor {name} of the expert {expert} has the shape {list(others)} instead of {list(own)}{more}: "
            f"it was not fine-tuned from the base model {base}, leave it out."
        )


def _both_tied(base: Model, expert: Model) -> None:
    tied = [model for model in (base, expert) if getattr(model.config, "tie_word_embeddings", False)]
    if len(tied) == 1:
        untied = expert if tied[0] is base else base
        raise SltaError(
            f"{tied[0]} ties its output head to its embedding and {untied} does not (tie_word_embeddings): the merged "
            f"head would fit neither, save {expert} with the setting of the base model {base}."
        )


# Notes


def unseen_tensors(experiment: Experiment) -> Iterator[str]:
    """Models whose tensors can be checked only after a download."""
    for model in map(experiment.model, experiment.recipe.references):
        if model.tensors is None:
            yield f"The weights of {model} are pickled on the Hub: they can be checked only after their download."


def other_configurations(experiment: Experiment) -> Iterator[str]:
    """Experts whose configuration makes them compute something else from the same weights."""
    measured = ", and the expert is measured with it too" if experiment.recipe.method.runs_models else ""
    for base, expert in experiment.pairs:
        own, theirs = computation(base.config), computation(expert.config)
        if names := sorted(name for name in own.keys() & theirs.keys() if own[name] != theirs[name]):
            yield (
                f"The configuration of the expert {expert} differs from that of the base model {base} in "
                f"{', '.join(names)}: the merged model gets the base model's configuration{measured}."
            )
