"""The role of each tensor in its model: linear map, convolution, norm or something else.

The role follows from the module that owns the tensor in transformers' own model, built without weights. Merge methods
that see one tensor at a time decide by its role how to merge it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum

import torch
import transformers
from mergekit.common import ModelReference
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from mergekit_slta.errors import SltaError, reading
from mergekit_slta.models.layout import meta_model

LOG = logging.getLogger(__name__)

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
    their names. In other modules a matrix named ``weight`` is a linear map; others, such as Mamba's ``A_log``, are not.
    """
    kind = type(module).__name__
    if isinstance(module, torch.nn.Embedding) or "Embedding" in kind:
        return Role.OTHER
    if isinstance(module, TORCH_NORMS) or "Norm" in kind:
        return Role.NORM
    if isinstance(module, _ConvNd) and tensor.ndim > 2:
        return Role.CONVOLUTION
    if tensor.ndim == 2 and name.endswith("weight"):
        return Role.TRANSPOSED if isinstance(module, Conv1D) else Role.LINEAR
    if tensor.ndim == 3 and "Expert" in kind:
        return Role.TRANSPOSED if has_transposed_experts(module) else Role.LINEAR
    return Role.OTHER


def has_transposed_experts(module: torch.nn.Module) -> bool:
    """Whether a mixture's fused experts are stored as [experts, in, out].

    transformers notes it on most of these modules. On the others the shapes show it if the first projection computes
    the gate too: only one of its dimensions is then the hidden size.
    """
    noted = getattr(module, "is_transposed", None)
    if noted is not None:
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
    """The roles of a model's tensors by name, and by every ending of a name that has only one role.

    Endings serve checkpoints whose names begin otherwise, and sliced recipes, whose output may have more layers.
    """
    head = model.get_output_embeddings()
    head_parameters = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    named: dict[str, Role] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            role = Role.OTHER if id(tensor) in head_parameters else tensor_role(module, name, tensor)
            named[f"{path}.{name}" if path else name] = role
    endings: dict[str, set[Role]] = {}
    for full_name, role in named.items():
        for ending in dotted_tails(full_name):
            endings.setdefault(ending, set()).add(role)
    return {ending: next(iter(roles)) for ending, roles in endings.items() if len(roles) == 1} | named


def model_roles(base: Hashable, trust_remote_code: bool, method: str) -> Mapping[str, Role]:
    """The roles of the base model's tensors; empty, with a warning, if transformers cannot build the model."""
    reason = "the tensors come without a model"
    if isinstance(base, ModelReference):
        try:
            with reading(f"The configuration of {base}"):
                config = base.config(trust_remote_code)
            model = meta_model(config, trust_remote_code)
        except SltaError as error:
            reason = str(error)
        else:
            return tensor_roles(model)
    LOG.warning(
        "%s cannot read the structure of %s (%s), and uses the shapes of the tensors: it treats matrices as linear "
        "maps.",
        method,
        base or "the model",
        reason,
    )
    return {}
