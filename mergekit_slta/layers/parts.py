"""Large tensors in parts that a processor's cache holds.

Several operations on a part then need no new memory for whole tensors, which a system hands out slower than a processor
computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

CACHED = 2**20  # elements


def parts(*tensors: torch.Tensor, elements: int = CACHED) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape in parts of at most ``elements`` elements together; whole where they are not on a CPU."""
    shape, most = tensors[0].shape, max(1, elements // len(tensors))
    if tensors[0].device.type != "cpu" or math.prod(shape) <= most:
        yield tensors
    elif math.prod(shape[1:]) > most:
        for own in zip(*tensors, strict=True):
            yield from parts(*own, elements=elements)
    else:
        rows = most // math.prod(shape[1:])
        yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)
