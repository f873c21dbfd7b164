"""A model's decoder: the knowledge of its layers, and the function that runs one of them with given weights.

The layers are transformers' own modules on the meta device. Nothing here knows an architecture by name. ``trace`` makes
a decoder: it runs the layers with made-up weights and keeps what that shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from mergekit_slta.layers.calls import LayerCall, LayerForm, Weights, handed_on, hidden_of
from mergekit_slta.layers.maps import Heads
from mergekit_slta.layers.recording import LayerRun, Reached
from mergekit_slta.models.skeleton import language_names

INPUT = "<input>"  # no child of a layer can be called that
Nodes = frozenset[str]


@dataclass(frozen=True)
class LayerStructure:
    """What a decoder layer makes of what its children return, and how it splits into two branches.

    Attributes:
        reads: by child, in the order of the calls, the children whose outputs its arguments are made from, and
            ``INPUT``.
        summands: the children whose outputs the layer's output is the sum of, and ``INPUT``, each with the constant
            that it is multiplied by if ``INPUT`` is by 1; None where it is no such sum.
        branches: the direct children of the layer in each branch, ``attn`` (attention, or other token mixing) and
            ``mlp``, norms included; a child, or a tensor of the layer's own, that feeds both branches is in both. A
            layer that only mixes tokens, or never mixes them, has one branch; there is none where the branches cannot
            be told apart.
        mixers: the children in the attention branch that let tokens see each other.
        boundary: the child whose output is all that the MLP branch reads, where the attention branch ends with a norm
            of the residual stream; None where its contribution is added to the stream.
        heads: the heads of the attention, or why there are none to be told apart.
        of_some_tokens: a linear map that is given rows of which nobody knows the samples; "" without one.
    """

    reads: Mapping[str, Nodes] = field(default_factory=dict)
    summands: Mapping[str, float] | None = None
    branches: Mapping[str, Nodes] = field(default_factory=dict)
    mixers: Nodes = frozenset()
    boundary: str | None = None
    heads: Heads | str = "its branches cannot be told apart"
    of_some_tokens: str = ""

    def others_of(self, branch: str, base: LayerRun) -> dict[str, Any]:
        """The outputs to replay, so that only one branch differs from the base model, whose run is ``base``."""
        others = frozenset().union(*self.branches.values()) - self.branches[branch]
        return {name: base.outputs[name] for name in others if name in base.outputs}

    def change(self, branch: str, run: LayerRun, base: LayerRun) -> torch.Tensor:
        """How a run's residual stream differs from the base model's where a branch, or the layer, ends."""
        ends = {self.boundary: 1.0} if self.boundary is not None and branch == "attn" else self.summands
        if ends is None:
            return run.output - base.output
        change = torch.zeros_like(base.output)
        for name, factor in ends.items():  # one by one: what is the same in both cancels exactly
            if name in run.outputs and run.outputs[name] is not base.outputs[name]:
                part = hidden_of(run.outputs[name]) - hidden_of(base.outputs[name])
                change.add_(part.reshape(change.shape), alpha=factor)
        return change


def fresh(model: torch.nn.Module) -> Callable[[], None]:
    """A function that undoes what calls replace in modules that own buffers outside the model's checkpoint.

    Rotary embeddings whose frequencies depend on the length keep those of the last call in buffers and attributes, so
    that a sample would see the length of the one before it. No model of transformers writes into such a buffer.
    """
    owners = [vars(module) for module in model.modules() if module._non_persistent_buffers_set]
    built = [(own, dict(own), dict(own["_buffers"])) for own in owners]

    def restore() -> None:
        for own, attributes, buffers in built:
            own.clear()
            own.update(attributes)
            own["_buffers"].update(buffers)

    return restore


@dataclass(frozen=True, eq=False)
class Decoder:
    """The decoder of one architecture, without weights.

    Attributes:
        model: the whole model on the meta device.
        tower: the language tower of a multimodal model, or the whole of another one.
        body: the part of the model that turns token ids into the first layer's input and contains the layers: the model
            without its output head, or the language tower where that cannot run without images.
        layers: the decoder layers.
        device: where layers run.
        trust_remote_code: mergekit's flag of that name.
        restore: puts the model into the state in which it was built.
        runs: the layers' modules report to the last run in it.
        form: how the model calls its layers.
        structures: for each layer how it splits into branches.
        tail_problem: why the logits cannot be computed from the last layer's output alone, if they cannot.
    """

    model: transformers.PreTrainedModel
    tower: torch.nn.Module
    body: torch.nn.Module
    layers: torch.nn.ModuleList
    device: torch.device
    trust_remote_code: bool
    restore: Callable[[], None]
    runs: list[LayerRun]
    form: LayerForm = field(default_factory=LayerForm)
    structures: Sequence[LayerStructure] = ()
    tail_problem: str | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def run(self, layer: int, weights: Weights, hidden: torch.Tensor, call: LayerCall, **settings: Any) -> LayerRun:
        """Run a layer on hidden states [B, S, D] as the model does, to its end or until it calls a module.

        ``weights`` are by the tensors' names inside the layer, ``settings`` those of ``LayerRun``.
        """
        run, own = LayerRun(**settings), call.own({})
        self.restore()
        arguments = self.as_called(hidden).clone(), *own.args  # the layer may change its input in place
        self.runs.append(run)
        try:
            returned = torch.func.functional_call(self.layers[layer], dict(weights), arguments, own.kwargs)
            run.returned, run.output = returned, self.tokens_first(hidden_of(returned))
            run.state = handed_on(returned, self.form.handed)
        except Reached:
            pass
        finally:
            self.runs.pop()
        run.state = {**own.entered(call), **run.state}
        return run

    def tokens_first(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states as [B, S, ...], from what the model's own code gives to its layers."""
        return hidden.movedim(0, 2) if self.form.stacked else hidden

    def as_called(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, ...] as the model's own code gives them to its layers."""
        return hidden.movedim(2, 0) if self.form.stacked else hidden

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @functools.cached_property
    def layers_path(self) -> str:
        """The layers' path in the model."""
        return self.path(self.layers)

    @functools.cached_property
    def body_path(self) -> str:
        """The beginning of the names of the body's tensors in the model."""
        path = self.path(self.body)
        return f"{path}." if path else ""

    def path(self, part: torch.nn.Module) -> str:
        """The path in the model of a part of it."""
        return next(name for name, module in self.model.named_modules() if module is part)

    @functools.cached_property
    def tensor_names(self) -> frozenset[str]:
        """The model's names of all its tensors."""
        return frozenset(self.model.state_dict())

    def layer_tensors(self, layer: int) -> dict[str, str]:
        """The names of a layer's tensors inside the layer, and in the model: one that layers share has the first's."""
        names = {name: f"{self.layers_path}.{layer}.{name}" for name in self.layers[layer].state_dict()}
        return {name: self.first_names.get(full, full) for name, full in names.items()}

    @functools.cached_property
    def first_names(self) -> dict[str, str]:
        """By the model's names of its parameters, the first name of each, under which checkpoints have tied ones."""
        first: dict[torch.Tensor, str] = {}
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(parameter, name) for name, parameter in named}

    @functools.cached_property
    def shared_tensors(self) -> frozenset[str]:
        """The first names of the parameters that several layers, or other parts of the model, share."""
        return frozenset(first for name, first in self.first_names.items() if name != first)

    @functools.cached_property
    def language_tensors(self) -> frozenset[str]:
        """The model's names of the tensors of its language tower and its output head, tied ones by all their names."""
        return language_names(self.model)

    @functools.cached_property
    def edge_tensors(self) -> tuple[str, ...]:
        """The model's names of the language tensors outside the decoder layers (embeddings, final norm, output head).

        Tied tensors are named once.
        """
        outside = [name for name in self.model.state_dict() if not name.startswith(self.layers_path + ".")]
        outside = [name for name in outside if self.first_names.get(name, name) == name]
        return tuple(name for name in outside if name in self.language_tensors)

    def one_of_each_kind(self) -> list[int]:
        """The first layer of each kind."""
        return sorted(set(self.first_of_kind))

    @functools.cached_property
    def first_of_kind(self) -> list[int]:
        """For each layer, the first layer with the same modules and shapes, which behaves alike.

        A layer that shares modules with others is like no other: it may call those of their parts that are for its
        number.
        """
        kinds = []
        for number, layer in enumerate(self.layers):
            shared = self.shared_tensors.intersection(self.layer_tensors(number).values())
            modules = tuple((name, type(module)) for name, module in layer.named_modules())
            shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
            kinds.append((modules, shapes, number if shared else None))
        return [kinds.index(kind) for kind in kinds]
