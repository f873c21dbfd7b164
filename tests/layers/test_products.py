"""Products of the faster kernel, only where it is exact, and only for as long as asked."""

import pytest
import torch

from mergekit_slta.layers import products
from mergekit_slta.layers.products import EXACT, SIZE, fast_products


def relative_error(size: int) -> float:
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, size, size, generator=generator)
    expected = left.double() @ right.double()
    return float((left @ right - expected).norm() / expected.norm())


def test_products_are_exact_inside() -> None:
    with fast_products():
        assert relative_error(2 * SIZE) < EXACT


@pytest.mark.parametrize("exact", [True, False])
def test_the_settings_are_as_before_afterwards(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn_is_exact", lambda: exact)
    settings = products._settings()
    before = settings.fp32_precision
    with fast_products():
        assert (settings.fp32_precision == "bf16") == exact
    assert settings.fp32_precision == before


def test_a_kernel_that_rounds_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "EXACT", 1e-12)  # which no float32 product reaches
    products._onednn_is_exact.cache_clear()
    before = products._settings().fp32_precision
    with fast_products():
        assert products._settings().fp32_precision == before
    products._onednn_is_exact.cache_clear()


def test_a_torch_without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_settings", lambda: None)
    with fast_products():
        assert relative_error(SIZE) < EXACT
