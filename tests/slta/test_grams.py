"""Per-sample Gram matrices against two loops over experts, and what must not change them."""

import pytest
import torch
from support.rounding import rounding

from mergekit_slta.slta.grams import inner_products, sample_grams

LENGTHS = (7, 3, 1)


@pytest.fixture
def deltas() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(LENGTHS), max(LENGTHS), 5, generator=generator) for _ in range(4)]


def test_inner_products_of_the_samples_own_tokens(deltas: list[torch.Tensor]) -> None:
    grams = sample_grams(deltas, LENGTHS)
    assert grams.dtype == torch.float64
    assert torch.equal(grams, grams.mT)
    for row, length in enumerate(LENGTHS):
        for b, first in enumerate(deltas):
            for c, second in enumerate(deltas):
                expected = (first[row, :length].double() * second[row, :length].double()).sum()
                size = float(first[row, :length].norm() * second[row, :length].norm())
                assert grams[row, b, c].item() == pytest.approx(expected.item(), abs=rounding(1) * size)


def test_padding_and_neighbours_change_no_bit(deltas: list[torch.Tensor]) -> None:
    grams = sample_grams(deltas, LENGTHS)
    for delta in deltas:
        for row, length in enumerate(LENGTHS):
            delta[row, length:] = torch.nan
    assert torch.equal(sample_grams(deltas, LENGTHS), grams)
    for row, length in enumerate(LENGTHS):
        assert torch.equal(sample_grams([delta[row : row + 1] for delta in deltas], [length])[0], grams[row])


@pytest.mark.parametrize("numbers", [1, 4096, 10_000, 300_000])
def test_inner_products_of_float32_vectors_are_exact(numbers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(numbers, generator=generator) for _ in range(3)]
    exact = torch.stack(vectors).double()
    found = inner_products(vectors)
    assert torch.equal(found, found.T)
    sizes = exact.norm(dim=1)
    assert ((found - exact @ exact.T).abs() <= rounding(1) * sizes * sizes[:, None]).all()
