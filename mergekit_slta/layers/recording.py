"""What the modules of a layer are given and return while the layer runs.

``watch`` wraps the forward of a layer's modules once. They then report to the run that is going on, which may also
replace what a module returns, or end where a module is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mergekit_slta.layers.calls import State
from mergekit_slta.layers.residual import INPUT, ResidualStream, Term, plain, sources


class Reached(Exception):
    """A run has come as far as it was to go; unlike other exceptions no failure."""


@dataclass
class LayerRun:
    """What is asked of a run of a layer, and what it gave; hidden states are [B, S, D].

    Attributes:
        mlp_reads: what the residual stream holds where the MLP branch reads it; without it nobody looks there.
        given_to_mlp: [B, S, D], given to the MLP branch in place of the residual stream.
        replay: the outputs of modules that need not run again.
        capture, keep: the modules whose inputs, or outputs, are wanted; outputs of the layer's children always are.
        copy: the modules whose outputs others change in place, so that these get a copy.
        until: the module at whose call the run ends.

        output: the layer's output; None where the run ended before.
        terms: the summands of the output by the child that made them, without the input; None where the layer does
            not keep its residual stream as a sum.
        inputs: by module, what those in ``capture`` and ``until`` were called with, in the order of the calls.
        outputs: by module, what the layer's children and those in ``keep`` returned.
        reads: the sources of the residual stream that each child was given.
        mixers: the children that let tokens see each other.
        mlp_input: the residual stream that the MLP branch would have read.
        state: what the layer hands to later layers, as far as it ran.
    """

    mlp_reads: frozenset[str] | None = None
    given_to_mlp: torch.Tensor | None = None
    replay: Mapping[str, Any] = field(default_factory=dict)
    capture: Collection[str] = ()
    keep: Collection[str] = ()
    copy: Collection[str] = ()
    until: str | None = None

    output: Any = None
    terms: dict[str, torch.Tensor] | None = None
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    mixers: set[str] = field(default_factory=set)
    mlp_input: torch.Tensor | None = None
    state: State = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)

    def finish(self, output: torch.Tensor) -> None:
        """Note the layer's output, and what it is the sum of."""
        self.output = plain(output)
        if INPUT in sources(output):
            self.terms = {}
            for term in output.terms:  # type: ignore[attr-defined]
                if term.source in self.terms:
                    self.terms[term.source] = self.terms[term.source] + term.value
                elif term.source != INPUT:
                    self.terms[term.source] = term.value

    @property
    def changed(self) -> frozenset[str]:
        """The modules in ``keep`` whose outputs others have changed in place."""
        return frozenset(name for name, version in self._versions.items() if self.outputs[name]._version != version)

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a module is called with, and go no further if that was all that is wanted."""
        if name in self.capture or name == self.until:
            self.inputs[name] = tuple(map(plain, (*args, *kwargs.values())))
        if name == self.until:
            raise Reached

    def run_inside(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module below a child."""
        self.enter(name, args, kwargs)
        output = self.replay[name] if name in self.replay else forward(*args, **kwargs)
        if name in self.keep:
            self.outputs[name] = output
            if isinstance(output, torch.Tensor):
                self._versions[name] = output._version
        return output.clone() if name in self.copy else output

    def run_child(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a child: it sees plain tensors, and what it returns enters the residual stream under its name."""
        self.enter(name, args, kwargs)
        streams = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, ResidualStream)]
        read = self.reads[name] = frozenset().union(*map(sources, streams))
        if len(args) + len(kwargs) > 1:  # what is told more than the hidden states (positions, a mask) mixes tokens
            self.mixers.add(name)
        if read == self.mlp_reads and INPUT in read:
            self.mlp_input = plain(streams[0])
            given = self.given_to_mlp
            if given is not None:
                args = tuple(given if isinstance(arg, ResidualStream) else arg for arg in args)
                kwargs = {key: given if isinstance(value, ResidualStream) else value for key, value in kwargs.items()}
        if name in self.replay:
            output = self.replay[name]
        else:
            output = forward(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
        self.outputs[name] = output
        if isinstance(output, (tuple, list)):
            return type(output)([_as_stream(name, output[0]), *output[1:]])
        return _as_stream(name, output)


def watch(layer: torch.nn.Module, current: Callable[[], LayerRun | None]) -> None:
    """Let the modules of a layer report to ``current()``, where there is one.

    Dropout is left alone: it may serve both branches, and lets the residual stream's sum pass.
    """

    def report(name: str, module: torch.nn.Module, how: Callable[..., Any]) -> None:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            run = current()
            return forward(*args, **kwargs) if run is None else how(run, name, forward, args, kwargs)

        module.forward = watched

    for name, child in layer.named_children():
        if not isinstance(child, torch.nn.Dropout):
            report(name, child, LayerRun.run_child)
    for name, module in layer.named_modules():
        if "." in name and any(True for _ in module.parameters(recurse=False)):
            report(name, module, LayerRun.run_inside)


def _as_stream(name: str, value: Any) -> Any:
    return ResidualStream.of(value, (Term(name, value),)) if isinstance(value, torch.Tensor) else value
