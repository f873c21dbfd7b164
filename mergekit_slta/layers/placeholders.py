"""Made-up weights, for runs that show how a model works before any checkpoint is read.

They take no memory that grows with the model, and neither do the products with them, which would otherwise copy whole
matrices: a layer of a large mixture is more than the memory of many machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mergekit_slta.layers.calls import Weights

# The number of different values in a random tensor; it has no small divisors.
RANDOM_NUMBERS = 1_000_003
# The most elements of a made-up tensor that are copied at once.
PART = 2**22
# Tensors up to this many elements are copied whole.
SMALL = 2**16

_aten = torch.ops.aten


def zeros(state: Weights, device: torch.device) -> Weights:
    """Replace tensors by zeros: a single one, expanded."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        if tensor.numel() <= SMALL:
            return torch.zeros(tensor.shape, dtype=dtype, device=device)
        return torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)

    return {name: one(tensor) for name, tensor in state.items()}


def random_numbers(state: Weights, device: torch.device, seed: int = 0) -> Weights:
    """Replace tensors by random numbers; in large ones, all rows overlap in memory."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        columns = tensor.shape[-1] if tensor.ndim > 1 else 1
        strides = [1 + 15 * (tensor.ndim - 1 - dimension) for dimension in range(tensor.ndim)]
        if tensor.numel() <= SMALL:
            strides = list(torch.empty(tensor.shape, device="meta").stride())
        size = 1 + sum(stride * (length - 1) for stride, length in zip(strides, tensor.shape, strict=True))
        found = torch.randn(min(size, RANDOM_NUMBERS), generator=generator)
        found = found / columns**0.5 if tensor.ndim > 1 else 1 + found / 10
        found = found.repeat(-(-size // len(found))).to(device)
        return found.as_strided(tensor.shape, strides)

    return {name: numbers(tensor) for name, tensor in state.items()}


def _spanned(value: torch.Tensor) -> int:
    """How many elements lie in memory from a tensor's first to its last."""
    return 1 + sum(stride * (size - 1) for size, stride in zip(value.shape, value.stride(), strict=True))


def _is_made_up(value: Any) -> bool:
    """Whether a tensor has many more elements than its memory."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() <= SMALL:
        return False
    return _spanned(value) * 4 < value.numel()


class SmallProducts(TorchDispatchMode):
    """Computes products with made-up weights a part at a time while its block runs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        compute = _COMPUTED.get(func.overloadpacket)
        if compute is not None and any(map(_is_made_up, args)):
            return compute(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _matrix_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[..., n, k] times [..., k, m], one of them made up, in parts of the larger of n and m."""
    if left.ndim == 3:
        return torch.stack([_matrix_product(*pair) for pair in zip(left, right, strict=True)])
    (rows, inner), columns = left.shape, right.shape[1]
    product = left.new_empty(rows, columns)
    step = max(1, PART // inner)
    part = left.new_empty(step * inner)  # one place for all copies, since many would break the memory into pieces
    for start in range(0, max(rows, columns), step):
        stop = start + step
        if columns >= rows:
            product[:, start:stop] = left @ _copied(right[:, start:stop], part)
        else:
            product[start:stop] = _copied(left[start:stop], part) @ right
    return product


def _copied(value: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return place[: value.numel()].view(value.shape).copy_(value)


def _added_product(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return beta * added + alpha * _matrix_product(left, right)


def _same(value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A made-up tensor in place of a copy of it, of another type if so asked."""
    dtype = kwargs.get("dtype") or value.dtype
    if dtype == value.dtype:
        return value.view(value.shape)
    whole = value.as_strided((_spanned(value),), (1,)).to(dtype)
    return whole.as_strided(value.shape, value.stride())


_COMPUTED: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.mm: _matrix_product,
    _aten.bmm: _matrix_product,
    _aten.addmm: _added_product,
    _aten.baddbmm: _added_product,
    _aten.clone: _same,
    _aten._to_copy: _same,
}
