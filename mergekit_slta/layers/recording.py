"""Record the inputs and outputs of a layer's modules while the layer runs.

``watch`` wraps the ``forward`` of a layer's modules once. They then report to the current run, which may also replace a
module's output, or end at a module's call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mergekit_slta.layers.calls import State
from mergekit_slta.layers.residual import INPUT, ResidualStream, Term, plain, sources


class Reached(Exception):
    """Ends a run at the module that it was to reach; this is not a failure."""


@dataclass
class LayerRun:
    """The settings of a run of a layer, and its results; hidden states are [B, S, D].

    Attributes:
        mlp_reads: the sources of the residual stream where the MLP branch reads it; None to ignore this branch.
        given_to_mlp: [B, S, D], given to the MLP branch instead of the residual stream.
        replay: the outputs of modules that need not run again.
        capture, keep: the modules whose inputs, or outputs, are recorded; the children's outputs always are.
        copy: the modules whose outputs are copied for other modules, which change them in place.
        until: the module at whose call the run ends.

        output: the layer's output; None if the run ended before.
        terms: the summands of the output by the child that made them, without the input; None if the layer does not
            keep its residual stream as a sum.
        inputs: the arguments of the modules in ``capture`` and ``until``, in the order of the calls.
        outputs: the outputs of the layer's children and of the modules in ``keep``.
        reads: the sources of the residual stream that each child was given.
        mixers: the children that let tokens see each other.
        mlp_input: the residual stream that the MLP branch would have read.
        state: the tensors that the layer passes to later layers.
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
        """Record the layer's output and its summands."""
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
        """The modules in ``keep`` whose outputs other modules have changed in place."""
        return frozenset(name for name, version in self._versions.items() if self.outputs[name]._version != version)

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a module's arguments, and end the run if it is to end here."""
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
        if len(args) + len(kwargs) > 1:  # modules that get more than hidden states (positions, a mask) mix tokens
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
    """Let the modules of a layer report to the run that ``current()`` returns, if any.

    Dropout does not report: it may serve both branches, and it keeps the residual stream's sum.
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
