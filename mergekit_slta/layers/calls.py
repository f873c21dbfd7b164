"""How a model calls its decoder layers: the arguments of each layer, and what the layer returns.

A layer can run alone once the arguments of the model's call are known. To capture them, ``stand_ins`` replaces every
layer by a function while the model runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.errors import SltaError

Weights = Mapping[str, torch.Tensor]
# Tensors [B, ...] that layers have passed to later layers. Their keys are the argument's position or name; for an
# argument that is a dictionary also the key in it and, for a tuple of tensors, the index.
State = Mapping[tuple[Any, ...], torch.Tensor]


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a model's call of a layer, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> dict[Any, Any]:
        """All arguments, by position or name."""
        return dict(enumerate(self.args)) | self.kwargs

    def own(self, state: State) -> LayerCall:
        """The same call with copies of the dictionaries, to which ``state`` is added.

        Arguments that are None stay so: the first layer is given nothing of earlier layers.
        """
        arguments = self.arguments
        for argument, value in arguments.items():
            if isinstance(value, MutableMapping):
                arguments[argument] = copy.copy(value)
        for (argument, *rest), tensor in state.items():
            value = arguments[argument]
            if len(rest) == 2:  # the parts of a tuple, in their order
                value[rest[0]] = (*value.get(rest[0], ())[: rest[1]], tensor)
            elif rest:
                value[rest[0]] = tensor
            elif value is not None:
                arguments[argument] = tensor
        args = tuple(arguments.pop(position) for position in range(len(self.args)))
        return LayerCall(args, arguments)

    def entered(self, before: LayerCall) -> State:
        """The tensors that the layer has added to the dictionaries of this call, compared with the call ``before``.

        Raises:
            SltaError: an added value is neither a tensor nor a tuple of tensors.
        """
        found: dict[tuple[Any, ...], torch.Tensor] = {}
        earlier = before.arguments
        for argument, value in self.arguments.items():
            if not isinstance(value, MutableMapping):
                continue
            for key, entry in value.items():
                if earlier[argument].get(key) is entry:
                    continue
                parts = [((n,), part) for n, part in enumerate(entry)] if isinstance(entry, tuple) else [((), entry)]
                for rest, part in parts:
                    if not isinstance(part, torch.Tensor):
                        raise SltaError(
                            f"A layer passes a {type(part).__name__} to later layers in '{argument}', which cannot be "
                            "kept between layers, so no level applies: use 'merge_method: actmat'."
                        )
                    found[argument, key, *rest] = part
        return found


def handed_on(returned: Any, positions: Mapping[int | str, int]) -> State:
    """The parts of a layer's return value that the next layer is given, whose arguments ``positions`` are by."""
    return {(argument,): returned[position] for argument, position in positions.items()}


@dataclass(frozen=True)
class LayerForm:
    """How a model calls its layers, and what they return.

    Attributes:
        stacked: whether layers are given several hidden states per token as [n, B, S, D]; here they are [B, S, n, D]
            everywhere else.
        handed: by argument of a layer, the position in the return value of the layer before where it comes from.
        returned: for each layer, what the first layer of its type returns for two tokens.
        state: the tensors that layers pass to later layers beside the hidden states, for one sample of two tokens.
        causal: whether no token sees a later one.
    """

    stacked: bool = False
    handed: Mapping[int | str, int] = field(default_factory=dict)
    returned: Sequence[Any] = ()
    state: State = field(default_factory=dict)
    causal: bool = False


# Returns what a layer returns, given its index, its hidden states and its call.
LayerForward = Callable[[int, torch.Tensor, LayerCall], Any]


@contextlib.contextmanager
def stand_ins(layers: torch.nn.ModuleList, forward: LayerForward) -> Iterator[None]:
    """Replace every layer by ``forward``, which may run the layer itself."""

    def stand_in(index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        del layers[index].forward
        try:
            return forward(index, hidden, LayerCall(args[1:], kwargs))
        finally:
            layers[index].forward = functools.partial(stand_in, index)

    for index, layer in enumerate(layers):
        layer.forward = functools.partial(stand_in, index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class Made(torch.Tensor):
    """A tensor that a stand-in has returned, or that was computed from one."""


def hidden_of(returned: Any) -> Any:
    """The hidden states in a layer's return value, which may be a tuple with more values."""
    return returned[0] if isinstance(returned, (tuple, list)) else returned


def returned_like(returned: Any, hidden: torch.Tensor) -> Any:
    """A copy of a layer's return value with other hidden states, all of it marked as ``Made``."""
    made = hidden.as_subclass(Made)
    if not isinstance(returned, (tuple, list)):
        return made
    rest = tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(Made), returned[1:])
    return type(returned)([made, *rest])
