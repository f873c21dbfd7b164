"""Whether tensors may stay in a GPU's memory."""

from __future__ import annotations

import torch


def takes_little(device: torch.device, elements: int, share: float) -> bool:
    """Whether float32 elements take at most a share of a GPU's memory; false on every other device."""
    if device.type != "cuda":
        return False
    return elements * torch.float32.itemsize <= share * torch.cuda.get_device_properties(device).total_memory
