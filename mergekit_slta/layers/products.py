"""The faster of torch's two kernels for float32 matrix products on a CPU, wherever it is as exact as the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

EXACT = 1e-6  # the largest relative error of a product that counts as float32
SIZE = 384


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """Let oneDNN compute float32 products while the block runs, unless it would round their factors to bfloat16.

    If bfloat16 is allowed inside float32 products, torch passes these to oneDNN. On processors without bfloat16 units
    oneDNN computes them in full precision, on some faster than the default kernel. One product shows whether it does.
    """
    matmul = _settings()
    if matmul is None or not _onednn_is_exact():
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _settings() -> Any:
    """torch's settings for matrix products by oneDNN; None if this version of torch has none."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return matmul if hasattr(matmul, "fp32_precision") else None


@functools.cache
def _onednn_is_exact() -> bool:
    matmul = _settings()
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, SIZE, SIZE, generator=generator)
    expected = left.double() @ right.double()
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        error = (left @ right - expected).norm() / expected.norm()
    finally:
        matmul.fp32_precision = before
    return bool(error < EXACT)
