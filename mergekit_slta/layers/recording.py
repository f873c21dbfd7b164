"""Record the inputs and outputs of a layer's modules while the layer runs.

``Watch`` wraps the ``forward`` of a layer's modules once. They then report to the run that is under way, which may also
replace a module's output, or end at a module's call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mergekit_slta.layers.calls import State
from mergekit_slta.layers.children import children
from mergekit_slta.layers.residual import ResidualStream, Term, plain, sources

# Of the largest number: by how much a token's features differ where a module has seen another token.
MIXING_TOLERANCE = 1e-4


class Reached(Exception):
    """Ends a run at the module that it was to reach; this is not a failure."""


@dataclass
class LayerRun:
    """The settings of a run of a layer, and its results; hidden states are [B, S, D].

    Attributes:
        replay: the outputs of modules that need not run again.
        capture, keep: the modules whose inputs, or outputs, are recorded; the children's outputs always are.
        until: the module at whose call the run ends.
        unmix: find the children that let tokens see each other. The batch is two samples of two tokens, the second
            token the same in both: where a child's outputs for it differ, the child has seen the first token, and the
            outputs are made equal for the children after it.

        output: the layer's output; None if the run ended before.
        terms: the summands of the output by the child that made them; None if the layer does not keep its residual
            stream as a sum.
        sources: the children that the output was made from, and ``INPUT``.
        inputs: the arguments of the modules in ``capture`` and ``until``, in the order of the calls.
        outputs: the outputs of the layer's children and of the modules in ``keep``.
        reads: by child, the children that its arguments were made from, and ``INPUT``.
        repeated: the children and modules in ``capture`` that were called more than once; inputs are of the last call.
        opened: the children whose parts the layer has called by itself.
        mixers: the children that ``unmix`` has found.
        state: the tensors that the layer passes to later layers.
    """

    replay: Mapping[str, Any] = field(default_factory=dict)
    capture: Collection[str] = ()
    keep: Collection[str] = ()
    until: str | None = None
    unmix: bool = False

    output: Any = None
    terms: dict[str, torch.Tensor] | None = None
    sources: frozenset[str] = frozenset()
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    mixers: set[str] = field(default_factory=set)
    state: State = field(default_factory=dict)
    _running: str = ""

    def finish(self, output: torch.Tensor) -> None:
        """Record the layer's output and its summands."""
        self.output, self.sources = plain(output), sources(output)
        if isinstance(output, ResidualStream) and output.terms is not None:
            self.terms = {}
            for term in output.terms:
                known = self.terms.get(term.source)
                self.terms[term.source] = term.value if known is None else known + term.value

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a module's arguments, and end the run if it is to end here."""
        if name in self.inputs:
            self.repeated.add(name)
        if name in self.capture or name == self.until:
            self.inputs[name] = tuple(map(plain, (*args, *kwargs.values())))
        if name == self.until:
            raise Reached

    def run_inside(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, child: str
    ) -> Any:
        """Run a module below a child."""
        self.enter(name, args, kwargs)
        if child != self._running:
            self.opened.add(child)
        output = self.replay[name] if name in self.replay else forward(*args, **kwargs)
        if name in self.keep:  # other modules may change the output in place
            self.outputs[name] = tree_map_only(torch.Tensor, torch.clone, output)
        return output

    def run_child(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a child: it sees plain tensors, and what it returns enters the residual stream under its name."""
        self.enter(name, args, kwargs)
        streams = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, ResidualStream)]
        if name in self.reads:
            self.repeated.add(name)
        self.reads[name] = self.reads.get(name, frozenset()).union(*map(sources, streams))
        if name in self.replay:
            output = self.replay[name]
        else:
            self._running = name
            output = forward(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
            self._running = ""
        self.outputs[name] = self._unmixed(name, output) if self.unmix else output
        return _as_made_by(name, self.outputs[name])

    def _unmixed(self, name: str, output: Any) -> Any:
        value, *rest = output if isinstance(output, (tuple, list)) else [output]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return output
        value = value.clone()
        if value.shape[:2] == (2, 2):
            own, other = value[0, 1], value[1, 1]
        elif value.shape[:1] == (4,):
            own, other = value[1], value[3]
        else:
            return output
        size = float(torch.maximum(own.abs(), other.abs()).max())
        if float((own - other).abs().max()) <= MIXING_TOLERANCE * size:
            return output
        self.mixers.add(name)
        other.copy_(own)
        return type(output)([value, *rest]) if isinstance(output, (tuple, list)) else value


class Watch:
    """Lets the modules of layers report to the run that is under way; there is one at a time.

    Dropout does not report: it may serve both branches, and it keeps the residual stream's sum.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._run: LayerRun | None = None
        for layer in layers:
            seen: set[torch.nn.Module] = set()
            for path, child in children(layer).items():
                if not isinstance(child, torch.nn.Dropout):
                    self._report(path, child, LayerRun.run_child)
                for name, module in child.named_modules(seen, path):
                    if name != path and any(True for _ in module.parameters(recurse=False)):
                        self._report(name, module, functools.partial(LayerRun.run_inside, child=path))

    @contextlib.contextmanager
    def reporting_to(self, run: LayerRun) -> Iterator[None]:
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _report(self, name: str, module: torch.nn.Module, how: Callable[..., Any]) -> None:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            return forward(*args, **kwargs) if run is None else how(run, name, forward, args, kwargs)

        module.forward = watched


def _as_made_by(child: str, output: Any) -> Any:
    """A child's return value, its hidden states as its own summand and the rest as made from it."""
    if not isinstance(output, (tuple, list)):
        return _as_term(child, output)
    return type(output)(_made_from(child, part) if at else _as_term(child, part) for at, part in enumerate(output))


def _as_term(child: str, value: Any) -> Any:
    return ResidualStream.of(value, (Term(child, value),)) if isinstance(value, torch.Tensor) else value


def _made_from(child: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or (not value.is_floating_point() and value.dtype is not torch.int64):
        return value
    return ResidualStream.of(value, None, frozenset({child}))
