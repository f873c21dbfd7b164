"""Which submodules a layer has at each level, and which of the model's tensors a checkpoint's name means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import tail_problem
from mergekit_slta.layers.heads import find_heads
from mergekit_slta.layers.maps import linear_maps
from mergekit_slta.layers.structure import split_problem, structure
from mergekit_slta.levels import head_part, submodule_name
from mergekit_slta.models.skeleton import model_tensor_name


def layer_submodules(decoder: Decoder, level: str, layer: int) -> list[str]:
    """The canonical names of a level's submodules in one layer, in the order of the forward pass.

    Raises:
        SltaError: the layer has no such submodules, or cannot be run by itself.
    """
    split_problem(decoder, layer)  # runs the layer, which every level needs
    if level == "model" and (problem := tail_problem(decoder)):
        raise SltaError(problem)
    if level == "layer":
        return [submodule_name(layer)]
    if level == "attn_mlp":
        return [submodule_name(layer, branch) for branch in structure(decoder, layer).branches]
    if level == "head_mlp":
        parts = [*map(head_part, range(find_heads(decoder, layer).count)), "mlp"]
        return [submodule_name(layer, part) for part in parts]
    if level == "linear":
        structure(decoder, layer)  # a tensor that belongs to no map takes its branch's weights
        return [submodule_name(layer, linear_map.name) for linear_map in linear_maps(decoder.layers[layer])]
    return []


def resolve_name(decoder: Decoder, name: str) -> tuple[str, int | None]:
    """The model's own name of a tensor, and the mixture's expert where a checkpoint stores each by itself.

    Args:
        decoder: the model's decoder.
        name: the tensor's name in a checkpoint or in mergekit's plan.
    """
    names, prefix = decoder.tensor_names, decoder.base_model_prefix
    found = model_tensor_name(name, names, prefix)
    if found is not None:
        return found, None
    for transform in get_checkpoint_conversion_mapping(decoder.model.config.model_type) or []:
        renamed, pattern = transform.rename_source_key(name)
        if pattern is not None and isinstance(transform, WeightRenaming):
            name = renamed
        elif pattern is not None:
            found = model_tensor_name(renamed, names, prefix)
            numbers = [part for part in name.split(".") if part.isdigit()]
            if found is not None:
                return found, int(numbers[-1])
    return model_tensor_name(name, names, prefix) or name, None


def weighted_sum(base: torch.Tensor, experts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The base tensor plus the weighted task vectors, accumulated in at least float32 without forming a task vector.

    What equals the base tensor is left out, so that a tensor that no expert changed stays as it is to the last bit.

    Args:
        base: the base model's tensor.
        experts: each expert's tensor and its weights, one number or a tensor that broadcasts to it.
    """
    dtype = torch.promote_types(base.dtype, torch.float32)
    experts = [(tensor, weight) for tensor, weight in experts if bool(weight.any()) and not torch.equal(tensor, base)]
    if not experts:
        return base
    weights = [weight.to(base.device, dtype) for _, weight in experts]
    result = base.to(dtype) * (1 - torch.stack(weights).sum(0))
    for (tensor, _), weight in zip(experts, weights, strict=True):
        result.addcmul_(tensor, weight)
    return result.to(base.dtype)
