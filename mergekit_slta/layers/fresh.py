"""Put a model back to how it was built, for modules that remember what they were called with.

Rotary embeddings whose frequencies depend on the length keep those of the last call in buffers and attributes, so that
a sample would see the length of the one before it.
"""

from __future__ import annotations

from typing import Any

import torch


class Fresh:
    """The modules of a model that own buffers outside its checkpoint, as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            _Snapshot(module)
            for module in model.modules()
            if any(module._buffers[name] is not None for name in module._non_persistent_buffers_set)
        ]

    def restore(self) -> None:
        """Put back what calls have changed since."""
        for snapshot in self._modules:
            snapshot.restore()


class _Snapshot:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._attributes = _attributes(module)
        self._values = {
            name: module.get_buffer(name).clone()
            for name in module._non_persistent_buffers_set
            if module._buffers[name] is not None
        }
        # What each buffer was when it was last looked at, and torch's count of the changes of it.
        self._seen = {name: (module.get_buffer(name), module.get_buffer(name)._version) for name in self._values}

    def restore(self) -> None:
        now = _attributes(self._module)
        for name in now.keys() - self._attributes.keys():
            delattr(self._module, name)
        for name, value in self._attributes.items():
            if now.get(name) is not value:
                setattr(self._module, name, value)
        for name, value in self._values.items():
            buffer, version = self._seen[name]
            if self._module._buffers[name] is not buffer or buffer._version != version:
                own = value.clone()
                self._module._buffers[name], self._seen[name] = own, (own, own._version)


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own attributes, except a forward that was put in place of its class's."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"}
