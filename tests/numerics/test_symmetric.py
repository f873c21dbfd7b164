"""Gram matrices and symmetric systems against torch's general routines in float64."""

import logging
import math

import pytest
import torch
from support.rounding import IN_FLOAT64, rounding

from mergekit_slta.numerics import symmetric
from mergekit_slta.numerics.symmetric import add_ridge, frobenius, gram, times_inverse


@pytest.mark.parametrize("block", [1, 5, 7, 100])
def test_a_gram_matrix_is_the_product_whatever_its_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "BLOCK", block)
    rows = torch.randn(9, 14, dtype=torch.float64)
    assert (gram(rows) - rows.T @ rows).norm() < IN_FLOAT64 * rows.square().sum()


def test_the_norm_of_a_large_matrix_counts_all_numbers() -> None:
    matrix = torch.rand(2048, 2048)
    assert float(frobenius(matrix)) == pytest.approx(float(matrix.double().norm()), rel=rounding(8))


@pytest.mark.parametrize("width", [10, 1000])
def test_a_ridge_knows_no_width(width: int) -> None:
    matrix = torch.zeros(width, width, dtype=torch.float64)
    matrix[range(4), range(4)] = torch.tensor([1.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    assert add_ridge(matrix.clone(), 0.5) == pytest.approx(1.7, abs=IN_FLOAT64)  # half of (1 + 4 + 4 + 25) / 10
    assert add_ridge(torch.zeros(3, 3), 0.5) == 0.0


@pytest.mark.parametrize("system", [-torch.eye(3), torch.zeros(3, 3), torch.full((3, 3), torch.nan)], ids=str)
def test_a_matrix_that_is_not_positive_definite_has_no_inverse_here(system: torch.Tensor) -> None:
    assert times_inverse(torch.ones(2, 3).double(), system.double()) is None


@pytest.mark.parametrize("condition", [1e3, 1e9])
def test_a_system_beyond_float32_is_solved_in_float64(condition: float, caplog: pytest.LogCaptureFixture) -> None:
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q
    system, target = ((basis * torch.logspace(0, math.log10(condition), 40)) @ basis.T).float(), torch.randn(3, 40)
    with caplog.at_level(logging.INFO):
        found = times_inverse(target, system)
    assert found is not None and found.dtype == torch.float32
    assert bool(caplog.records) == (condition > 2**24)
    wanted = target.double() @ torch.linalg.inv(system.double())
    assert (found - wanted).norm() <= rounding(terms=40) * (1 if caplog.records else condition) * wanted.norm()
