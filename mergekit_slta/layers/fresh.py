"""Restore a model to the state in which it was built, for modules that remember earlier calls.

Rotary embeddings whose frequencies depend on the length keep the frequencies of the last call in buffers and
attributes, so that a sample would see the length of the one before it.
"""

from __future__ import annotations

import torch


class Fresh:
    """Remembers the modules of a model that own buffers outside its checkpoint, and restores them."""

    def __init__(self, model: torch.nn.Module) -> None:
        owners = [vars(module) for module in model.modules() if module._non_persistent_buffers_set]
        self._owners = [(own, dict(own), dict(own["_buffers"])) for own in owners]

    def restore(self) -> None:
        """Undo what calls have replaced; no model of transformers writes into such a buffer."""
        for own, attributes, buffers in self._owners:
            own.clear()
            own.update(attributes)
            own["_buffers"].update(buffers)
