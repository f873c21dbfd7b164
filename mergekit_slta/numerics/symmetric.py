"""Symmetric systems in float64: build a Gram matrix, add a ridge, factor, solve, and tell where that is impossible.

The merge methods solve systems that are sums of Gram matrices, so they are positive semidefinite. ``featcal`` and
``actmat`` make them positive definite by a ridge and use a Cholesky factor; ``slta``, whose systems are tiny, cuts
small eigenvalues and so gets the solution of least norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 512  # columns of a Gram matrix that are computed at once
EIGENVALUE_CUTOFF = 1e-10  # relative to the largest eigenvalue


def add_gram(rows: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Add rowsᵀ rows to the blocks of ``total`` [n, n] on and above its diagonal: half of the work of a product."""
    for start in range(0, len(total), BLOCK):
        stop = start + BLOCK
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
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


def with_ridge(matrix: torch.Tensor, ridge: torch.Tensor | float) -> torch.Tensor:
    """Matrices [..., n, n] plus ``ridge`` times the mean of their own diagonal on the diagonal."""
    found = matrix.clone()
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    diagonal += ridge * diagonal.mean(-1, keepdim=True)
    return found


def times_inverse(target: torch.Tensor, system: torch.Tensor) -> torch.Tensor | None:
    """target [k, n] times the inverse of a positive definite matrix [n, n].

    Returns:
        [k, n], or None where the matrix is not positive definite or a number is not finite.
    """
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed):
        return None
    solution = torch.cholesky_solve(target.T, factor).T
    return solution if bool(torch.isfinite(solution).all()) else None


class LeastNorm(NamedTuple):
    """The solution of least norm of semidefinite systems, and how well the systems determine it.

    Attributes:
        solution: [..., n].
        kept: the eigenvalues [..., n] of the systems, scaled to a unit diagonal; zero where cut. Their number is the
            rank, the largest through the smallest of them the condition number.
    """

    solution: torch.Tensor
    kept: torch.Tensor


def solve_semidefinite(matrix: torch.Tensor, right: torch.Tensor) -> LeastNorm:
    """Solve A x = b for positive semidefinite A [..., n, n] and b [..., n].

    A is scaled to a unit diagonal, its eigenvalues below ``EIGENVALUE_CUTOFF`` of the largest are cut, and the solution
    is scaled back.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny).rsqrt(), 0.0)
    values, vectors = torch.linalg.eigh(scale[..., :, None] * matrix * scale[..., None, :])
    kept = torch.where(values > EIGENVALUE_CUTOFF * values[..., -1:], values, 0.0)
    inverse = torch.where(kept > 0, 1 / kept, 0.0)
    coordinates = inverse * torch.einsum("...ji,...j->...i", vectors, scale * right)
    return LeastNorm(scale * torch.einsum("...ij,...j->...i", vectors, coordinates), kept)
