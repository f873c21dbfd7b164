"""The faster of torch's two kernels for float32 matrix products on a CPU, wherever it is as exact as the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

EXACT = (
    1e-6  # the largest relative error of a product that counts as float32; with factors in bfloat16 it is above 1e-3
)
# Tokens, inputs and outputs of the products that show it: oneDNN chooses among its kernels by size and layout.
SIZES = ((384, 384, 384), (16, 1024, 512), (1000, 64, 256), (3, 1000, 1000))


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """Let oneDNN compute float32 products while the block runs, unless it would round their factors to bfloat16.

    If bfloat16 is allowed inside float32 products, torch passes these to oneDNN. On many processors oneDNN computes
    them in full precision all the same, on some twice as fast as the default kernel; on others, such as those with
    matrix units, it rounds. Products of several sizes and layouts show what it does here; if one of them is rounded,
    nothing is changed.
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
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return all(error < EXACT for size in SIZES for error in errors(*size))
    finally:
        matmul.fp32_precision = before


def errors(tokens: int, inputs: int, outputs: int) -> Iterator[float]:
    """The relative errors of products as layers compute them: by maps stored both ways, over tokens, in batches."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(tokens, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    others = torch.randn(tokens, outputs, generator=generator)
    for left, right in (
        (features, weight.T),
        (features, weight.T.contiguous()),
        (features.T, others),
        (features.expand(2, -1, -1), weight.T.expand(2, -1, -1)),
    ):
        expected = left.double() @ right.double()
        yield float((left @ right - expected).norm() / expected.norm())
