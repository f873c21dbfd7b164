"""The matrices of a mixture's experts as one tensor that needs no more than one expert's in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

_aten = torch.ops.aten


class ExpertStack(torch.Tensor):
    """A float32 tensor [E, ...] whose parts are read when they are used.

    ``stack[e]`` reads the matrix or the bias of one expert. transformers' eager code for mixtures, which calls one
    expert after the other, asks for nothing else. Any other operation gets all parts for as long as it takes, which is
    correct but needs their memory. Nothing can be written to a stack.

    ``part`` reads one expert's part [...] to the device, given its number.
    """

    part: Callable[[int], torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], device: torch.device | str, part: Callable[[int], torch.Tensor]
    ) -> ExpertStack:
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=torch.float32, device=torch.device(device)
        )
        made.part = part
        return made

    def whole(self) -> torch.Tensor:
        """All parts in memory."""
        whole = torch.empty(self.shape, device=self.device)
        for index in range(len(whole)):
            whole[index] = self.part(index)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.select.int and args[1] == 0:
            stack: ExpertStack = args[0]
            return stack.part(int(args[2]))
        if func is _aten.equal.default and args[0].shape == args[1].shape:
            return all(torch.equal(args[0][index], args[1][index]) for index in range(len(args[0])))
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise TypeError(f"{func} cannot change the experts of a mixture that are read when they are used.")
        args, kwargs = tree_map(lambda value: value.whole() if isinstance(value, cls) else value, (args, kwargs or {}))
        return func(*args, **kwargs)


def stack_of(host: torch.Tensor, device: torch.device) -> ExpertStack:
    """A stack whose parts are copied from a tensor [E, ...] on the host when they are used."""
    return ExpertStack(host.shape, device, lambda expert: host[expert].to(device))
