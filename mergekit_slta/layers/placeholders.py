"""Made-up weights, for runs that show how a model works before any checkpoint is read."""

from __future__ import annotations

import numpy as np
import torch

from mergekit_slta.layers.calls import Weights

# So many different ones a random tensor has, a number without small divisors.
RANDOM_NUMBERS = 1_000_003


def zeros(state: Weights, device: torch.device) -> Weights:
    """Zeros in place of tensors.

    On the host they take no memory, since nothing is written to numpy's pages. A single zero that is expanded would
    take more: matrix products make a full copy of it.
    """
    return {
        name: torch.from_numpy(np.zeros(tuple(tensor.shape), np.float32)).to(
            device, torch.float32 if tensor.is_floating_point() else tensor.dtype
        )
        for name, tensor in state.items()
    }


def random_numbers(state: Weights, device: torch.device) -> Weights:
    """Random numbers in place of tensors; most overlap, so that they take little memory."""
    generator = torch.Generator().manual_seed(0)

    def numbers(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        *stacked, rows, columns = (1, 1, *tensor.shape)
        # A mixture's product wants its matrices in rows that do not overlap, and strides of 64 bytes.
        strides = [16] * len(stacked) + [columns if tensor.ndim > 2 else 1, 1]
        size = 1 + sum(stride * (length - 1) for stride, length in zip(strides, (*stacked, rows, columns), strict=True))
        found = torch.randn(min(size, RANDOM_NUMBERS), generator=generator)
        found = found / columns**0.5 if tensor.ndim > 1 else 1 + found / 10
        found = found.repeat(-(-size // len(found))).to(device)
        return found.as_strided(tensor.shape, strides[len(strides) - tensor.ndim :])

    return {name: numbers(tensor) for name, tensor in state.items()}
