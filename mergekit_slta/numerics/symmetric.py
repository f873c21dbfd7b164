"""Symmetric systems: build a Gram matrix, add a ridge, factor, solve, and tell where that is impossible.

The merge methods solve systems that are sums of Gram matrices, so they are positive semidefinite. ``featcal`` and
``actmat`` make them positive definite by a ridge and use a Cholesky factor, in float32; ``slta``, whose systems are
tiny, cuts small eigenvalues in float64 and so gets the solution of least norm.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

LOG = logging.getLogger(__name__)

# Numbers of each vector whose products are summed in float32: 64 chains of 64 terms are exact to 1e-7 or so.
IN_FLOAT32 = 4096
HELD = 2**17  # numbers of all vectors that are multiplied at once on a processor, whose cache holds their copies
BLOCK = 512  # columns of a Gram matrix that are computed at once
EIGENVALUE_CUTOFF = 1e-10  # relative to the largest eigenvalue
# The smallest share of an unknown's diagonal element that the unknowns before it may leave to a float32 factor. A share
# is a difference of numbers near 1, each rounded by 2^-24: below this one, more than a sixteenth of it is rounding.
SMALLEST_SHARE = 2.0**-20
_in_float64 = itertools.count(1)


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


def inner_products(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inner products [T, T] of ``T`` float32 vectors [n], float64 on the CPU and exactly symmetric.

    The products of ``IN_FLOAT32`` numbers are summed in float32 on the vectors' device, these sums in float64 on the
    CPU.
    """
    on_cpu, total = vectors[0].device.type == "cpu", torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    size = max(HELD // len(vectors) // IN_FLOAT32, 1) * IN_FLOAT32 if on_cpu else max(len(vectors[0]), 1)
    for parts in zip(*(vector.split(size) for vector in vectors), strict=True):
        features = torch.stack(parts)
        whole = features.shape[1] // IN_FLOAT32 * IN_FLOAT32
        for blocks in (features[:, :whole].unflatten(1, (-1, IN_FLOAT32)).transpose(0, 1), features[None, :, whole:]):
            total += (blocks @ blocks.mT).cpu().double().sum(0)
    return (total + total.T) / 2


def with_ridge(matrix: torch.Tensor, ridge: torch.Tensor | float) -> torch.Tensor:
    """Matrices [..., n, n] plus ``ridge`` times the mean of their own diagonal on the diagonal."""
    found = matrix.clone()
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    diagonal += ridge * diagonal.mean(-1, keepdim=True)
    return found


def times_inverse(target: torch.Tensor, system: torch.Tensor) -> torch.Tensor | None:
    """target [k, n] times the inverse of a positive definite matrix [n, n].

    A float32 system that a float32 factor does not determine is solved in float64 on the CPU, and the log counts these.

    Returns:
        [k, n], or None where the matrix is not positive definite or a number is not finite.
    """
    factor, failed = torch.linalg.cholesky_ex(system)
    shares = factor.diagonal().square() / system.diagonal()
    determined = not int(failed) and bool((shares > SMALLEST_SHARE).all())
    if not determined and system.dtype == torch.float32 and bool(system.isfinite().all()):
        LOG.info("Solved a system of %d equations in float64 on the CPU (number %d)", len(system), next(_in_float64))
        exact = times_inverse(target.cpu().double(), system.cpu().double())
        return None if exact is None else exact.to(target)
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
