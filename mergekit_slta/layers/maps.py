"""What each tensor of a model is, and the linear maps of a decoder layer, whatever module holds them.

A tensor's role (linear map, convolution, norm or something else) follows from the module that owns it in transformers'
own model, built without weights. Merge methods that see one tensor at a time decide by its role how to merge it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from mergekit_slta.models.checkpoint import Tensors

FUSED = ("gate_up_proj", "up_proj", "down_proj")
TORCH_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, _NormBase)


class Role(Enum):
    """The kinds of tensors that merge methods treat differently."""

    LINEAR = "linear map [out, in], or a stack of them"
    TRANSPOSED = "linear map stored as [in, out], or a stack of them"
    CONVOLUTION = "convolution kernel"
    NORM = "normalization"
    OTHER = "bias, embedding, output head and all else"


MAPS = (Role.LINEAR, Role.TRANSPOSED)


def tensor_role(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> Role:
    """The role of a module's own parameter or buffer.

    The normalizations, embeddings and fused experts [experts, ...] of transformers share no base class but parts of
    their names. In other modules a matrix named ``weight`` is a linear map; of others, such as Mamba's ``A_log`` or the
    projector of Gemma 3's images [in, out], nothing tells which side is which.
    """
    kind = type(module).__name__
    if isinstance(module, torch.nn.Embedding) or "Embedding" in kind:
        return Role.OTHER
    if isinstance(module, TORCH_NORMS) or "Norm" in kind:
        return Role.NORM
    if isinstance(module, _ConvNd) and tensor.ndim > 2:
        return Role.CONVOLUTION
    if tensor.ndim == 2 and name in ("weight", "in_proj_weight"):  # the latter is torch's own attention's
        return Role.TRANSPOSED if isinstance(module, Conv1D) else Role.LINEAR
    if tensor.ndim == 3 and "Expert" in kind:
        return Role.TRANSPOSED if has_transposed_experts(module) else Role.LINEAR
    return Role.OTHER


def has_transposed_experts(module: torch.nn.Module) -> bool:
    """Whether a mixture's fused experts are stored as [experts, in, out].

    transformers notes it on most of these modules. On the others the shapes show it if the first projection computes
    the gate too: only one of its dimensions is then the hidden size.
    """
    if (noted := getattr(module, "is_transposed", None)) is not None:
        return bool(noted)
    first, second = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    return first is not None and second is not None and first.shape[-2] == second.shape[-1]


def turned(role: Role) -> Role:
    """The role of a linear map that is stored with its rows and columns exchanged."""
    return {Role.LINEAR: Role.TRANSPOSED, Role.TRANSPOSED: Role.LINEAR}.get(role, role)


def role_by_shape(name: str, tensor: torch.Tensor, vocabulary_axis: int | None) -> Role:
    """Guess the role of a tensor whose module is unknown; what may be several kinds counts as a bias."""
    if tensor.ndim == 2 and vocabulary_axis is None:
        return Role.LINEAR
    if tensor.ndim == 1 and "norm" in name:
        return Role.NORM
    return Role.CONVOLUTION if tensor.ndim >= 4 else Role.OTHER


def dotted_tails(name: str) -> Iterator[str]:
    """The endings of a dotted name, from the longest to a parameter with the name of its module."""
    parts = name.split(".")
    for start in range(max(1, len(parts) - 1)):
        yield ".".join(parts[start:])


def tensor_roles(model: transformers.PreTrainedModel) -> dict[str, Role]:
    """The roles of a model's tensors, by the model's names."""
    head = model.get_output_embeddings()
    head_parameters = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    named: dict[str, Role] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            role = Role.OTHER if id(tensor) in head_parameters else tensor_role(module, name, tensor)
            named[f"{path}.{name}" if path else name] = role
    return named


def roles_by_ending(model: transformers.PreTrainedModel) -> dict[str, Role]:
    """The roles of a model's tensors by name, and by every ending of a name that has only one role.

    Endings serve tensors that the model does not have, such as those of a head for multi-token prediction.
    """
    named, endings = tensor_roles(model), dict[str, set[Role]]()
    for name, role in named.items():
        for ending in dotted_tails(name):
            endings.setdefault(ending, set()).add(role)
    return {ending: next(iter(roles)) for ending, roles in endings.items() if len(roles) == 1} | named


# Linear maps: linear layers, routers, a mixture's fused experts


class LinearMap(NamedTuple):
    """One matrix of a layer that is multiplied with features."""

    name: str  # its path in transformers' decoder layer, with the expert's number for a mixture's fused map
    module: str  # the path of the module that holds it
    weight: str  # its tensors' names inside the layer
    bias: str | None
    transposed: bool  # whether the weight is stored as [in, out]
    mixture_expert: int | None = None  # the number of the mixture's expert if the weight is [experts, ...]

    def matrix(self, tensors: Tensors) -> torch.Tensor:
        """The map as [out, in]."""
        weight = tensors[self.weight] if self.mixture_expert is None else tensors[self.weight][self.mixture_expert]
        return weight.mT if self.transposed else weight

    def stored(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix [out, in] as the map's weight is stored."""
        return (matrix.mT if self.transposed else matrix).contiguous()

    def function(self, tensors: Tensors) -> Callable[[torch.Tensor], torch.Tensor]:
        """What gives the outputs [..., out] for inputs [..., in]; it reads a mixture's matrix once."""
        return partial(torch.nn.functional.linear, weight=self.matrix(tensors), bias=self.offset(tensors))

    def offset(self, tensors: Tensors) -> torch.Tensor | None:
        """The map's bias [out]."""
        if self.bias is None:
            return None
        return tensors[self.bias] if self.mixture_expert is None else tensors[self.bias][self.mixture_expert]


@dataclass(frozen=True)
class Heads:
    """The heads of one layer's attention."""

    count: int  # of query heads, H
    output: LinearMap  # the map that takes all heads' features, o_proj
    # For each other map of the attention, by name, [out, H] booleans: whether a head depends on a row. A row that
    # reaches the heads only through another map (as in latent attention) belongs to all heads.
    rows: dict[str, torch.Tensor]


def linear_maps(layer: torch.nn.Module) -> list[LinearMap]:
    """The linear maps of a decoder layer; convolutions and norms do not count."""
    return [linear_map for path, module in layer.named_modules() for linear_map in _maps_of(path, module)]


def is_numbered(module: str) -> bool:
    """Whether a module, by its path, may be one of a mixture's experts that are modules of their own."""
    return any(part.isdigit() for part in module.split("."))


def takes_some_tokens(module: str, features: torch.Tensor, tokens: torch.Size) -> bool:
    """Whether the features that a module is given may be of some of the tokens [B, S] only, nobody knows which.

    Those of all are [B, S, ...], or [B, 1, S, D] for one head of an attention, or rows in the tokens' order.
    """
    if is_numbered(module):
        return features.ndim < 3 or features.squeeze(1).shape[:2] != tokens
    rows = features.shape[:-1].numel()
    return (not rows or rows % tokens.numel() > 0) and (features.ndim < 3 or features.shape[0] != tokens[0])


def is_fused(module: torch.nn.Module) -> bool:
    """Whether a module holds the experts of a mixture as three-dimensional parameters."""
    weight = getattr(module, "down_proj", None)
    return isinstance(weight, torch.nn.Parameter) and weight.ndim == 3


def fused_hidden(module: Any, projected: torch.Tensor) -> torch.Tensor:
    """The input of fused experts' down projection: their own gate applied to the first projection's output."""
    if not getattr(module, "has_gate", True):
        return module.act_fn(projected)
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(projected)
    gate, up = projected.chunk(2, dim=-1)  # of a module without transformers' interface for such experts
    return module.act_fn(gate) * up


class RoutedInputs(NamedTuple):
    """The inputs of a mixture's routed experts for ``n`` tokens."""

    values: torch.Tensor  # [m, D], the inputs
    routes: torch.Tensor  # [m, k] int64, the experts that each input goes to
    tokens: torch.Tensor  # [m] int64, the number of each input's token
    places: torch.Tensor  # [m] int64, the place of each input among all that the module is given for the tokens


def routed_inputs(args: Sequence[torch.Tensor], experts: int, positions: torch.Tensor | None = None) -> RoutedInputs:
    """Tell which inputs of a fused mixture's module go to which of its experts.

    The module's arguments are either the features of all positions [..., D] and the experts that each goes to [..., k],
    or only features [experts * positions, D], for each expert those of all positions, which are zero where the position
    does not go to it. ``positions`` are those of the ``n`` tokens; by default all are tokens.
    """
    values, *chosen = args
    stacked = values.reshape(1 if chosen else experts, -1, values.shape[-1])
    positions = (torch.arange(stacked.shape[1]) if positions is None else positions).to(values.device)
    if chosen:
        numbers = torch.arange(len(positions), device=values.device)
        return RoutedInputs(stacked[0, positions], chosen[0].reshape(stacked.shape[1], -1)[positions], numbers, numbers)
    expert, tokens = stacked.any(-1)[:, positions].nonzero(as_tuple=True)
    places = expert * len(positions) + tokens
    return RoutedInputs(stacked[expert, positions[tokens]], expert[:, None], tokens, places)


def _maps_of(path: str, module: torch.nn.Module) -> Iterator[LinearMap]:
    if is_fused(module):
        if not hasattr(module, "has_gate") and not (hasattr(module, "gate_up_proj") and hasattr(module, "act_fn")):
            return
        # LongCat-Flash's last experts return their input: they have no down projection, and use no other map.
        experts = len(module.get_parameter("down_proj"))
        for name in FUSED:
            bias = f"{path}.{name}_bias" if hasattr(module, f"{name}_bias") else None
            transposed = has_transposed_experts(module)
            for mixture_expert in range(experts if hasattr(module, name) else 0):
                part = f"{path}.{mixture_expert}.{name}"
                yield LinearMap(part, path, f"{path}.{name}", bias, transposed, mixture_expert)
        return
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.nn.Parameter) and weight.ndim == 2:
        bias = f"{path}.bias" if isinstance(getattr(module, "bias", None), torch.nn.Parameter) else None
        if (role := tensor_role(module, "weight", weight)) in MAPS:
            yield LinearMap(path, path, f"{path}.weight", bias, role is Role.TRANSPOSED)


def expert_stacks(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A layer's tensors [E, ...] that hold the matrices of a mixture's routed experts, by their names in the layer."""
    return {
        f"{path}.{name}": parameter
        for path, module in layer.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and tensor_role(module, name, parameter) in MAPS
    }


def matrices_in(layer: torch.nn.Module, name: str) -> list[LinearMap]:
    """The matrices of one of the ``expert_stacks``, also where they are no maps of the layer."""
    module, _, leaf = name.rpartition(".")
    owner = layer.get_submodule(module)
    stack = owner.get_parameter(leaf)
    transposed = tensor_role(owner, leaf, stack) is Role.TRANSPOSED
    return [LinearMap(f"{name}.{e}", module, name, None, transposed, e) for e in range(len(stack))]


def routed_tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The ``expert_stacks`` whose matrices are maps of the layer."""
    names = {m.weight for m in linear_maps(layer)}
    return {name: tensor for name, tensor in expert_stacks(layer).items() if name in names}
