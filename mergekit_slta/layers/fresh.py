"""Restore a model to the state in which it was built, for modules that remember earlier calls.

Rotary embeddings whose frequencies depend on the length keep the frequencies of the last call in buffers and
attributes, so that a sample would see the length of the one before it.
"""

from __future__ import annotations

from typing import Any

import torch


class Fresh:
    """Remembers the modules of a model that own buffers outside its checkpoint, and restores them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = []
        for module in model.modules():
            buffers = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
            if any(buffer is not None for buffer in buffers.values()):
                self._modules.append((module, _attributes(module), buffers))

    def restore(self) -> None:
        """Undo what calls have replaced; no model of transformers writes into such a buffer."""
        for module, attributes, buffers in self._modules:
            now = _attributes(module)
            for name in now.keys() - attributes.keys():
                delattr(module, name)
            for name, value in attributes.items():
                if now.get(name) is not value:
                    setattr(module, name, value)
            module._buffers.update(buffers)


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own attributes, except a ``forward`` that replaces its class's."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"}
