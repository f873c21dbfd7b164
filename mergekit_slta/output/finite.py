"""Whether the values of a merged tensor are finite."""

from __future__ import annotations

import torch


def is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's values are finite in a data type; its smallest and its largest value show it."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # torch computes little in 8 bits
    return bool(torch.stack(tensor.aminmax()).to(dtype).double().isfinite().all())
