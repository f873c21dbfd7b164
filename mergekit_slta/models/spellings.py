"""Checkpoints that call tensors otherwise than mergekit asks for them.

Releases of transformers have put other prefixes before the parts of multimodal models, and a language model saved alone
has none. transformers loads them all; mergekit asks for one name.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
import transformers
from mergekit.architecture import ModelArchitecture
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.io.tasks import LoaderCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from mergekit_slta.models.headers import Model
from mergekit_slta.models.skeleton import model_tensor_name


def other_names(
    model: transformers.PreTrainedModel, stored: Iterable[str], asked: Collection[str]
) -> Mapping[str, str]:
    """The stored tensor for each asked name that transformers takes for the same tensor of ``model``.

    Tensors that it would have to convert, such as the experts of a mixture stored one by one, are not among them.
    """
    renamings = [found for found in get_model_conversion_mapping(model) if isinstance(found, WeightRenaming)]
    names = set(model.state_dict())

    def own(name: str) -> str | None:
        return model_tensor_name(apply_renamings(name, renamings), names, model.base_model_prefix)

    known = {own(name): name for name in stored}
    found = {name: known.get(own(name)) for name in asked if own(name)}
    return {name: other for name, other in found.items() if other}


# mergekit keeps one loader of each model for the whole process: whoever merges or verifies holds this lock.
ONE_AT_A_TIME = threading.RLock()


class RenamingLoader(LazyTensorLoader):
    """mergekit's loader of a checkpoint that knows some of its tensors by other names too, the keys of ``names``."""

    def __init__(self, loader: LazyTensorLoader, names: Mapping[str, str]) -> None:
        stored = loader.index.tensor_paths
        paths = {**stored, **{name: stored[other] for name, other in names.items()}}
        super().__init__(replace(loader.index, tensor_paths=paths), loader.lazy_unpickle)
        self._names = names

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: list[str] | None = None, raise_on_missing: bool = True
    ) -> torch.Tensor | None:
        """The tensor that is stored by that name, or by the one that it stands for."""
        return super().get_tensor(self._names.get(key, key), device, aliases, raise_on_missing)


def adapt_loaders(base: Model, references: Collection[ModelReference], architecture: ModelArchitecture) -> None:
    """Let mergekit find tensors of a recipe's models that their checkpoints store under other names."""
    asked = {weight.name for weight in architecture.all_weights(base.config)}
    for reference in references:
        loader = LoaderCache().get(reference)
        missing = [name for name in asked if name not in loader.index.tensor_paths]
        names = other_names(base.built, loader.index.tensor_paths, missing) if missing and base.built else {}
        if names:
            LoaderCache.loaders[reference] = RenamingLoader(loader, names)
