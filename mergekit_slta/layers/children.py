"""The children of a decoder layer: the outermost modules that can be called, which a list of modules cannot."""

from __future__ import annotations

from collections.abc import Collection

import torch


def children(layer: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """A layer's children by their paths, such as ``mlp``, or ``self_attn.0`` where ``self_attn`` is a list."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in layer.named_children():
        if type(module).forward is torch.nn.Module.forward:
            found |= {f"{name}.{path}": child for path, child in children(module).items()}
        else:
            found[name] = module
    return found


def child_of(layer: torch.nn.Module, name: str) -> str:
    """The path of the child that a module or tensor of a layer is in, or its own if it is in none."""
    return next((path for path in children(layer) if is_inside(name, {path})), name)


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a module or tensor is one of some modules, or in one, by their paths."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in modules for depth in range(1, len(parts) + 1))
