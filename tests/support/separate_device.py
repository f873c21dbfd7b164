"""A device of its own for machines without one: its tensors live on the CPU, but any mixture with the CPU's is refused.

As on Apple's GPUs, there is no float64. What runs here puts every tensor where it belongs on a GPU too. It says nothing
about a GPU's arithmetic or speed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import safetensors
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from mergekit_slta.models.checkpoint import ExpertStack

NAME = "separate"
_ATEN = torch.ops.aten
# A transfer takes tensors of both devices; an index may lie on the CPU, as it may for a GPU's tensor.
_MIXED = {_ATEN._to_copy.default, _ATEN.copy_.default}
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}


class _Module(_DummyBackendModule):
    """What torch asks of a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


# Before anything is differentiated, which is when torch counts the devices. Beside a GPU, torch would ask it for memory
# that the GPU copies from.
if not torch.cuda.is_available():
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
_DEVICE = torch.device(NAME if not torch.cuda.is_available() else "cpu", 0)


class SeparateTensor(torch.Tensor):
    """A tensor on the device, with its values in ``held``."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> SeparateTensor:
        if held.dtype == torch.float64:
            raise TypeError(f"the device '{NAME}' has no float64")
        place: Any = {"strides": held.stride(), "storage_offset": held.storage_offset(), "device": _DEVICE}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), dtype=held.dtype, **place)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()


class _Factories(TorchDispatchMode):
    """Makes tensors that are asked for on the device, which no argument of the call tells of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, ExpertStack) for leaf in tree_leaves((args, kwargs))):
            with self:  # torch leaves the mode meanwhile, but a stack copies its parts to the device
                return ExpertStack.__torch_dispatch__(func, types, args, kwargs)
        if any(isinstance(leaf, torch.device) and _is_ours(leaf) for leaf in args):
            with self:  # inside another handler, torch hands on what is made of other operations as it is
                return func.decompose(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def separate_device() -> Iterator[str]:
    """Within it, the device of the name that it yields can be used like any other."""
    as_subclass, safe_open = torch.Tensor.as_subclass, safetensors.safe_open

    def derive(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
        if not isinstance(tensor, SeparateTensor):
            return as_subclass(tensor, kind)
        return (SeparateTensor if kind is torch.Tensor else _derived(kind))(tensor.held)

    def open_on_the_cpu(file: Any, framework: str, device: str = "cpu") -> Any:
        return safe_open(file, framework, "cpu" if _is_ours(device) else device)

    with (
        mock.patch.object(torch.Tensor, "as_subclass", derive),
        mock.patch.object(safetensors, "safe_open", open_on_the_cpu),
        _Factories(),
    ):
        yield f"{NAME}:0"


@functools.cache
def _derived(kind: Any) -> Any:
    """A tensor class of the package whose instances lie on the device."""
    members = {"__new__": SeparateTensor.__new__, "__torch_dispatch__": SeparateTensor.__torch_dispatch__}
    return type(kind.__name__, (kind, SeparateTensor), members)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what is asked for of the device's tensors, and refuse what mixes them with the CPU's."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = {id(tensor.held): tensor for tensor in given if isinstance(tensor, SeparateTensor)}
    foreign = [tensor for tensor in given if not isinstance(tensor, SeparateTensor) and tensor.ndim]
    if func in _INDEXED and isinstance(args[0], SeparateTensor):
        foreign = [tensor for tensor in foreign if any(tensor is value for value in args[2:3])]
    if ours and foreign and func not in _MIXED:
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device")
    device = kwargs.get("device")
    args, kwargs = tree_map(lambda leaf: leaf.held if isinstance(leaf, SeparateTensor) else leaf, (args, kwargs))
    if _is_ours(device):
        kwargs["device"] = torch.device("cpu")
    result = func(*args, **kwargs)
    if func is _ATEN.copy_.default:
        return given[0]
    if not (_is_ours(device) if device is not None else ours):
        return result
    # What changes a tensor in place returns that very tensor.
    return tree_map(lambda leaf: _placed(leaf, ours), result)


def _placed(leaf: Any, ours: Mapping[int, SeparateTensor]) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, SeparateTensor):
        return leaf
    return ours[id(leaf)] if id(leaf) in ours else SeparateTensor(leaf)
