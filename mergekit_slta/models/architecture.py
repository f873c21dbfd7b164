"""The tensors that a merge writes: those of the base model's checkpoint, by their names there, and no others.

mergekit asks every model for them by these names; `AsTheBase` finds them in experts that store them otherwise.

mergekit plans a merge by its own definition of an architecture, or by the names of transformers' model. Both leave
tensors of this year's checkpoints out (heads for multi-token prediction, a mixture's experts in some layers), and
the second writes the experts of a mixture as one tensor, which programs that read the base model do not know.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import transformers
from mergekit.architecture import ModelArchitecture, ModuleDefinition, WeightInfo, arch_info_for_config
from mergekit.architecture.auto import infer_vocabulary_axes
from mergekit.architecture.base import ModuleArchitecture
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.io.tasks import LoaderCache

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import Headers, Model, exempt_types
from mergekit_slta.models.layout import Layout
from mergekit_slta.words import listed

ONE_AT_A_TIME = threading.RLock()  # a merge holds it: mergekit keeps one loader of each model for the whole process
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(eq=False)
class StoredModule(ModuleArchitecture):
    """A stack of layers, or what lies outside of all stacks, as the base model's checkpoint stores it.

    mergekit pairs the tensors of several models by their places in these lists, so they are the same for all.
    """

    outside: list[WeightInfo]
    layers: list[list[WeightInfo]]

    def pre_weights(self, config: transformers.PretrainedConfig) -> list[WeightInfo]:
        return self.outside

    def layer_weights(self, index: int, config: transformers.PretrainedConfig) -> list[WeightInfo]:
        return self.layers[index]

    def post_weights(self, config: transformers.PretrainedConfig) -> list[WeightInfo]:
        return []

    def num_layers(self, config: transformers.PretrainedConfig) -> int:
        return len(self.layers)


def architecture_of(base: Layout, headers: Headers, config: transformers.PretrainedConfig) -> ModelArchitecture:
    """The architecture that has mergekit merge every tensor of the base model's checkpoint."""
    axes, types = vocabulary_axes(base, headers, config), exempt_types(headers)
    weights = {
        name: WeightInfo(name=name, vocabulary_axis=axes.get(name), force_dtype=types.get(name))
        for name in (*base.pieces, *base.outside)
    }
    stacks: dict[str, dict[int, list[WeightInfo]]] = {}
    outside: list[WeightInfo] = []
    for name, piece in base.pieces.items():
        if layer := LAYER.search(piece.targets[0]):
            stacks.setdefault(layer.string[: layer.start()], {}).setdefault(int(layer[1]), []).append(weights[name])
        else:
            outside.append(weights[name])
    outside += [weights[name] for name in base.outside]
    layers = {prefix: [stack.get(index, []) for index in range(1 + max(stack))] for prefix, stack in stacks.items()}
    modules = {"default": StoredModule(outside, [])}
    modules |= {prefix: StoredModule([], stack) for prefix, stack in layers.items()}
    text = config.get_text_config()
    place = next((f"{name}." for name in config.sub_configs if getattr(config, name, None) is text), "")
    return ModelArchitecture(
        modules={name: ModuleDefinition(architecture=module) for name, module in modules.items()},
        architectures=list(config.architectures or ()),
        model_type=config.model_type,
        vocab_size_config_key=f"{place}vocab_size",
    )


def known_architecture(config: transformers.PretrainedConfig) -> ModelArchitecture | None:
    """mergekit's definition of a model's architecture; None if it has none, about which it logs a message."""
    log = logging.getLogger("mergekit.architecture")
    log.disabled = True
    try:
        return arch_info_for_config(config)
    finally:
        log.disabled = False


def vocabulary_axes(base: Layout, headers: Headers, config: transformers.PretrainedConfig) -> Mapping[str, int]:
    """The axis of the tokens in each stored tensor that has one: embeddings, output heads and their biases.

    A head for multi-token prediction may have its own embedding and output head, which transformers does not know:
    they have the shape of the model's.
    """
    if base.model is None:
        definition = known_architecture(config)
        weights = definition.all_weights(config) if definition else ()
        return {weight.name: weight.vocabulary_axis for weight in weights if weight.vocabulary_axis is not None}
    known = infer_vocabulary_axes(base.model)
    axes = {name: known[target] for name, piece in base.pieces.items() for target in piece.targets if target in known}
    shapes = {headers[name].shape for name in axes if name in headers and len(headers[name].shape) > 1}
    alike = [name for name in base.outside if name in headers and headers[name].shape in shapes]
    return axes | {name: 0 for name in alike if "embed" in name or "head" in name}


class AsTheBase(LazyTensorLoader):
    """mergekit's loader of an expert, which gives its tensors as the base model's checkpoint stores them.

    What the expert may lack, such as a head for multi-token prediction, is the base model's then.
    """

    def __init__(self, expert: LazyTensorLoader, base: LazyTensorLoader, layout: Layout) -> None:
        self._missing = {*layout.pieces, *layout.outside} - expert.index.tensor_paths.keys()
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
        return self._layout.restore(key, lambda target, mixture_expert: self._stored.read(target, load, mixture_expert))


def refuse_turned(base: Model, expert: Model) -> None:
    """Refuse an expert that stores a mixture's matrices turned, as versions of transformers differ in."""
    pairs = ((name, header.shape, expert.tensors.get(name, header).shape) for name, header in base.tensors.items())
    if turned := [name for name, one, other in pairs if len(one) > 2 and one != other == one[:-2] + one[:-3:-1]]:
        fix = "load both with transformers, save them, and name these copies"
        raise SltaError(f"{expert} stores {listed(turned)} turned, unlike {base}: {fix}.")


def adapt_loaders(layout: Layout, base: Model, *experts: Model) -> None:
    """Let mergekit find in each expert what the base model stores, as ``layout`` says; refuse a head that is lost."""
    wanted: Collection[str] = {*layout.pieces, *layout.outside}
    LoaderCache().get(base.reference)  # here, as mergekit would look the model up again after hours of work
    for expert in experts:
        loader = LoaderCache().get(expert.reference)
        known = loader.index.tensor_paths.keys()
        if expert.reference.lora:  # whose headers are those of its base model, until it is merged
            refuse_turned(base, expert)
        if not known <= wanted and (parted := expert.layout(layout.model).parted(layout, loader.get_tensor)):
            own, fix = " and ".join(parted), "save both models with 'tie_word_embeddings' false"
            raise SltaError(f"{own} differ in the expert {expert}, and are one tensor in the base model {base}: {fix}.")
        if not wanted <= known:
            LoaderCache.loaders[expert.reference] = AsTheBase(loader, LoaderCache().get(base.reference), layout)
