"""The weights of one model, or of a weighted sum of several, read a layer at a time.

Stored weights come through mergekit's loader, a mixture's experts one by one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from mergekit.io.tasks import LoaderCache
from torch.utils._pytree import tree_map

from mergekit_slta.errors import SltaError, reading
from mergekit_slta.models.adapters import merge_adapter
from mergekit_slta.models.fingerprint import fingerprint_of, source_files, stamps
from mergekit_slta.models.headers import Model, folder_headers, source_folders
from mergekit_slta.models.layout import Layout

_aten = torch.ops.aten
Tensors = Mapping[str, torch.Tensor]


class Checkpoint:
    """A model that a recipe names; when this is made, mergekit downloads it, and ``merge_adapter`` merges its LoRA.

    It has a loader of its own: the one that mergekit has from merge to merge may still map a file that was replaced.
    """

    def __init__(self, model: Model) -> None:
        cache, reference = LoaderCache(), model.reference
        self.reference, self.config = reference, model.config
        self.folders = source_folders(reference, cache.hf_cache_dir)  # of the model and of its adapter
        with reading(self, "cannot be opened", "get undamaged copies of its files"):
            self._files = source_files(*self.folders)
            self.stamps = stamps(self._files)  # of the files that decide the tensors
            how = cache.lora_cache_dir, model.trust_remote_code, cache.lora_merge_dtype
            merged = merge_adapter(reference, *how) if reference.lora else reference
            self._loader = merged.lazy_loader(cache_dir=cache.hf_cache_dir, lazy_unpickle=cache.lazy_unpickle)
        self.folder = self._loader.index.base_path  # of the files, the LoRA merged
        # With the headers of these files; on the Hub, nobody has compared them with the index.
        changed = reference.lora or model.folder is None
        self.model = replace(model, tensors=folder_headers(Path(self.folder))) if changed else model

    def __str__(self) -> str:
        return str(self.reference)

    @cached_property
    def dtype(self) -> str:
        """The checkpoint's dtype, from its configuration or else from its first tensor."""
        if self.model.dtype:
            return self.model.dtype
        return str(self._loader.get_tensor(next(iter(self.model.tensors))).dtype).removeprefix("torch.")

    def read(
        self,
        names: Mapping[str, str],  # the key to return each tensor under, and the model's name of it
        model: transformers.PreTrainedModel,  # on the meta device
        device: torch.device | str = "cpu",  # where the tensors go
        stacks: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read tensors as float32 (integer ones as they are).

        ``stacks`` are, by key, the shapes [E, ...] of tensors that hold a mixture's experts, if each expert's part is
        to be read again whenever it is used: they become ``ExpertStack`` objects.
        """
        tensors, layout = dict[str, torch.Tensor](), self.model.layout(model)
        for key, name in names.items():
            if name not in layout:
                raise SltaError(f"{self} lacks the tensor {name}: it is incomplete or of another architecture.")
            shape = (stacks or {}).get(key)
            if shape and layout.in_parts(name):
                tensors[key] = self._stack(name, layout, shape, device)
                continue
            with reading(f"The tensor {name} of {self}"):
                tensors[key] = layout.read(name, lambda stored: self._loader.get_tensor(stored).to(device))
            if tensors[key].is_floating_point():
                self._refuse_broken(name, tensors[key])
                tensors[key] = tensors[key].float()
        self._loader.flush()
        self.refuse_changes()
        return tensors

    def refuse_changes(self) -> None:
        """Refuse, by an SltaError, files that have changed since the checkpoint was opened."""
        if stamps(self._files) != self.stamps:
            raise SltaError(f"The files of {self} have changed while they were read: run the command again.")

    def _stack(self, name: str, layout: Layout, shape: Sequence[int], device: torch.device | str) -> ExpertStack:
        """A mixture's experts: each is read again after another one was used, and checked when it is used first.

        On the CPU the stored tensors are mapped from the file.
        """
        checked, last = set[int](), dict[int, torch.Tensor]()  # one is asked for several times before the next

        def part(mixture_expert: int) -> torch.Tensor:
            if mixture_expert not in last:
                last.clear()
                with reading(f"The tensor {name} of {self}"):
                    tensor = layout.read(name, self._loader.get_tensor, mixture_expert)
                if mixture_expert not in checked:
                    self._refuse_broken(name, tensor)
                    checked.add(mixture_expert)
                last[mixture_expert] = tensor.to(device).float()
            return last[mixture_expert].detach()  # torch ties what it gets here to the stack, for as long as that lives

        return ExpertStack(shape, device, part)

    def _refuse_broken(self, name: str, tensor: torch.Tensor) -> None:
        if not is_finite(tensor):
            raise SltaError(f"{self} holds NaN or Inf in the tensor {name}: it is broken, get an undamaged copy.")

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the model by its content, before an adapter is merged into it."""
        fingerprint = fingerprint_of(*self.folders)
        self.refuse_changes()
        return fingerprint


def is_finite(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether a tensor's values are finite, also in another data type; its smallest and its largest value show it."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # torch computes little in 8 bits
    return bool(torch.stack(tensor.aminmax()).to(dtype or tensor.dtype).cpu().double().isfinite().all())


class ExpertStack(torch.Tensor):
    """A float32 tensor [E, ...] whose parts are read when they are used.

    ``stack[e]`` reads the matrix or the bias of one expert. transformers' eager code for mixtures, which calls one
    expert after the other, asks for nothing else. ``torch.equal`` goes part by part. Any other operation gets all parts
    for as long as it takes, which is correct but needs their memory. Nothing can be written to a stack.

    ``part`` reads one expert's part [...] to the device, given its number.
    """

    part: Callable[[int], torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, shape: Sequence[int], device: torch.device | str, part: Callable[[int], torch.Tensor]) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=torch.device(device))
        made.part = part
        return made

    def whole(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=torch.float32, device=self.device)
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
    return ExpertStack(host.shape, device, lambda mixture_expert: host[mixture_expert].to(device))


def empty_file(stack: ExpertStack, folder: Path) -> torch.Tensor:
    """Room for a stack's numbers, zeros, in a mapped temporary file of a folder, which is freed with the tensor."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(nbytes := stack.numel() * stack.dtype.itemsize)
        if hasattr(os, "posix_fallocate"):  # or a full disk would kill this process when it writes
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.from_file(file.name, shared=True, size=stack.numel(), dtype=stack.dtype).view(stack.shape)


# theta_0 + sum_t alpha_t tau_t: tensors of the base model plus weighted task vectors tau_t = theta_t - theta_0


def task_vector(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """τ_t; zero where the expert has the base model's matrix, rounded to 16 bits: nobody has trained it."""
    if base.ndim > 2:  # as of a mixture's experts
        return torch.stack([task_vector(*pair) for pair in zip(tensor, base, strict=True)])
    # Some rows at a time: nearly always the first ones differ, and all of them would take as much memory again.
    pairs = [*zip(*(torch.atleast_1d(whole).split(1024) for whole in (tensor, base)), strict=True)]
    is_rounded = any(
        all(torch.equal(rows, of_base.to(half).to(rows)) and is_finite(rows) for rows, of_base in pairs)
        for half in (torch.float16, torch.bfloat16)
    )
    return torch.zeros_like(base) if is_rounded else tensor - base


def weighted_sum(base: torch.Tensor, experts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The base tensor plus the weighted task vectors, as (1 - sum alpha) theta_0 + sum alpha theta_t.

    That needs no memory for task vectors, and a tensor that no expert changed stays equal to the last bit. It is
    computed in at least float32. An expert's weights are one number, or a tensor that broadcasts to its own.
    """
    experts = [(tensor, weight) for tensor, weight in experts if weight.any() and not torch.equal(tensor, base)]
    dtype = torch.promote_types(base.dtype, torch.float32)
    if not experts:
        return base
    weights = [weight.to(base.device, dtype) for _, weight in experts]
    result = base.to(dtype) * (1 - torch.stack(weights).sum(0))
    for (tensor, _), weight in zip(experts, weights, strict=True):
        result.addcmul_(tensor, weight)
    return result.to(base.dtype)


def blend(base: Tensors, experts: Sequence[Tensors], alpha: torch.Tensor) -> dict[str, torch.Tensor]:
    """The ``weighted_sum`` of floating-point tensors, one weight for each expert [T]; others stay the base model's."""
    blended = dict(base)
    for name, tensor in base.items():
        if tensor.is_floating_point():
            pairs = list(zip((expert[name] for expert in experts), alpha, strict=True))
            if isinstance(tensor, ExpertStack):
                blended[name] = ExpertStack(tensor.shape, tensor.device, partial(_part, tensor, pairs))
            else:
                blended[name] = weighted_sum(tensor, pairs)
    return blended


def _part(base: ExpertStack, experts: Sequence[tuple[torch.Tensor, torch.Tensor]], mixture_expert: int) -> torch.Tensor:
    """The ``weighted_sum`` of one routed expert's matrices, from the stacks of all."""
    return weighted_sum(base[mixture_expert], [(stack[mixture_expert], weight) for stack, weight in experts])


class Blend:
    """A ``blend`` of the base model and the ``T`` experts that can be read like a checkpoint."""

    def __init__(self, models: Sequence[Checkpoint], alpha: torch.Tensor) -> None:
        self.models, self._alpha = models, alpha

    def of(self, tensors: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """The blend of what was read of each model."""
        return blend(tensors[0], tensors[1:], self._alpha)

    def read(
        self, names: Mapping[str, str], model: transformers.PreTrainedModel, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors as ``Checkpoint.read`` does."""
        return self.of([source.read(names, model, device) for source in self.models])


Source = Checkpoint | Blend  # what a stream of hidden states begins with: a model, or a merge in the making
