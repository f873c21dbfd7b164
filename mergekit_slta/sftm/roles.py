"""What each tensor is to its model: linear map, convolution, norm or something else, as Algorithm 2 tells them apart.

It is read off the module that owns the tensor in transformers' own model, built without weights.
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

from mergekit_slta.errors import SltaError
from mergekit_slta.models.skeleton import meta_model

LOG = logging.getLogger(__name__)

TORCH_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, _NormBase)


class Role(Enum):
    """What a tensor is to its model, as far as Algorithm 2 tells tensors apart."""

    LINEAR = "linear map, or a stack of them"
    CONVOLUTION = "convolution kernel"
    NORM = "normalization"
    OTHER = "bias, embedding, output head and all else"


def tensor_role(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> Role:
    """The role of a module's own parameter or buffer.

    Normalizations and embeddings of transformers are classes of their own without a common base, hence told by their
    class names, and so are a mixture's fused experts [experts, ...]. A matrix named ``weight`` is a linear map in every
    other module (``Linear``, the transposed ``Conv1D``, routers); other matrices act element by element (Mamba's
    ``A_log``, tables of positions).
    """
    kind = type(module).__name__
    if isinstance(module, torch.nn.Embedding) or "Embedding" in kind:
        return Role.OTHER
    if isinstance(module, TORCH_NORMS) or "Norm" in kind:
        return Role.NORM
    if isinstance(module, _ConvNd) and tensor.ndim > 2:
        return Role.CONVOLUTION
    if tensor.ndim == 2 and name.endswith("weight"):
        return Role.LINEAR
    if tensor.ndim == 3 and "Expert" in kind:
        return Role.LINEAR
    return Role.OTHER


def role_by_shape(tensor: torch.Tensor, vocabulary_axis: int | None) -> Role:
    """The role of a tensor that no module is known for: a matrix without a vocabulary is taken for a linear map.

    What has four dimensions or more is taken for a convolution kernel. A vector may be a bias or a norm; it counts as a
    bias, and so does what has three dimensions (a kernel, a fused mixture or a table of positions).
    """
    if tensor.ndim == 2 and vocabulary_axis is None:
        return Role.LINEAR
    return Role.CONVOLUTION if tensor.ndim >= 4 else Role.OTHER


def dotted_tails(name: str) -> Iterator[str]:
    """The endings of a dotted name, the longest first, down to a parameter with the name of its module."""
    parts = name.split(".")
    for start in range(max(1, len(parts) - 1)):
        yield ".".join(parts[start:])


def tensor_roles(model: transformers.PreTrainedModel) -> dict[str, Role]:
    """The roles of a model's tensors by name, and by every ending of the names that has but one role.

    Endings serve checkpoints that spell the front of their names otherwise than the model does (with or without the
    base model's prefix, ``language_model.model.`` for ``model.language_model.``), and sliced recipes, whose output has
    more layers than the base model.
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
    return {ending: next(iter(found)) for ending, found in endings.items() if len(found) == 1} | named


def model_roles(base: Hashable, trust_remote_code: bool) -> Mapping[str, Role]:
    """The roles of the base model's tensors; none, and a warning, where transformers cannot build the model."""
    try:
        if not isinstance(base, ModelReference):
            raise SltaError("the tensors come without a model")
        return tensor_roles(meta_model(base.config(trust_remote_code), trust_remote_code))
    except Exception as error:
        LOG.warning(
            "sftm cannot see the structure of %s (%s). It goes by the shapes of its tensors: matrices are merged as "
            "linear maps, norms as biases.",
            base,
            error,
        )
        return {}
