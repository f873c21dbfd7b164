"""A hidden state that remembers whose outputs it is the sum of.

A decoder layer adds its branches to the residual stream inside its own ``forward``, each architecture in its own way
and order. Running that ``forward`` on a ``ResidualStream`` yields every branch's contribution before the addition, so
no architecture has to be described, and no contribution is recovered by subtracting large numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

INPUT = "input"


@dataclass(frozen=True)
class Term:
    """One summand of the residual stream: the direct child of the layer that produced it, and its value."""

    source: str
    value: torch.Tensor


class ResidualStream(torch.Tensor):
    """A tensor whose value is the sum of ``terms``; operations other than adding and scaling give plain tensors."""

    terms: tuple[Term, ...]

    @staticmethod
    def of(value: torch.Tensor, terms: tuple[Term, ...]) -> ResidualStream:
        stream = value.as_subclass(ResidualStream)
        stream.terms = terms
        return stream

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        terms = _terms_after(func, args, kwargs)
        if func in _IN_PLACE:  # a branch's own value must not change under the stream that refers to it
            func = _IN_PLACE[func]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, ResidualStream):
                result = result.as_subclass(torch.Tensor)
            return result if terms is None else ResidualStream.of(result, terms)


def plain(value: Any) -> Any:
    """The value as a plain tensor, without its terms."""
    if isinstance(value, ResidualStream):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    return value


def sources(value: Any) -> frozenset[str]:
    """The modules whose outputs ``value`` is the sum of; empty for plain tensors and other values."""
    return frozenset(term.source for term in value.terms) if isinstance(value, ResidualStream) else frozenset()


_IN_PLACE = {torch.Tensor.add_: torch.Tensor.add, torch.Tensor.__iadd__: torch.Tensor.add}
_ADD = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, *_IN_PLACE}
_MULTIPLY = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__}
_IDENTITY = {torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.float}


def _terms_after(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Term, ...] | None:
    """The summands of the result of ``func``; None if the result is not a sum."""
    if func in _ADD and not kwargs and all(isinstance(arg, ResidualStream) for arg in args):
        return args[0].terms + args[1].terms
    if func in _MULTIPLY and any(isinstance(arg, (int, float)) for arg in args):
        stream, factor = args if isinstance(args[0], ResidualStream) else args[::-1]
        return tuple(Term(term.source, term.value * factor) for term in stream.terms)
    if func in _IDENTITY or (func is torch.nn.functional.dropout and not _training(*args, **kwargs)):
        return args[0].terms
    return None


def _training(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """The value of dropout's argument ``training``, by position or by name."""
    return training
