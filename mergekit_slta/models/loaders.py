"""Experts whose checkpoints store tensors otherwise than the base model's, for mergekit's loaders.

mergekit asks every model for the tensors of the base model's checkpoint, by their names there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

import torch
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.io.tasks import LoaderCache

from mergekit_slta.models.layout import Layout

# mergekit keeps one loader of each model for the whole process: whoever merges or verifies holds this lock.
ONE_AT_A_TIME = threading.RLock()


class AsTheBase(LazyTensorLoader):
    """mergekit's loader of an expert, which gives its tensors as the base model's checkpoint stores them.

    What the expert may lack, such as a head that predicts several tokens, is the base model's then.
    """

    def __init__(self, expert: LazyTensorLoader, base: LazyTensorLoader, layout: Layout) -> None:
        self._missing = layout.pieces.keys() | set(layout.outside)
        self._missing -= expert.index.tensor_paths.keys()
        known = expert.index.tensor_paths | dict.fromkeys(self._missing, "")
        super().__init__(replace(expert.index, tensor_paths=known), expert.lazy_unpickle)
        self._layout, self._stored, self._base = layout, Layout(layout.model, expert.index.tensor_paths), base
        self._of_base = layout.may_lack(self._stored)

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: list[str] | None = None, raise_on_missing: bool = True
    ) -> torch.Tensor | None:
        """The tensor as the expert stores it, or made of those that it stores instead."""
        if key not in self._missing:
            return super().get_tensor(key, device, aliases, raise_on_missing)
        if key in self._of_base:
            return self._base.get_tensor(key, device)
        load = partial(super().get_tensor, device=device)
        return self._layout.restore(key, lambda target, expert: self._stored.read(target, load, expert))


def adapt_loaders(layout: Layout, base: ModelReference, experts: Iterable[ModelReference]) -> None:
    """Let mergekit find in each expert what the base model's checkpoint stores, as ``layout`` says."""
    asked: Collection[str] = {*layout.pieces, *layout.outside}
    for expert in experts:
        loader = LoaderCache().get(expert)
        if not asked <= loader.index.tensor_paths.keys():
            LoaderCache.loaders[expert] = AsTheBase(loader, LoaderCache().get(base), layout)
