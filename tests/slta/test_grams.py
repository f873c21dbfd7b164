"""Gram matrices of long features; those of small models are compared with the reference on every architecture."""

import pytest
import torch
from support.rounding import rounding

from mergekit_slta.slta.grams import inner_products


@pytest.mark.parametrize("numbers", [1, 4096, 10_000, 300_000])
def test_inner_products_of_float32_vectors_are_exact(numbers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(numbers, generator=generator) for _ in range(3)]
    exact = torch.stack(vectors).double()
    found = inner_products(vectors)
    assert torch.equal(found, found.T)
    sizes = exact.norm(dim=1)
    assert ((found - exact @ exact.T).abs() <= rounding(1) * sizes * sizes[:, None]).all()
