"""A hidden state that remembers which modules it was made from, and which of them it is the sum of.

A decoder layer adds its branches to the residual stream inside its own ``forward``, each architecture in its own way
and order. Running that ``forward`` on a ``ResidualStream`` yields every branch's contribution before the addition, so
no architecture has to be described, and no contribution is recovered by subtracting large numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

INPUT = "<input>"  # no child of a layer can be called that


@dataclass(frozen=True)
class Term:
    """One summand of the residual stream: the direct child of the layer that produced it, and its value."""

    source: str
    value: torch.Tensor


class ResidualStream(torch.Tensor):
    """A tensor that knows where it comes from.

    Attributes:
        terms: its summands; None where it is computed from its sources in another way than as a sum.
        sources: the direct children of the layer that it was made from, and ``INPUT``.
    """

    terms: tuple[Term, ...] | None
    sources: frozenset[str]

    @staticmethod
    def of(
        value: torch.Tensor, terms: tuple[Term, ...] | None, sources: frozenset[str] = frozenset()
    ) -> ResidualStream:
        stream = value.as_subclass(ResidualStream)
        stream.terms = terms
        stream.sources = sources if terms is None else frozenset(term.source for term in terms)
        return stream

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        in_place = func.__name__ in _IN_PLACE
        # A branch's own value must not change under the stream that refers to it.
        func = getattr(torch.Tensor, _IN_PLACE[func.__name__]) if in_place else func
        streams = list(_streams((*args, *kwargs.values())))
        terms = _terms_after(func, args, kwargs)
        made_from = frozenset().union(*(stream.sources for stream in streams))
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.__setitem__ and isinstance(args[0], ResidualStream):
                changed = plain(args[0]).clone()
                changed[args[1]] = args[2]
                _replace(args[0], changed, None, made_from)
                return None
            result = _each(func(*args, **kwargs), plain)
            if in_place and isinstance(args[0], ResidualStream):
                return _replace(args[0], result, terms, made_from)
            return _each(result, lambda tensor: ResidualStream.of(tensor, terms, made_from)) if streams else result


def plain(value: Any) -> Any:
    """The value as a plain tensor, without its terms."""
    if isinstance(value, ResidualStream):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    return value


def sources(value: Any) -> frozenset[str]:
    """The children that a value was made from, and ``INPUT``; empty for anything that is no residual stream."""
    return value.sources if isinstance(value, ResidualStream) else frozenset()


def _replace(
    stream: ResidualStream, value: torch.Tensor, terms: tuple[Term, ...] | None, made_from: frozenset[str]
) -> ResidualStream:
    """Give a stream that is changed in place another value, without writing to the memory of the former."""
    stream.data = value
    stream.terms = terms
    stream.sources = made_from if terms is None else frozenset(term.source for term in terms)
    return stream


def _streams(values: Sequence[Any]) -> Iterator[ResidualStream]:
    for value in values:
        if isinstance(value, ResidualStream):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _streams(value)


def _each(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor, or the tensors of a tuple or list, changed; anything else as it is."""
    if isinstance(result, torch.Tensor):
        return change(result)
    if type(result) in (tuple, list):
        return type(result)(change(part) if isinstance(part, torch.Tensor) else part for part in result)
    return result


# torch's functions are told by their names: most exist as a function, a method and an operator.
_ADD = {"add", "__add__", "__radd__"}
_MULTIPLY = {"mul", "multiply", "__mul__", "__rmul__"}
_DIVIDE = {"div", "__truediv__"}
_IN_PLACE = {form: name for name in ("add", "sub", "mul", "div") for form in (f"{name}_", f"__i{name}__")}
# A function that moves a tensor's elements, or changes their type, does the same to each summand.
_MOVE = {
    *("__getitem__", "clone", "contiguous", "double", "expand", "flatten", "float", "permute", "reshape", "squeeze"),
    *("to", "transpose", "type_as", "unflatten", "unsqueeze", "view"),
}


def _terms_after(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Term, ...] | None:
    """The summands of what ``func`` returns, or None where it is no longer a sum of them."""
    name = func.__name__
    if name in _ADD and not kwargs:
        return _sum(args)
    if func is torch.nn.functional.dropout:
        return None if _training(*args, **kwargs) else args[0].terms
    if not args or (kwargs and name in _MULTIPLY | _DIVIDE):
        return None
    stream, *others = args
    if name in _MULTIPLY and not isinstance(stream, ResidualStream):
        others, stream = [stream, *others[1:]], others[0]
    if not isinstance(stream, ResidualStream) or stream.terms is None or list(_streams((others, *kwargs.values()))):
        return None
    if name in _MULTIPLY | _DIVIDE:
        change = torch.div if name in _DIVIDE else torch.mul
        return tuple(Term(term.source, change(term.value, *others)) for term in stream.terms)
    if name in _MOVE and all(term.value.shape == stream.shape for term in stream.terms):
        return tuple(Term(term.source, func(term.value, *others, **kwargs)) for term in stream.terms)
    return None


def _sum(addends: tuple[Any, ...]) -> tuple[Term, ...] | None:
    """The summands of the sum of two tensors, if both are sums."""
    terms: tuple[Term, ...] = ()
    for part in addends:
        if not isinstance(part, ResidualStream) or part.terms is None:
            return None
        terms += part.terms
    shape = torch.broadcast_shapes(*(term.value.shape for term in terms))
    return tuple(Term(term.source, term.value.expand(shape)) for term in terms)


def _training(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """The value of dropout's argument ``training``, by position or by name."""
    return training
