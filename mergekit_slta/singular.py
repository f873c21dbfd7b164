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

# Directions in which A is smaller than this, relative to 1, are its null space: unit vectors rounded to float32 leave
# up to 2e-7 there (eight identical experts) where exact ones leave zero.
NULL_SPACE = 1e-6

# A system that converges this soon is so well conditioned that float32 blocks lose nothing (M within 3e-6, measured on
# experts whose task matrices have a cosine of up to 0.94). Any other is solved again with float64 blocks.
FLOAT32_TOLERANCE, FLOAT32_ITERATIONS = 1e-6, 50
FLOAT64_TOLERANCE, FLOAT64_ITERATIONS = 1e-9, 1000

Blocks = Mapping[tuple[int, int], torch.Tensor]


class SingularFeatures(NamedTuple):
    """The features of one task matrix: ``left`` U [m, r], ``values`` σ [r] in descending order, ``right`` V [n, r]."""

    left: torch.Tensor
    values: torch.Tensor
    right: torch.Tensor


def trim(task: torch.Tensor, density: float) -> torch.Tensor:
    """Keep the entries of largest magnitude and zero the others (Algorithm 2, lines 5 and 11).

    ``int(density * numel)`` entries stay, as in mergekit's own methods, and at least one. Of entries that tie for the
    last places the first in memory order stay, so that the result is deterministic.
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


def singular_features(matrix: torch.Tensor, rank: int = 0) -> SingularFeatures:
    """Decompose a task matrix, without the singular values σ ≤ max(m, n)·eps·σ₁, whose vectors are arbitrary.

    A float32 matrix goes through the eigenvectors of its smaller Gram matrix in float64. That is faster than an SVD in
    float32 and exact to rounding down to the cut, while the SVD's vectors are off by up to 0.5 percent where singular
    values lie close together, and M by 1e-5 (measured on random 1024 x 256 to 4096 x 1024 matrices). A float64 matrix
    goes through an SVD, as its Gram matrix would lose half of the digits.

    Args:
        matrix: [m, n] float32 or float64.
        rank: keep at most so many features; 0 keeps all. The decomposition is cut, not approximated:
            trimmed task matrices have flat spectra, on which randomized methods fail.
    """
    rows, columns = matrix.shape
    if rows < columns:
        right, values, left = singular_features(matrix.T, rank)
        return SingularFeatures(left, values, right)
    cut = rows * torch.finfo(matrix.dtype).eps
    if matrix.dtype == torch.float64:
        left, values, adjoint = torch.linalg.svd(matrix, full_matrices=False)
        kept = _kept(values, cut, rank)
        return SingularFeatures(left[:, kept], values[kept], adjoint[kept].T)
    exact = matrix.double()
    squares, vectors = torch.linalg.eigh(exact.T @ exact)
    values = squares.flip(0).clamp_min(0).sqrt()
    kept = _kept(values, cut, rank)
    values, right = values[kept], vectors.flip(1)[:, kept]
    left = exact @ (right / values)
    return SingularFeatures(left.to(matrix.dtype), values.to(matrix.dtype), right.to(matrix.dtype))


def _kept(values: torch.Tensor, cut: float, rank: int) -> torch.Tensor:
    """Which of the descending singular values count."""
    kept = values > cut * values[:1]
    if rank:
        kept[rank:] = False
    return kept


def cross_task_blocks(features: Sequence[SingularFeatures], dtype: torch.dtype) -> dict[tuple[int, int], torch.Tensor]:
    """The blocks of A above its block diagonal, (s, t) → (U_sᵀU_t) ∘ (V_sᵀV_t) [r_s, r_t] in ``dtype``."""
    blocks = {}
    for t, second in enumerate(features):
        for s, first in enumerate(features[:t]):
            block = first.left.to(dtype).T @ second.left.to(dtype)
            blocks[s, t] = block.mul_(first.right.to(dtype).T @ second.right.to(dtype))
    return blocks


def multiply(blocks: Blocks, vector: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A times a vector [r] whose parts of the given sizes belong to the experts, [r]."""
    product = vector.clone()
    inputs, outputs = vector.split(list(sizes)), product.split(list(sizes))
    for (s, t), block in blocks.items():
        outputs[s].add_(block @ inputs[t])
        outputs[t].add_(block.T @ inputs[s])
    return product


def conjugate_residuals(
    operator: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor, tolerance: float, iterations: int
) -> tuple[torch.Tensor, bool]:
    """Solve A x = b for a positive semidefinite A by the method of conjugate residuals (Stiefel, 1955).

    The residual shrinks in every iteration, and on a singular system it goes to the least-squares one (Hayami and
    Sugihara, 2011), where conjugate gradients diverge when b is not in A's range.

    Args:
        operator: x → A x, both [r].
        target: b [r].
        tolerance: the relative residual at which x is a solution. A residual that A maps to less than ``NULL_SPACE``
            of itself makes it a least-squares solution.
        iterations: the number of iterations after which to give up.

    Returns:
        x [r], and whether it is a solution.
    """
    solution = torch.zeros_like(target)
    residual = target.clone()
    image = operator(residual)
    direction, direction_image = residual.clone(), image.clone()
    limit = tolerance * target.norm()
    for _ in range(iterations):
        size = residual.norm()
        if size <= limit or image.norm() <= NULL_SPACE * size:
            return solution, True
        energy = residual @ image
        step = energy / (direction_image @ direction_image)
        solution += step * direction
        residual -= step * direction_image
        image = operator(residual)
        ratio = (residual @ image) / energy
        direction = residual + ratio * direction
        direction_image = image + ratio * direction_image
    return solution, False


def feature_coefficients(features: Sequence[SingularFeatures]) -> tuple[torch.Tensor, ...]:
    """Solve A β = σ (Eq. 4) for the coefficients β_t [r_t] of each expert's features; least squares if A is singular.

    Iterations on the cross-task blocks need half a dozen products where experts have little in common, a few hundred
    where they have much, and no [r, r] matrix. For 4096 x 1024 and T = 3 on two cores: blocks in float32 0.36 s,
    iterations 0.01 s, a Cholesky factorization 0.39 s instead, its memory three times the blocks'.

    The coefficients are float64 where float32 would lose digits, else of the features' dtype.
    """
    target = torch.cat([feature.values for feature in features])
    sizes = [len(feature.values) for feature in features]
    if target.dtype == torch.float32:
        blocks = cross_task_blocks(features, torch.float32)
        solution, solved = conjugate_residuals(
            lambda vector: multiply(blocks, vector, sizes), target, FLOAT32_TOLERANCE, FLOAT32_ITERATIONS
        )
        if solved:
            return solution.split(sizes)
    blocks = cross_task_blocks(features, torch.float64)
    solution, solved = conjugate_residuals(
        lambda vector: multiply(blocks, vector, sizes), target.double(), FLOAT64_TOLERANCE, FLOAT64_ITERATIONS
    )
    if not solved:
        LOG.warning("Experts have nearly the same singular features: their merge keeps those only roughly")
    return solution.split(sizes)


def superpose(features: Sequence[SingularFeatures], coefficients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The merged task matrix Σ_t U_t diag(β_t) V_tᵀ (Eq. 1), [m, n] in the coefficients' dtype."""
    dtype = coefficients[0].dtype
    merged = coefficients[0].new_zeros(features[0].left.shape[0], features[0].right.shape[0])
    for feature, beta in zip(features, coefficients, strict=True):
        merged.addmm_(feature.left.to(dtype), (feature.right.to(dtype) * beta).T)
    return merged


def merge_task_matrices(matrices: Sequence[torch.Tensor], rank: int = 0) -> torch.Tensor:
    """Merge trimmed task matrices (Algorithm 1): the matrix of least norm that keeps the singular features of each.

    Args:
        matrices: ``T`` matrices [m, n], all float32 or all float64.
        rank: keep at most so many features of each matrix; 0 keeps all.

    Returns:
        M [m, n] in the same dtype. Where one matrix at most is not zero it is that matrix itself.
    """
    touched = [matrix for matrix in matrices if matrix.any()]
    if not touched:
        return torch.zeros_like(matrices[0])
    if len(touched) == 1 and not rank:
        return touched[0]
    features = [singular_features(matrix, rank) for matrix in touched]
    return superpose(features, feature_coefficients(features)).to(matrices[0].dtype)
