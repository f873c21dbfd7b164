"""Trace a model once: build it without weights, and run its layers with made-up weights to see how they work."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder, fresh
from mergekit_slta.layers.ends import tail_problem
from mergekit_slta.layers.forms import with_form
from mergekit_slta.layers.recording import watch
from mergekit_slta.layers.structure import find_structure
from mergekit_slta.models.skeleton import meta_model

# The ends of the names of classes that make text from text; the last one's may take more than text.
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def trace(
    config: transformers.PretrainedConfig, trust_remote_code: bool = False, device: torch.device | str = "cpu"
) -> Decoder:
    """Find out how a model calls its decoder layers, how each splits into branches and heads, and how it ends.

    Raises:
        SltaError: the model is not a decoder-only language model, or its layers cannot be found, or run one at a time.
    """
    refuse_unless_decoder(config)
    return trace_model(meta_model(config, trust_remote_code), trust_remote_code, device)


def trace_model(
    model: transformers.PreTrainedModel, trust_remote_code: bool = False, device: torch.device | str = "cpu"
) -> Decoder:
    """``trace`` a model that is on the meta device."""
    device = _numbered(device)
    # One expert of a mixture after the other: the other ways compute the same, but gather copies of the weights.
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    tower = model if model.config.get_text_config() is model.config else model.get_decoder()
    layers = _find_layers(model, tower)
    _give_buffers(model, device)
    runs = watch(layers)
    decoder = Decoder(model, tower, model.base_model, layers, device, trust_remote_code, fresh(model), runs)
    try:
        decoder = with_form(decoder)
        of_kind = {layer: find_structure(decoder, layer) for layer in decoder.one_of_each_kind()}
        structures = [of_kind[first] for first in decoder.first_of_kind]
        return replace(decoder, structures=structures, tail_problem=tail_problem(decoder))
    except SltaError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise SltaError(
            f"The layers of {decoder.name} cannot be run one at a time ({type(error).__name__}: {error}), so no level "
            "applies to it; it can be merged with 'merge_method: actmat'."
        ) from error


def on_device(decoder: Decoder, device: torch.device | str) -> Decoder:
    """The decoder, its layers to run on a device."""
    if _numbered(device) == decoder.device:
        return decoder
    return trace(decoder.model.config, decoder.trust_remote_code, device)


def _numbered(device: torch.device | str) -> torch.device:
    """A device with its number: "cuda" is the current GPU, which may be another one in another thread."""
    return torch.empty(0, device=device).device


def refuse_unless_decoder(config: transformers.PretrainedConfig) -> None:
    """Refuse a model without a single stack of causal decoder layers, and say which method to use instead."""
    if not config.architectures:  # building the model will report it
        return
    architecture = config.architectures[0]
    if config.is_encoder_decoder or config.get_text_config().is_encoder_decoder:
        kind = "is an encoder-decoder"
    elif not architecture.endswith(WRITERS) and architecture not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        kind = "is not a decoder-only language model"
    else:
        return
    raise SltaError(f"{architecture} {kind}, which calibration does not cover: use 'merge_method: actmat' instead.")


def _find_layers(model: transformers.PreTrainedModel, tower: torch.nn.Module) -> torch.nn.ModuleList:
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in tower.modules() if isinstance(module, torch.nn.ModuleList)]
    if found := [module for module in lists if len(module) == depth]:
        return found[0]
    # Some configurations count attention layers; a decoder layer may have several of them.
    kinds = set(getattr(tower, "_no_split_modules", None) or ())
    if len(found := [module for module in lists if kinds.issuperset(type(layer).__name__ for layer in module)]) == 1:
        return found[0]
    raise SltaError(
        f"Cannot find the decoder layers of {type(model).__name__}: it has no single stack of them, so no level "
        "applies to it; it can be merged with 'merge_method: actmat'."
    )


def _give_buffers(model: transformers.PreTrainedModel, device: torch.device) -> None:
    """Fill the buffers that no checkpoint holds (rotary frequencies and the like) from the configuration.

    accelerate's ``init_empty_weights`` would fill them too, but it makes every parameter on the host before it drops
    it: one fused tensor of a large mixture is more than the memory of many machines.
    """
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    # Another module than its owner may fill a buffer, so the whole model initializes; meta weights get no values.
    model.initialize_weights()
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(device)
