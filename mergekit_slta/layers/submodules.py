"""List a layer's submodules at each level, and find the model's tensor for a name in a checkpoint."""

from __future__ import annotations

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
        SltaError: the layer has no such submodules, or cannot run alone.
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
    """The model's own name of a tensor, and the expert's number if a checkpoint stores a mixture's experts separately.

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
