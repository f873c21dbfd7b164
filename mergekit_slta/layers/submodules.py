"""The submodules of each level, and which merging weights every tensor of the model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.heads import find_heads
from mergekit_slta.layers.maps import linear_maps
from mergekit_slta.levels import head_part, submodule_name
from mergekit_slta.models.skeleton import model_tensor_name


def layer_submodules(decoder: Decoder, level: str, layer: int) -> list[str]:
    """The canonical names of a level's submodules in one layer, in the order of the forward pass.

    Raises:
        SltaError: the layer has no such submodules, or cannot be run by itself.
    """
    decoder.split_problem(layer)  # runs the layer, which every level needs
    if level == "model" and decoder.tail_problem:
        raise SltaError(decoder.tail_problem)
    if level == "layer":
        return [submodule_name(layer)]
    if level == "attn_mlp":
        return [submodule_name(layer, branch) for branch in decoder.structure(layer).branches]
    if level == "head_mlp":
        parts = [*map(head_part, range(find_heads(decoder, layer).count)), "mlp"]
        return [submodule_name(layer, part) for part in parts]
    if level == "linear":
        decoder.structure(layer)  # a tensor that belongs to no map takes its branch's weights
        return [submodule_name(layer, linear_map.name) for linear_map in linear_maps(decoder.layers[layer])]
    return []


class TensorWeights:
    """The merging weights of every tensor, from those of the submodules.

    Args:
        decoder: the model's decoder.
        level: the level of ``alpha``.
        alpha: [T] float64 merging weights per submodule of the level.
        edges: ``base`` keeps the base model's tensors outside the decoder layers, ``mean`` gives them the mean of
            all submodules' weights.
    """

    def __init__(self, decoder: Decoder, level: str, alpha: Mapping[str, torch.Tensor], edges: str = "base") -> None:
        self.decoder = decoder
        self.level = level
        self.alpha = alpha
        mean = torch.stack(list(alpha.values())).mean(0)
        self.edge_alpha = mean if edges == "mean" or level == "model" else torch.zeros_like(mean)
        self._maps = [linear_maps(layer) for layer in decoder.layers]
        for layer in range(len(decoder)):  # traced here, so that several threads may ask afterwards
            layer_submodules(decoder, level, layer)
            if level not in ("model", "layer"):
                decoder.structure(layer)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The merging weights of a tensor, by its name in a checkpoint or in mergekit's plan.

        Returns:
            [T], or [T, ...] with the tensor's own dimensions, each full or one, where they differ inside the tensor.

        Raises:
            SltaError: the tensor belongs to a decoder layer but to none of its modules.
        """
        name, mixture_expert = resolve_name(self.decoder, name)
        path = self.decoder.layers_path + "."
        if self.level == "model" or not name.startswith(path):
            return self.edge_alpha
        number, _, inside = name.removeprefix(path).partition(".")
        layer = int(number)
        if self.level == "layer":
            return self.alpha[submodule_name(layer)]
        if self.level == "linear":
            return self._linear(layer, inside, mixture_expert)
        branches = self._branches(layer, inside)
        if self.level == "attn_mlp":
            return torch.stack([self.alpha[submodule_name(layer, branch)] for branch in branches]).mean(0)
        return torch.stack([self._head_level(layer, inside, branch) for branch in branches]).mean(0)

    def _branches(self, layer: int, inside: str) -> list[str]:
        child = inside.partition(".")[0]
        branches = [b for b, children in self.decoder.structure(layer).branches.items() if child in children]
        if not branches:
            raise SltaError(f"The tensor {inside} of layer {layer} feeds neither of its branches: use 'level: layer'.")
        return branches

    def _head_level(self, layer: int, inside: str, branch: str) -> torch.Tensor:
        """Query rows and output columns take their head's weights, shared key and value rows the mean of theirs."""
        if branch == "mlp":
            return self.alpha[submodule_name(layer, "mlp")]
        heads = find_heads(self.decoder, layer)
        alpha = torch.stack(
            [self.alpha[submodule_name(layer, head_part(head))] for head in range(heads.count)]
        )  # [H, T]
        output = heads.output
        if inside == output.weight:
            columns = self._shape(layer, inside)[0 if output.transposed else 1]
            spread = alpha.repeat_interleave(columns // heads.count, 0).T  # [T, columns]
            return spread[:, :, None] if output.transposed else spread[:, None, :]
        for linear_map in self._maps[layer]:
            if linear_map.name in heads.rows and inside in (linear_map.weight, linear_map.bias):
                belongs = heads.rows[linear_map.name].double()
                rows = (belongs @ alpha / belongs.sum(1, keepdim=True)).T  # [T, rows]
                if inside == linear_map.bias:
                    return rows
                return rows[:, None, :] if linear_map.transposed else rows[:, :, None]
        return alpha.mean(0)

    def _linear(self, layer: int, inside: str, mixture_expert: int | None) -> torch.Tensor:
        """A map's tensors take its weights, what is no map the mean of its branch's maps."""
        maps = [m for m in self._maps[layer] if inside in (m.weight, m.bias)]
        if not maps:
            maps = [m for m in self._maps[layer] if inside.startswith(m.module + ".")]
        branches = self._branches(layer, inside)
        mean = torch.stack([self._branch_mean(layer, branch) for branch in branches]).mean(0)
        if not maps:
            return mean
        found = torch.stack(
            [self.alpha[submodule_name(layer, m.name)] for m in maps]
        )  # [1 or experts of the mixture, T]
        reached = (found != 0).any(1, keepdim=True)
        found = torch.where(reached, found, mean)  # a map that no sample reached takes its branch's weights
        if maps[0].expert is None:
            return found[0]
        if mixture_expert is not None:
            return found[mixture_expert]
        return found.T.reshape(*found.T.shape, *[1] * (len(self._shape(layer, inside)) - 1))

    def _branch_mean(self, layer: int, branch: str) -> torch.Tensor:
        """The mean weights of a branch's maps, leaving out those that no sample reached."""
        children = self.decoder.structure(layer).branches[branch]
        names = [m.name for m in self._maps[layer] if m.module.partition(".")[0] in children]
        found = [self.alpha[submodule_name(layer, name)] for name in names]
        used = [alpha for alpha in found if bool((alpha != 0).any())]
        return torch.stack(used or found).mean(0)

    def _shape(self, layer: int, inside: str) -> Sequence[int]:
        return self.decoder.layers[layer].state_dict()[inside].shape


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
