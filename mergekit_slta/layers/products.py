"""Products of float32 matrices as exact as float32, by the fastest kernel: small changes of features need it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

# The largest relative error of a product that counts as float32; with factors in bfloat16 it is above 1e-3.
EXACT = 1e-6
# Tokens, inputs and outputs of the products that show it: oneDNN chooses among its kernels by size and layout.
SIZES = ((384, 384, 384), (16, 1024, 512), (1000, 64, 256), (3, 1000, 1000))
# Attention to fewer tokens multiplies in blocks so small that oneDNN takes up to twice as long as torch's own kernel.
FEW_TOKENS = 192
_ONE_THREAD = threading.RLock()  # what is changed belongs to the whole process


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products and convolutions exactly while the block runs; other threads wait for its end.

    On a GPU, factors are not rounded to TF32, as torch has it in convolutions by default, and in products on demand.

    On a CPU, oneDNN computes the products, unless it would round their factors to bfloat16. If bfloat16 is allowed
    inside float32 products, torch passes these to oneDNN. On many processors oneDNN computes them in full precision all
    the same, on some twice as fast as the default kernel; on others, such as those with matrix units, it rounds.
    Products of several sizes and layouts show what it does here; if one of them is rounded, nothing is changed.
    """
    with _ONE_THREAD, contextlib.ExitStack() as changed:
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        with contextlib.suppress(RuntimeError):  # it was set by torch's newer interface, which refuses to be mixed
            changed.enter_context(_set(cudnn, "allow_tf32", False))
        for owner in (cuda, getattr(cudnn, "conv", cudnn)):
            if not hasattr(owner, "fp32_precision"):  # a torch without the newer interface
                changed.enter_context(_set(owner, "allow_tf32", False))
            elif owner.fp32_precision == "tf32":  # perhaps from a setting for all of cuDNN or of torch
                changed.enter_context(_set(owner, "fp32_precision", "ieee"))
        matmul = _settings()
        if matmul is not None and _onednn_is_exact():
            changed.enter_context(_short_attention(matmul))
            changed.enter_context(_set(matmul, "fp32_precision", "bf16"))
        yield


@contextlib.contextmanager
def _short_attention(matmul: Any) -> Iterator[None]:
    """Compute attention to few tokens by torch's own kernel, exactly, whatever the setting for products is inside."""
    attention = functional.scaled_dot_product_attention

    def computed(query: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        if query.device.type != "cpu" or query.shape[-2] >= FEW_TOKENS or torch.compiler.is_compiling():
            return attention(query, *others, **more)
        with _set(matmul, "fp32_precision", "ieee"):
            return attention(query, *others, **more)

    with _set(functional, "scaled_dot_product_attention", computed):
        yield


@contextlib.contextmanager
def _set(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _settings() -> Any:
    """torch's settings for matrix products by oneDNN; None if this version of torch has none."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return matmul if hasattr(matmul, "fp32_precision") else None


@functools.cache
def _onednn_is_exact() -> bool:
    with _set(_settings(), "fp32_precision", "bf16"):
        return all(error < EXACT for size in SIZES for error in errors(*size))


def errors(tokens: int, inputs: int, outputs: int, device: torch.device | str = "cpu") -> Iterator[float]:
    """The relative errors of products as layers compute them: by maps stored both ways, over tokens, in batches."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(tokens, inputs, generator=generator).to(device)
    weight = torch.randn(outputs, inputs, generator=generator).to(device)
    others = torch.randn(tokens, outputs, generator=generator).to(device)
    for left, right in (
        (features, weight.T),
        (features, weight.T.contiguous()),
        (features.T, others),
        (features.expand(2, -1, -1), weight.T.expand(2, -1, -1)),
    ):
        expected = left.double() @ right.double()
        yield float((left @ right - expected).norm() / expected.norm())
