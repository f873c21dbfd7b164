"""Task matrices merged by their own covariances: the regression of ACTMat (arXiv 2604.01329), with a ridge.

A linear map that is fine-tuned on inputs x changes along them: its gradients are sums of g xᵀ. So the rows of a task
matrix span the inputs of its task, and its Gram matrix stands in for theirs. Symbols, for ``T`` experts:

    τ_t        [m, n]    task matrix of expert t, its weights [out, in] minus the base model's
    w_t                  how much expert t counts
    C_t        [n, n]    w_t τ_tᵀτ_t / |τ_t|², the stand-in for the covariance of expert t's inputs
    τ̄          [m, n]    Σ_t w_t τ_t / Σ_t w_t, the mean
    μ                    ridge · trace(Σ_t C_t) / n

The merged task matrix τ minimizes Σ_t |(τ − τ_t) C_t^½|² + μ |τ − τ̄|², so that

    τ = τ̄ + [Σ_t (τ_t − τ̄) C_t] [Σ_t C_t + μ I]⁻¹ = [Σ_t τ_t C_t + μ τ̄] [Σ_t C_t + μ I]⁻¹

An expert that did not touch the matrix demands nothing (C_t = 0) and counts in the mean. Where the rows X of all
√w_t τ_t / |τ_t| are fewer than n, or the ranks of the task matrices add up to less (LoRA), the system to solve is
X Xᵀ + μ I, because Xᵀ X [Xᵀ X + μ I]⁻¹ = Xᵀ [X Xᵀ + μ I]⁻¹ X.

All is float64: the condition is up to n / ridge, and float32 products move τ by 1e-4 to 1e-3 of its norm where the
singular values of task matrices fall like those of trained ones (measured on 768 x 768 to 512 x 1536).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from mergekit_slta.models.roles import Role

SMALLEST_RIDGE = 1e-8  # what a ridge of zero comes to; with less, rounding decides in directions that no expert changed
BLOCK = 512  # columns of a Gram matrix that are computed at once, from the diagonal on
PROBED = 8  # task matrices are probed for ranks of up to an eighth of their smaller dimension
PROBES = tuple(24 * 4**power for power in range(5))
SPARE = 8  # probes more than the rank, so that none of it is missed by chance
NEGLIGIBLE = 1e-6  # what is cut off a task matrix of low rank, its squared norm relative to μ, the error of τ at most


class Rows(NamedTuple):
    """The part of X that belongs to one expert: ``rows`` [r, n] with rowsᵀ rows = C_t.

    ``task`` is what its task matrix τ_t comes to: the number that the rows are multiplied by, or, for a matrix of low
    rank, the product τ_t rowsᵀ [m, r].
    """

    rows: torch.Tensor
    task: torch.Tensor | float

    def times_rows(self) -> torch.Tensor:
        """τ_t rowsᵀ [m, r]."""
        return gram(self.rows.T).mul_(self.task) if isinstance(self.task, float) else self.task


def merged_task(role: Role, tasks: Sequence[torch.Tensor], ridge: float, weights: Sequence[float]) -> torch.Tensor:
    """The merged task vector in float64; each matrix of a stack [..., m, n] is solved by itself.

    A fused matrix, such as the one of queries, keys and values, is one linear map of one input.
    """
    if role is Role.TRANSPOSED:
        return merged_task(Role.LINEAR, [task.mT for task in tasks], ridge, weights).mT
    if role is not Role.LINEAR:
        return weighted_mean(tasks, weights)
    if tasks[0].ndim == 2:
        return merge_by_covariance(tasks, ridge, weights)
    return torch.stack([merged_task(role, matrices, ridge, weights) for matrices in zip(*tasks, strict=True)])


def merge_by_covariance(
    tasks: Sequence[torch.Tensor],
    ridge: float,
    weights: Sequence[float] | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """The merged task matrix τ [m, n] float64.

    Args:
        tasks: ``T`` task matrices [out, in].
        ridge: how strongly τ is drawn towards the mean.
        weights: how much each expert counts, 0 or above; equally by default.
        total: a matrix [n, n] float64 to which Σ_t C_t is added, on and above its diagonal.
    """
    weights = [1.0] * len(tasks) if weights is None else weights
    mean = weighted_mean(tasks, weights)
    inputs = mean.shape[1]
    touched = [(task, weight) for task, weight in zip(tasks, weights, strict=True) if weight > 0 and task.any()]
    penalty = max(ridge, SMALLEST_RIDGE) * sum(weight for _, weight in touched) / inputs
    if not touched or len(tasks) == 1:
        if total is not None:
            for task, weight in touched:
                add_gram(all_rows(task, weight).rows, total)
        return mean
    parts = [low_rank(task, weight, NEGLIGIBLE * penalty) for task, weight in touched]
    ranks = [len(task) if part is None else len(part.rows) for part, (task, _) in zip(parts, touched, strict=True)]
    whole = (part or all_rows(*given) for part, given in zip(parts, touched, strict=True))
    if by_rows(sum(ranks), inputs, with_total=total is not None):
        rows, products = join_rows(whole, sum(ranks), mean)
        if total is not None:
            add_gram(rows, total)
        return mean.add_(solve_by_rows(rows, products, mean, penalty))
    moments, target = torch.zeros(inputs, inputs, dtype=mean.dtype, device=mean.device), mean.mul_(penalty)
    for part in whole:
        add_moments(part, moments, target)
        del part  # its memory is needed for the next one
    if total is not None:
        total += moments
    return solve(moments, target, penalty)


def by_rows(rows: int, inputs: int, *, with_total: bool) -> bool:
    """Whether the system of all experts' rows takes less than that of Σ_t C_t, which a total needs in any case."""
    return rows < (inputs // 2 if with_total else inputs)


def weighted_mean(tasks: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The mean of the experts' task vectors in float64, by how much each expert counts; zero if none does."""
    total = torch.zeros_like(tasks[0], dtype=torch.float64)
    for task, weight in zip(tasks, weights, strict=True):
        total.add_(task, alpha=weight / (sum(weights) or 1.0))
    return total


def all_rows(task: torch.Tensor, weight: float) -> Rows:
    """A task matrix by its own rows."""
    exact = task.double()
    size = float(exact.norm()) / weight**0.5
    return Rows(exact.div_(size) if exact is not task else exact / size, size)


def low_rank(task: torch.Tensor, weight: float, negligible: float) -> Rows | None:
    """A task matrix of low rank by as many rows; None where its rank is high.

    A product with random vectors shows the rank (Halko, Martinsson and Tropp, 2011); few are tried first, none where a
    small part of the matrix has a high rank already.

    Args:
        task: the task matrix [m, n].
        weight: how much its expert counts.
        negligible: how much of its squared norm the rows may lack, relative to it.
    """
    tried = [columns for columns in PROBES if columns <= min(task.shape) // PROBED]
    if not tried or _rank_of_part(task, tried[-1], negligible) > tried[-1] - SPARE:
        return None
    for columns in tried:
        if (rows := _probed_rows(task, columns, negligible)) is not None:
            rows *= weight**0.5 / task.double().norm()
            return Rows(rows, task.double() @ rows.T)
    return None


def _probed_rows(task: torch.Tensor, columns: int, negligible: float) -> torch.Tensor | None:
    """Rows [r, n] with rowsᵀ rows = taskᵀ task but for what is negligible, if a few random vectors find them."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(task.shape[1], columns, generator=generator).to(task.device, task.dtype)
    squares, vectors = torch.linalg.eigh(gram((task @ probes).double()))
    rank = _rank(squares, negligible)
    if rank > columns - SPARE:
        return None
    exact = task.double()
    rows = torch.linalg.qr(exact @ (probes.double() @ vectors[:, columns - rank :])).Q.T @ exact
    return rows if float(1 - (rows.norm() / exact.norm()) ** 2) <= negligible else None


def _rank(squares: torch.Tensor, negligible: float) -> int:
    """How many squared singular values, the smallest first, a hundredth of what is negligible does not hold."""
    energy = squares.clamp_min(0).cumsum(0)
    return int((energy > negligible / 100 * energy[-1]).sum())


def _rank_of_part(task: torch.Tensor, size: int, negligible: float) -> int:
    """The rank of ``size`` rows and columns from all over a matrix, which is at most the matrix's own."""
    rows, columns = (torch.linspace(0, length - 1, size, device=task.device).long() for length in task.shape)
    return _rank(torch.linalg.eigvalsh(gram(task[rows][:, columns].double())), negligible)


def gram(matrix: torch.Tensor) -> torch.Tensor:
    """matrixᵀ matrix, whose two halves are computed once."""
    width = matrix.shape[1]
    return mirror(add_gram(matrix, matrix.new_zeros(width, width)))


def mirror(upper: torch.Tensor) -> torch.Tensor:
    """Write what ``add_gram`` leaves out of a Gram matrix, in place."""
    for start in range(0, len(upper), BLOCK):
        stop = start + BLOCK
        upper[stop:, start:stop] = upper[start:stop, stop:].T
    return upper


def add_gram(matrix: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Add matrixᵀ matrix to the blocks of ``total`` that are on and above the diagonal."""
    for start in range(0, len(total), BLOCK):
        stop = start + BLOCK
        total[start:stop, start:].addmm_(matrix[:, start:stop].T, matrix[:, start:])
    return total


def blocks_of(total: torch.Tensor) -> Iterator[torch.Tensor]:
    """The blocks of a Gram matrix to which ``add_gram`` adds, as views."""
    for start in range(0, len(total), BLOCK):
        yield total[start : start + BLOCK, start:]


def two_grams(size: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sums [n, n] float64 for ``add_gram``, zero at first, in little more memory than one.

    The blocks of the second are stored where ``add_gram`` does not write in the first, so nothing else may be written
    to either while both are in use.
    """
    shift = min(BLOCK, size)
    both = torch.zeros(size + shift, size, dtype=torch.float64, device=device)
    return both[:size], both[shift:].T


def gram_norm(parts: Sequence[torch.Tensor], counted: torch.Tensor) -> torch.Tensor:
    """The Frobenius norm of a sum of Gram matrices from what ``add_gram`` computes of them, in blocks.

    Args:
        parts: the Gram matrices [n, n].
        counted: [n] bool, the dimensions that count.
    """
    squares = []
    for start in range(0, len(counted), BLOCK):
        stop = start + BLOCK
        block = torch.stack([part[start:stop, start:] for part in parts]).sum(0)
        block = block.where(counted[start:stop, None] & counted[start:], 0.0).square_()
        squares += [block[:, : len(block)].sum(), 2 * block[:, len(block) :].sum()]
    return torch.stack(squares).sum().sqrt()


def add_moments(part: Rows, moments: torch.Tensor, target: torch.Tensor) -> None:
    """Add C_t to Σ C_t, on and above its diagonal, and τ_t C_t to the right-hand side."""
    if isinstance(part.task, float) and len(part.rows) >= len(moments):
        covariance = gram(part.rows)
        moments += covariance
        target.addmm_(part.rows, covariance, alpha=part.task)
    else:
        add_gram(part.rows, moments)
        target.addmm_(part.times_rows(), part.rows)


def solve(system: torch.Tensor, target: torch.Tensor, penalty: float) -> torch.Tensor:
    """target [m, k] times the inverse of (system + penalty I) [k, k]; see ``times_inverse``."""
    system.diagonal().add_(penalty)
    found = times_inverse(target, system)
    assert found is not None  # a Gram matrix of finite numbers, with a penalty, is positive definite
    return found


def times_inverse(target: torch.Tensor, system: torch.Tensor) -> torch.Tensor | None:
    """target [m, n] times the inverse of a symmetric matrix [n, n], or None where that is not positive definite.

    Only what is on and above the diagonal of ``system`` is read. Both are used up: what is returned takes the place of
    ``target``, and nothing is copied if its rows are contiguous.
    """
    lower = system.mT  # the same matrix, in the order that is factorized without a copy
    failed = torch.empty((), dtype=torch.int32, device=system.device)
    torch.linalg.cholesky_ex(lower, out=(lower, failed))
    if int(failed):
        return None
    columns = target.T
    for factor, upper in ((lower, False), (lower.mT, True)):
        torch.linalg.solve_triangular(factor, columns, upper=upper, out=columns)
    return target


def join_rows(parts: Iterable[Rows], count: int, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` rows X [k, n] of all experts, and their products [m, k] with their own task matrices."""
    rows, products = mean.new_empty(count, mean.shape[1]), mean.new_empty(len(mean), count)
    start = 0
    for part in parts:
        own = slice(start, start + len(part.rows))
        rows[own], products[:, own], start = part.rows, part.times_rows(), own.stop
        del part  # its memory is needed for the next one
    return rows, products


def solve_by_rows(rows: torch.Tensor, products: torch.Tensor, mean: torch.Tensor, penalty: float) -> torch.Tensor:
    """τ − τ̄ through the system of the rows X, for fewer rows than inputs; see ``join_rows``."""
    target = products.addmm_(mean, rows.T, alpha=-1)
    system = add_gram(rows.T, rows.new_zeros(len(rows), len(rows)))
    return solve(system, target, penalty) @ rows
