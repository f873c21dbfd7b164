"""Products of float32 matrices as exact as float32: small changes of features need it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

# The largest relative error of a product that counts as float32; with factors in bfloat16 it is above 1e-3.
EXACT = 1e-6
# Tokens, inputs and outputs of the products that show it: oneDNN chooses among its kernels by size.
SIZES = ((384, 384, 384), (16, 1024, 512), (1000, 64, 256), (3, 1000, 1000))


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products and convolutions exactly while the block runs.

    A GPU rounds no factors to TF32, as torch has it in convolutions by default and in products on demand. On a CPU,
    torch's setting that allows bfloat16 passes products to oneDNN, which on many processors computes them in full
    precision all the same, on some twice as fast as torch's own kernel: it is set where test products are exact.
    """
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    with contextlib.ExitStack() as changed:
        with contextlib.suppress(RuntimeError):  # it was set by torch's newer interface, which refuses to be mixed
            changed.enter_context(_set(cudnn, "allow_tf32", False))
        if not hasattr(cuda, "fp32_precision"):  # a torch without the newer interface
            changed.enter_context(_set(cuda, "allow_tf32", False))
        else:
            for owner in (cuda, cudnn.conv, mkldnn.conv):
                if owner.fp32_precision in ("tf32", "bf16"):  # perhaps from a setting for all backends
                    changed.enter_context(_set(owner, "fp32_precision", "ieee"))
            changed.enter_context(_set(mkldnn.matmul, "fp32_precision", "bf16" if _onednn_is_exact() else "ieee"))
        yield


@functools.cache
def _onednn_is_exact() -> bool:
    mkldnn: Any = torch.backends.mkldnn
    with _set(mkldnn.matmul, "fp32_precision", "bf16"):
        return all(relative_error(*size) < EXACT for size in SIZES)


def relative_error(tokens: int, inputs: int, outputs: int) -> float:
    """The largest relative error of products as layers compute them: by maps stored both ways, and in batches."""
    generator = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(shape, generator=generator) for shape in ((tokens, inputs), (outputs, inputs)))
    expected = features.double() @ weight.double().T
    stored = (weight.T, weight.T.contiguous(), weight.T.expand(2, -1, -1))
    return max(float((features @ weight_t - expected).norm() / expected.norm()) for weight_t in stored)


@contextlib.contextmanager
def _set(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
