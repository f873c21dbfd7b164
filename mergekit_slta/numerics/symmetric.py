"""Symmetric systems: build a Gram matrix, tell its size, factor, solve, and tell where that is impossible.

``featcal`` and ``actmat`` solve systems that are sums of Gram matrices: positive semidefinite, and with a ridge
positive definite. They use a Cholesky factor. ``slta``, whose systems are tiny, has a solver of its own.
"""

from __future__ import annotations

import logging

import torch

LOG = logging.getLogger(__name__)

BLOCK = 256  # rows of a Gram matrix that are computed at once
# The smallest share of an unknown's diagonal element that the unknowns before it may leave to a float32 factor. A share
# is a difference of numbers near 1, each rounded by 2^-24: below this one, more than a sixteenth of it is rounding.
SMALLEST_SHARE = 2.0**-20


def add_gram(rows: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Add rowsᵀ rows to the blocks of ``total`` [n, n] on and above its diagonal: half of the work of a product."""
    for start in range(0, len(total), BLOCK):
        stop = start + BLOCK
        # Not ``addmm_``: on a Mac's GPU, torch before 2.14 does not write a product into a part of a matrix.
        total[start:stop, start:] += rows[:, start:stop].T @ rows[:, start:]
    return total


def mirror(total: torch.Tensor) -> torch.Tensor:
    """Write the blocks below the diagonal, which ``add_gram`` leaves out, in place."""
    for start in range(0, len(total), BLOCK):
        stop = start + BLOCK
        total[stop:, start:stop] = total[start:stop, stop:].T
    return total


def gram(rows: torch.Tensor) -> torch.Tensor:
    """rowsᵀ rows [n, n] of rows [m, n]."""
    return mirror(add_gram(rows, rows.new_zeros(rows.shape[1], rows.shape[1])))


def frobenius(matrix: torch.Tensor) -> torch.Tensor:
    """|matrix|_F by rows: torch's own sum over a large matrix stops growing on a CPU (−2 % at [16000, 16000])."""
    return matrix.norm(dim=1).cpu().double().norm().to(matrix)


def add_ridge(matrix: torch.Tensor, ridge: float) -> float:
    """Add ridge · |S|²_F / trace S to the diagonal of a positive semidefinite matrix S [n, n], and return it.

    The quotient is the mean of the eigenvalues of S, weighted by themselves. Directions in which S is zero do not
    change it, so it knows no width. It is 0 for a matrix of zeros.
    """
    trace = float(matrix.trace())
    hold = ridge * (float(frobenius(matrix)) ** 2 / trace if trace else 0.0)
    matrix.diagonal().add_(hold)
    return hold


def times_inverse(target: torch.Tensor, system: torch.Tensor) -> torch.Tensor | None:
    """target [k, n] times the inverse of a positive definite matrix [n, n]; None where it is not, or not finite.

    A float32 system that a float32 factor does not determine is solved in float64 on the CPU, which the log says.
    """
    factor, failed = torch.linalg.cholesky_ex(system)
    shares = factor.diagonal().square() / system.diagonal()
    determined = not int(failed) and bool((shares > SMALLEST_SHARE).all())
    if not determined and system.dtype == torch.float32 and bool(system.isfinite().all()):
        LOG.info("Solved a system of %d equations in float64 on the CPU", len(system))
        exact = times_inverse(target.cpu().double(), system.cpu().double())
        return None if exact is None else exact.to(target)
    if int(failed):
        return None
    # Unlike ``cholesky_solve``, which gives the same numbers, this does not copy the factor.
    half = torch.linalg.solve_triangular(factor, target.T, upper=False)
    solution = torch.linalg.solve_triangular(factor.mT, half, upper=True).T
    # NaN and infinity show in the extremes; a mask of all elements would take as much memory again, and more.
    return solution if all(bool(extreme.isfinite()) for extreme in solution.aminmax()) else None
