"""Task matrices superposed through their singular features: the mathematics of SFTM (arXiv 2502.10698, Algorithm 1).

Symbols, for one linear map with ``T`` experts, one singular triple being a feature:

    M_t                [m, n]          task matrix of expert t: its weights minus the base model's, trimmed
    U_t, σ_t, V_t      [m, r_t] [r_t] [n, r_t]   the features of M_t = U_t diag(σ_t) V_tᵀ
    M                  [m, n]          merged task matrix, Σ_t U_t diag(β_t) V_tᵀ (Eq. 1 with β = α ∘ σ)

M has to keep every feature, ⟨u, M v⟩ = σ (Eq. 2). That is A β = σ (Eq. 4) with A = UᵀU ∘ VᵀV over the features of all
experts: the Gram matrix of the rank-one matrices u vᵀ, so it is positive semidefinite with a unit diagonal, the
identity within an expert, and only its T(T−1)/2 cross-task blocks carry information. ‖M‖² = βᵀAβ, so M is the same
for every solution β of a singular system, and of all matrices that keep the features it has the least norm.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

LOG = logging.getLogger(__name__)

# The iterations stop when A shrinks the residual to less than NULL_SPACE of its size: what is left then lies almost in
# A's null space. In float32 this happens early, because a worse conditioned system would move M by more than 1e-5; that
# system is solved again in float64, with as many ITERATIONS as a condition number of 1 / NULL_SPACE may need.
NULL_SPACE = {torch.float32: 1e-2, torch.float64: 1e-6}
TOLERANCE = {torch.float32: 1e-7, torch.float64: 1e-9}
ITERATIONS = {torch.float32: 50, torch.float64: 10_000}

# M may be so many times as large as the largest task matrix without a warning. Where features of different experts
# agree or are orthogonal, M is at most as large as the sum of the task matrices.
GROWTH = 10

Blocks = Mapping[tuple[int, int], torch.Tensor]


class SingularFeatures(NamedTuple):
    """The features of one task matrix: ``left`` U [m, r], ``values`` σ [r] in descending order, ``right`` V [n, r]."""

    left: torch.Tensor
    values: torch.Tensor
    right: torch.Tensor


def trim(task: torch.Tensor, density: float) -> torch.Tensor:
    """Keep the entries of largest magnitude and zero the others (Algorithm 2, lines 5 and 11).

    ``int(density * numel)`` entries are kept, as in mergekit's own methods, but at least one. Of several entries of the
    same magnitude, the first in memory are kept, so that the result is deterministic.
    """
    count = max(1, int(density * task.numel()))
    if count >= task.numel():
        return task
    size = task.abs().flatten()
    threshold = _in_order(size, size.numel() - count)
    if threshold == 0:
        return task
    kept = size > threshold
    kept[(size == threshold).nonzero().flatten()[: count - int(kept.sum())]] = True
    return task * kept.view_as(task)


def _in_order(values: torch.Tensor, index: int) -> float:
    """The value that an ascending sort would put at ``index``; numpy is six times as fast as kthvalue on the CPU."""
    if values.device.type == "cpu":
        return float(np.partition(values.numpy(), index)[index])
    return float(values.kthvalue(index + 1).values)


def singular_features(matrix: torch.Tensor, rank: int = 0, dtype: torch.dtype | None = None) -> SingularFeatures:
    """Decompose a task matrix. Singular values σ ≤ max(m, n)·eps·σ₁ are left out, because their vectors are arbitrary.

    A float32 matrix is decomposed by the eigenvectors of its smaller Gram matrix in float64. That is faster than an SVD
    in float32 and exact to rounding. The SVD's vectors are wrong by up to 0.5 percent where singular values lie close
    together, and M by 1e-5 (measured on random 1024 x 256 to 4096 x 1024 matrices). A float64 matrix is decomposed by
    an SVD, because its Gram matrix would lose half of the digits.

    Args:
        matrix: [m, n] float32 or float64; its precision sets the cut.
        rank: keep at most so many features; 0 keeps all. The matrix is decomposed in full all the same, because
            the singular values of trimmed task matrices are so alike that a randomized method misses a tenth to a half
            of the largest ones.
        dtype: of the features; the matrix's by default.
    """
    rows, columns = matrix.shape
    if rows < columns:
        right, values, left = singular_features(matrix.T, rank, dtype)
        return SingularFeatures(left, values, right)
    exact = matrix.double()
    if matrix.dtype == torch.float64:
        _, values, adjoint = torch.linalg.svd(exact, full_matrices=False)
        right = adjoint.T
    else:
        squares, vectors = torch.linalg.eigh(exact.T @ exact)
        values, right = squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)
    kept = values > rows * torch.finfo(matrix.dtype).eps * values[:1]
    if rank:
        kept[rank:] = False
    values, right = values[kept], right[:, kept]
    left = exact @ (right / values)
    dtype = dtype or matrix.dtype
    return SingularFeatures(left.to(dtype), values.to(dtype), right.to(dtype))


def cross_task_blocks(features: Sequence[SingularFeatures]) -> dict[tuple[int, int], torch.Tensor]:
    """The blocks of A above its block diagonal, (s, t) → (U_sᵀU_t) ∘ (V_sᵀV_t) [r_s, r_t]."""
    return {
        (s, t): (first.left.T @ second.left).mul_(first.right.T @ second.right)
        for t, second in enumerate(features)
        for s, first in enumerate(features[:t])
    }


def multiply(blocks: Blocks, vector: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A times a vector [r]; its parts, of the given sizes, belong to the experts."""
    product = vector.clone()
    inputs, outputs = vector.split(list(sizes)), product.split(list(sizes))
    for (s, t), block in blocks.items():
        outputs[s].add_(block @ inputs[t])
        outputs[t].add_(block.T @ inputs[s])
    return product


def conjugate_residuals(
    operator: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve A x = b for a positive semidefinite A by the method of conjugate residuals (Stiefel, 1955).

    The residual shrinks in every iteration. On a singular system it converges to the least-squares residual (Hayami and
    Sugihara, 2011), while conjugate gradients diverge if b is not in A's range.

    Args:
        operator: x → A x, both [r].
        target: b [r], whose dtype chooses among the limits at the top of this module.

    Returns:
        x [r] and its residual b − A x [r].
    """
    solution, residual = torch.zeros_like(target), target.clone()
    image = operator(residual)
    direction, direction_image = residual.clone(), image.clone()
    limit = TOLERANCE[target.dtype] * target.norm()
    for _ in range(ITERATIONS[target.dtype]):
        size = residual.norm()
        if size <= limit or image.norm() <= NULL_SPACE[target.dtype] * size:
            break
        energy = residual @ image
        step = energy / (direction_image @ direction_image)
        solution += step * direction
        residual -= step * direction_image
        image = operator(residual)
        ratio = (residual @ image) / energy
        direction = residual + ratio * direction
        direction_image = image + ratio * direction_image
    return solution, residual


def feature_coefficients(features: Sequence[SingularFeatures]) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Solve A β = σ (Eq. 4) in the precision of the features, in the least-squares sense if A is singular.

    The iterations need the cross-task blocks but no [r, r] matrix. Six are enough where experts have little in common,
    some tens where they have much. For 4096 x 1024 and T = 3 on two cores the blocks take 0.36 s in float32 and the
    iterations 0.01 s; a Cholesky factorization would take 0.39 s and three times the blocks' memory.

    Returns:
        The coefficients β_t [r_t] of each expert's features, and whether they solve the system.
    """
    sizes = [len(feature.values) for feature in features]
    target = torch.cat([feature.values for feature in features])
    scale = target.max()  # squares of the entries must not underflow
    blocks = cross_task_blocks(features)
    solution, residual = conjugate_residuals(lambda vector: multiply(blocks, vector, sizes), target / scale)
    solved = bool(residual.norm() <= TOLERANCE[target.dtype] * (target / scale).norm())
    return (solution * scale).split(sizes), solved


def superpose(features: Sequence[SingularFeatures], coefficients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The merged task matrix Σ_t U_t diag(β_t) V_tᵀ (Eq. 1), [m, n]."""
    merged = features[0].values.new_zeros(features[0].left.shape[0], features[0].right.shape[0])
    for feature, beta in zip(features, coefficients, strict=True):
        merged.addmm_(feature.left, (feature.right * beta).T)
    return merged


def merge_task_matrices(matrices: Sequence[torch.Tensor], rank: int = 0) -> torch.Tensor:
    """Merge trimmed task matrices (Algorithm 1): the matrix of least norm that keeps the singular features of each.

    Float32 is enough for experts that have little in common. If it does not solve the system, because features of
    different experts nearly coincide, everything is computed again in float64; where such features contradict each
    other, the result is the least-squares solution.

    Args:
        matrices: ``T`` matrices [m, n], all float32 or all float64.
        rank: keep at most so many features of each matrix; 0 keeps all.

    Returns:
        M [m, n] in the same dtype. If at most one matrix is not zero, M is that matrix.
    """
    touched = [matrix for matrix in matrices if matrix.any()]
    if not touched:
        return torch.zeros_like(matrices[0])
    if len(touched) == 1 and not rank:
        return touched[0]
    exact = touched[0].dtype == torch.float64
    for dtype in [torch.float64] if exact else [torch.float32, torch.float64]:
        features = [singular_features(matrix, rank, dtype) for matrix in touched]
        coefficients, solved = feature_coefficients(features)
        if solved:
            break
    merged = superpose(features, coefficients).to(touched[0].dtype)
    growth = float(merged.norm() / max(matrix.norm() for matrix in touched))
    if growth > GROWTH:
        LOG.warning(
            "A merged task matrix of shape %s is %.0f times as large as the largest of its experts': their singular "
            "features nearly coincide and contradict each other, as of two versions of one expert",
            tuple(merged.shape),
            growth,
        )
    return merged
