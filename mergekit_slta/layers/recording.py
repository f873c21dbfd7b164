"""Record the inputs and outputs of a layer's modules while the layer runs.

``watch`` wraps the ``forward`` of a layer's modules once. They then report to the run that is under way, which may also
replace a module's output, or end at a module's call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.layers.calls import State


class Reached(Exception):
    """Ends a run at the module that it was to reach; this is not a failure."""


@dataclass
class LayerRun:
    """The settings of a run of a layer, and its results; hidden states are [B, S, D].

    Attributes:
        replay: the outputs of modules that need not run again.
        capture, keep: the modules whose inputs, or outputs, are recorded; the children's outputs always are.
        until: the module at whose call the run ends.

        returned, output: what the layer returns, and its output in that; None if the run ended before.
        inputs: the arguments of the modules in ``capture`` and ``until``, in the order of the calls.
        outputs: the outputs of the layer's children and of the modules in ``keep``, in the order of the calls.
        repeated: the children and modules in ``capture`` that were called more than once; inputs are of the last call.
        opened: the children whose parts the layer has called by itself.
        state: the tensors that the layer passes to later layers.
    """

    replay: Mapping[str, Any] = field(default_factory=dict)
    capture: Collection[str] = ()
    keep: Collection[str] = ()
    until: str | None = None

    returned: Any = None
    output: Any = None
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    state: State = field(default_factory=dict)
    _running: str = ""

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, or replay what it returns, and record it."""
        child, _, inside = name.partition(".")
        if name in self.inputs or (name in self.outputs and not inside):
            self.repeated.add(name)
        if name in self.capture or name == self.until:
            self.inputs[name] = (*args, *kwargs.values())
        if name == self.until:
            raise Reached
        if inside and child != self._running:
            self.opened.add(child)
        if name in self.replay:
            output = self.replay[name]
        else:
            before, self._running = self._running, child
            output = forward(*args, **kwargs)
            self._running = before
        if inside and name not in self.keep:
            return output
        self.outputs[name] = output
        return tree_map_only(torch.Tensor, torch.clone, output)  # others may change what they are given in place


def watch(layers: Iterable[torch.nn.Module]) -> list[LayerRun]:
    """Let the modules of layers report to the last run in a list, which is empty unless a run is under way.

    Dropout does not report: it may serve both branches, and it keeps the residual stream's sum.
    """
    runs: list[LayerRun] = []
    for layer in layers:
        for name, module in layer.named_modules():
            is_child = "." not in name and not isinstance(module, torch.nn.Dropout)
            if name and (is_child or any(True for _ in module.parameters(recurse=False))):
                module.forward = functools.partial(_report, runs, name, module.forward)
    return runs


def _report(runs: list[LayerRun], name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return runs[-1].call(name, forward, args, kwargs) if runs else forward(*args, **kwargs)
