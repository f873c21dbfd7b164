"""How much of a GPU's memory is free for what waits there for its next use."""

from __future__ import annotations

import torch


def room(device: torch.device) -> int:
    """The bytes that may wait on a GPU so that half of its memory stays free to compute in; 0 on another device."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + unused - total // 2)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory: a GPU's in pinned memory, which it is copied to and from fastest."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda").copy_(tensor)
