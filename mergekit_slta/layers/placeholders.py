"""Made-up weights, for runs that show how a model works before any checkpoint is read."""

from __future__ import annotations

import numpy as np
import torch

from mergekit_slta.layers.calls import Weights

# The number of different values in a random tensor; it has no small divisors.
RANDOM_NUMBERS = 1_000_003


def zeros(state: Weights, device: torch.device) -> Weights:
    """Replace tensors by zeros.

    On the host they take no memory, because nothing is written to numpy's pages. An expanded single zero would take
    more: matrix products copy it in full.
    """
    return {
        name: torch.from_numpy(np.zeros(tuple(tensor.shape), np.float32)).to(
            device, torch.float32 if tensor.is_floating_point() else tensor.dtype
        )
        for name, tensor in state.items()
    }


def random_numbers(state: Weights, device: torch.device) -> Weights:
    """Replace tensors by random numbers, most of which overlap in memory."""
    generator = torch.Generator().manual_seed(0)

    def numbers(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        *stacked, rows, columns = (1, 1, *tensor.shape)
        # The products of a mixture need matrices whose rows do not overlap, and strides of 64 bytes.
        strides = [16] * len(stacked) + [columns if tensor.ndim > 2 else 1, 1]
        size = 1 + sum(stride * (length - 1) for stride, length in zip(strides, (*stacked, rows, columns), strict=True))
        found = torch.randn(min(size, RANDOM_NUMBERS), generator=generator)
        found = found / columns**0.5 if tensor.ndim > 1 else 1 + found / 10
        found = found.repeat(-(-size // len(found))).to(device)
        return found.as_strided(tensor.shape, strides[len(strides) - tensor.ndim :])

    return {name: numbers(tensor) for name, tensor in state.items()}
