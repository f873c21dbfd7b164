"""Which submodules a decoder has at each level, and the merging weights of every tensor, by its submodules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import Heads, linear_maps
from mergekit_slta.layers.trace import find_heads, find_structure, of_each_layer
from mergekit_slta.levels import Fallback, head_part, parts_at, submodule_name
from mergekit_slta.models.layout import Layout
from mergekit_slta.slta.solver import SubmoduleSolution


def submodules(decoder: Decoder, level: str, layer: int) -> list[str]:
    """The canonical names of a level's submodules in one layer, in the order of the forward pass; none at ``model``."""
    return [submodule_name(layer, part) for part in layer_parts(decoder, level, layer)]


def layer_parts(decoder: Decoder, level: str, layer: int) -> Sequence[str]:
    """The parts of a layer that are its submodules at a level, as they end the names; "" is the whole layer.

    Where the layer's parts at a level cannot be told apart, they are those of the next coarser level, as ``fallbacks``
    says.
    """
    split = of_each_layer(decoder, find_structure)[layer]
    if level == "model":
        return []
    heads = of_each_layer(decoder, find_heads)[layer] if level == "head_mlp" else ""
    of_heads = map(head_part, range(heads.count)) if isinstance(heads, Heads) else ()
    maps = () if split.of_some_tokens else (linear_map.name for linear_map in linear_maps(decoder.layers[layer]))
    return parts_at(level, [*split.branches, *of_heads, *maps])


def fallbacks(decoder: Decoder, level: str) -> list[Fallback]:
    """Which layers are measured at a coarser level than asked for, and why."""
    coarser_layers: dict[tuple[str, str, str], list[int]] = {}
    for layer in range(len(decoder)):
        if why := _fallback(decoder, level, layer):
            coarser_layers.setdefault((*why, type(decoder.layers[layer]).__name__), []).append(layer)
    return [Fallback(level, coarser, tuple(at), kind, reason) for (coarser, reason, kind), at in coarser_layers.items()]


def _fallback(decoder: Decoder, level: str, layer: int) -> tuple[str, str] | None:
    """The coarser level at which a layer is measured, and why; None where it is measured as asked for."""
    split = of_each_layer(decoder, find_structure)[layer]
    if level == "linear":
        if split.of_some_tokens:
            return "layer", f"{split.of_some_tokens} is given the features of some tokens only"
        return None if linear_maps(decoder.layers[layer]) else ("layer", "it has no linear maps")
    if level in ("attn_mlp", "head_mlp") and not split.branches:
        return "layer", "its attention and MLP branches cannot be told apart"
    if level == "head_mlp" and split.mixers and isinstance(heads := of_each_layer(decoder, find_heads)[layer], str):
        return "attn_mlp", heads
    return None


class TensorWeights:
    """The merging weights of every tensor.

    Tensors outside the decoder layers stay the base model's; at level ``model`` those of the language model follow its
    one weight. The towers of a multimodal model always stay, and what the model does not run, such as a head for
    multi-token prediction.

    ``layout`` says how a checkpoint, or mergekit's plan, cuts the model into tensors.
    """

    def __init__(
        self, decoder: Decoder, level: str, solutions: Mapping[str, SubmoduleSolution], layout: Layout
    ) -> None:
        self.decoder, self.level, self.solutions, self.layout = decoder, level, solutions, layout
        self._none = torch.zeros_like(next(iter(solutions.values())).alpha)  # of tensors that stay the base model's
        self._maps = [linear_maps(layer) for layer in decoder.layers]
        self._places: dict[str, list[str]] = defaultdict(list)  # of a tensor, by its first name
        for name, first in decoder.first_names.items():
            self._places[first].append(name)
        self._parts = [layer_parts(decoder, level, layer) for layer in range(len(decoder))]
        names = (submodule_name(layer, part) for layer, parts in enumerate(self._parts) for part in parts)
        if missing := [name for name in names if name not in solutions]:
            raise SltaError(
                f"The statistics lack {missing[0]}, a submodule of {decoder.name} at level {level}: they belong to "
                "another version or another model, so measure again into another file."
            )

    def __getitem__(self, stored: str) -> torch.Tensor:
        """The merging weights of a tensor, by its name in a checkpoint or in mergekit's plan.

        At ``attn_mlp``, for example, ``model.layers.3.mlp.up_proj.weight`` is in the branch ``mlp`` of layer 3 and
        takes the solution of ``layer.3.mlp``. A tensor that several layers share takes the mean of their weights.
        They are [T], or [T, ...] to broadcast with the tensor, if they differ inside it.
        """
        piece = self.layout.pieces.get(stored)
        if piece is None:
            return self._none
        by_target = {target: self._of_tensor(target, piece.mixture_expert) for target in piece.targets}
        first, *others = by_target.values()
        if piece.pattern is None or (first.ndim == 1 and all(torch.equal(first, other) for other in others)):
            return first

        def spread(index: int, target: str, part: int | None) -> torch.Tensor:
            return by_target[target][index].expand(self.decoder.model.state_dict()[target].shape)

        return torch.stack([self.layout.restore(stored, partial(spread, index)) for index in range(len(first))])

    def _of_tensor(self, name: str, mixture_expert: int | None) -> torch.Tensor:
        """The merging weights of a tensor of the model, or of the part of a mixture's expert."""
        if name not in self.decoder.language_tensors:
            return self._none
        if self.level == "model":
            return self.solutions["model"].alpha
        path = self.decoder.layers_path + "."
        if not name.startswith(path):
            return self._none
        places = self._places.get(self.decoder.first_names.get(name, name), [name])
        parts = [place.removeprefix(path).partition(".") for place in places if place.startswith(path)]
        alpha = [self._of_layer(int(number), key, mixture_expert) for number, _, key in parts]
        return alpha[0] if len(alpha) == 1 else torch.stack(alpha).mean(0)

    def _of_layer(self, layer: int, key: str, mixture_expert: int | None) -> torch.Tensor:
        if self._parts[layer] == [""]:
            return self._alpha(layer)
        if self.level == "linear":
            return self._of_map(layer, key, mixture_expert)
        return torch.stack([self._of_branch(layer, key, branch) for branch in self._branches(layer, key)]).mean(0)

    def _alpha(self, layer: int, part: str = "") -> torch.Tensor:
        return self.solutions[submodule_name(layer, part)].alpha

    def _branches(self, layer: int, key: str) -> list[str]:
        split = of_each_layer(self.decoder, find_structure)[layer]
        return [branch for branch, children in split.branches.items() if key.partition(".")[0] in children]

    def _of_branch(self, layer: int, key: str, branch: str) -> torch.Tensor:
        """The weights of a branch, or of heads.

        Query rows and output columns take the weights of their own head, key and value rows the mean of the heads that
        share them, and the attention's other tensors the mean of all heads.
        """
        if branch in self._parts[layer]:
            return self._alpha(layer, branch)
        heads = of_each_layer(self.decoder, find_heads)[layer]
        assert isinstance(heads, Heads)
        alpha = torch.stack([self._alpha(layer, head_part(head)) for head in range(heads.count)])  # [H, T]
        output = heads.output
        if key == output.weight:
            columns = self.decoder.layers[layer].state_dict()[key].shape[0 if output.transposed else 1]
            spread = alpha.repeat_interleave(columns // heads.count, 0).T  # [T, columns]
            return spread[:, :, None] if output.transposed else spread[:, None, :]
        for linear_map in self._maps[layer]:
            if linear_map.name in heads.rows and key in (linear_map.weight, linear_map.bias):
                belongs = heads.rows[linear_map.name].double()
                rows = (belongs @ alpha / belongs.sum(1, keepdim=True)).T  # [T, rows]
                if key == linear_map.bias:
                    return rows
                return rows[:, None, :] if linear_map.transposed else rows[:, :, None]
        return alpha.mean(0)

    def _of_map(self, layer: int, key: str, mixture_expert: int | None) -> torch.Tensor:
        """The weights of a linear map, or where the tensor belongs to none, the mean of its branches or its layer.

        An expert that changes none of a map's outputs on the samples takes that mean too.
        """
        split = of_each_layer(self.decoder, find_structure)[layer]
        around = [None] if not split.branches else [split.branches[branch] for branch in self._branches(layer, key)]
        mean = torch.stack([self._mean(layer, children) for children in around]).mean(0)
        maps = [m for m in self._maps[layer] if key in (m.weight, m.bias)]
        maps = maps or [m for m in self._maps[layer] if m.mixture_expert is None and key.startswith(f"{m.module}.")]
        if not maps:
            return mean
        solutions = [self.solutions[submodule_name(layer, linear_map.name)] for linear_map in maps]
        alpha = torch.stack([torch.where(one.measured, one.alpha, mean) for one in solutions])  # [1 or mixture, T]
        if maps[0].mixture_expert is None:
            return alpha[0]
        stack = self.decoder.layers[layer].state_dict()[key]
        alpha = torch.cat([alpha, mean.expand(len(stack) - len(alpha), -1)])  # of experts that multiply by nothing
        if mixture_expert is not None:
            return alpha[mixture_expert]
        return alpha.T.reshape(*alpha.T.shape, *[1] * (stack.ndim - 1))

    def _mean(self, layer: int, children: frozenset[str] | None) -> torch.Tensor:
        """Each expert's mean weight [T] over a branch's maps that it was measured to change, or else over the layer's.

        The weight of an unmeasured map, such as a mixture's expert that no token reached, is zero for lack of data.
        """
        names = [m.name for m in self._maps[layer] if children is None or m.module.partition(".")[0] in children]
        if not names:  # a branch without maps
            names = [m.name for m in self._maps[layer]]
        solutions = [self.solutions[submodule_name(layer, name)] for name in names]
        measured = torch.stack([solved.measured for solved in solutions])  # [maps, T]
        alpha = torch.stack([solved.alpha for solved in solutions])
        mean = torch.where(measured, alpha, 0.0).sum(0) / measured.sum(0).clamp_min(1)
        return mean if children is None else torch.where(measured.any(0), mean, self._mean(layer, None))
