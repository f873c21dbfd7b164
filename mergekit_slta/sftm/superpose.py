"""Task matrices superposed through their singular features: the mathematics of SFTM (arXiv 2502.10698, Algorithm 1).

Symbols, for one linear map with ``T`` experts, one singular triple being a feature:

    M_t                [m, n]          task matrix of expert t: its weights minus the base model's, trimmed
    U_t, σ_t, V_t      [m, r_t] [r_t] [n, r_t]   the features of M_t = U_t diag(σ_t) V_tᵀ
    M                  [m, n]          merged task matrix, Σ_t U_t diag(β_t) V_tᵀ (Eq. 1 with β = α ∘ σ)

M has to have every feature, ⟨u, M v⟩ = σ (Eq. 2). That is A β = σ (Eq. 4) with A = UᵀU ∘ VᵀV over the features of all
experts: the Gram matrix of the rank-one matrices u vᵀ, so it is positive semidefinite with a unit diagonal, the
identity within an expert, and only its T(T−1)/2 cross-task blocks carry information. ‖M‖² = βᵀAβ, so M is the same
for every solution β of a singular system, and of all matrices that have the features it has the least norm.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mergekit_slta.layers.maps import Role

# The iterations stop when A shrinks the residual to less than NULL_SPACE of its size: what is left then lies almost in
# A's null space. There are as many ITERATIONS as a condition number of 1 / NULL_SPACE may need.
NULL_SPACE = 1e-6
TOLERANCE = 1e-9
ITERATIONS = 10_000

Blocks = Mapping[tuple[int, int], torch.Tensor]


class SingularFeatures(NamedTuple):
    """The features of one task matrix, float64: ``left`` U [m, r], ``values`` σ [r] descending, ``right`` V [n, r]."""

    left: torch.Tensor
    values: torch.Tensor
    right: torch.Tensor


def matrix_bytes(rows: int, columns: int, experts: int) -> int:
    """The bytes that it takes to merge so many task matrices of this shape, in float64, beside these."""
    rank = min(rows, columns)
    return 8 * rank * (experts * (rows + columns) + (experts + 3) ** 2 * rank // 2)


def superposed_vector(role: Role, vectors: Iterable[torch.Tensor], density: Sequence[float], rank: int) -> torch.Tensor:
    """Trim the experts' task vectors and merge them by their role, before the scaling factor γ (Algorithm 2).

    A stack [..., m, n] of linear maps is trimmed and merged matrix by matrix, as if the checkpoint stored them apart.
    Sums need one task vector at a time, so ``vectors`` may be a generator.
    """
    if role in (Role.LINEAR, Role.TRANSPOSED):
        stacks = list(vectors)
        if stacks[0].ndim > 2:
            return torch.stack([superposed_vector(role, parts, density, rank) for parts in zip(*stacks, strict=True)])
        return merge_task_matrices([trim(vector, share) for vector, share in zip(stacks, density, strict=True)], rank)
    trimmed = (trim(vector, share) for vector, share in zip(vectors, density, strict=True))
    if role is Role.CONVOLUTION:
        kernels = list(trimmed)
        return merge_task_matrices([kernel.flatten(1) for kernel in kernels], rank).view_as(kernels[0])
    total = functools.reduce(torch.add, trimmed)
    return total / len(density) if role is Role.NORM else total


def trim(vector: torch.Tensor, density: float) -> torch.Tensor:
    """Zero all but the entries of largest magnitude (Algorithm 2, lines 5 and 11).

    ``int(density * numel)`` entries stay, as in mergekit's own methods, but at least one. Of several entries of the
    same magnitude, the first in memory stay, so that the result is deterministic.
    """
    count = max(1, int(density * vector.numel()))
    if count >= vector.numel():
        return vector
    size = vector.abs().flatten()
    index = size.numel() - count
    threshold = float(np.partition(size.cpu().numpy(), index)[index])  # six times as fast as kthvalue on the CPU
    if threshold == 0:
        return vector
    largest = size > threshold
    largest[(size == threshold).nonzero().flatten()[: count - int(largest.sum())]] = True
    return vector * largest.view_as(vector)


def singular_features(matrix: torch.Tensor, rank: int = 0) -> SingularFeatures:
    """Decompose a task matrix. Singular values σ ≤ max(m, n)·eps·σ₁ are left out, because their vectors are arbitrary.

    A float32 matrix is decomposed by the eigenvectors of its smaller Gram matrix in float64. That is faster than an SVD
    in float32 and exact to rounding. The SVD's vectors are wrong by up to 0.5 percent where singular values lie close
    together, and M by 1e-5 (measured on random 1024 x 256 to 4096 x 1024 matrices). A float64 matrix is decomposed by
    an SVD, because its Gram matrix would lose half of the digits.

    ``rank`` is the most features, 0 for all. The matrix [m, n] is decomposed in full all the same, because the singular
    values of trimmed task matrices are so alike that a randomized method misses a tenth to a half of the largest ones.
    """
    rows, columns = matrix.shape
    if rows < columns:
        right, values, left = singular_features(matrix.T, rank)
        return SingularFeatures(left, values, right)
    exact = in_float64(matrix)
    if matrix.dtype == torch.float64:
        _, values, adjoint = torch.linalg.svd(exact, full_matrices=False)
        right = adjoint.T
    else:
        squares, vectors = torch.linalg.eigh(exact.T @ exact)
        values, right = squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)
    determined = values > rows * torch.finfo(matrix.dtype).eps * values[:1]
    if rank:
        determined[rank:] = False
    values, right = values[determined], right[:, determined]
    return SingularFeatures(exact @ (right / values), values, right)


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy of a tensor: on the CPU where its device has no float64, as Apple's GPUs."""
    try:
        return tensor.double()
    except TypeError:
        return tensor.cpu().double()


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


def conjugate_residuals(operator: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Solve A x = b for a positive semidefinite A by the method of conjugate residuals (Stiefel, 1955).

    The residual shrinks in every iteration. On a singular system it converges to the least-squares residual (Hayami and
    Sugihara, 2011), while conjugate gradients diverge if b is not in A's range. ``operator`` is x → A x, both [r].
    """
    solution, residual = torch.zeros_like(target), target.clone()
    image = operator(residual)
    direction, direction_image = residual.clone(), image.clone()
    limit = TOLERANCE * target.norm()
    for _ in range(ITERATIONS):
        size = residual.norm()
        if size <= limit or image.norm() <= NULL_SPACE * size:
            break
        energy = residual @ image
        step = energy / (direction_image @ direction_image)
        solution += step * direction
        residual -= step * direction_image
        image = operator(residual)
        ratio = (residual @ image) / energy
        direction = residual + ratio * direction
        direction_image = image + ratio * direction_image
    return solution


def feature_coefficients(features: Sequence[SingularFeatures]) -> tuple[torch.Tensor, ...]:
    """The coefficients β_t [r_t] of each expert's features: A β = σ (Eq. 4), by least squares if A is singular.

    The iterations need the cross-task blocks but no [r, r] matrix. Some ten are enough where experts have little in
    common; a Cholesky factorization would take as long as the blocks and three times their memory.
    """
    sizes = [len(feature.values) for feature in features]
    target = torch.cat([feature.values for feature in features])
    scale = target.max()  # squares of the entries must not underflow
    blocks = cross_task_blocks(features)
    return (conjugate_residuals(lambda vector: multiply(blocks, vector, sizes), target / scale) * scale).split(sizes)


def merge_task_matrices(matrices: Sequence[torch.Tensor], rank: int = 0) -> torch.Tensor:
    """Merge trimmed task matrices (Algorithm 1): the matrix of least norm with the singular features of each.

    Everything is float64: the squared singular values of a Gram matrix span twice as many digits as the values, and
    float32 moves M by 1e-2 where those of a task matrix span three or more (measured on matrices of attention). Where
    features of different experts contradict each other, the result is the least-squares solution.

    The ``T`` matrices [m, n] are all float32 or all float64, and so is M [m, n]. ``rank`` is at most how
    many features of each count, 0 for all. At rank 0, M is the only matrix that is not zero, if there is one.
    """
    touched = [matrix for matrix in matrices if matrix.any()]
    if not touched:
        return torch.zeros_like(matrices[0])
    if len(touched) == 1 and not rank:
        return touched[0]
    features = [singular_features(matrix, rank) for matrix in touched]
    total = features[0].values.new_zeros(matrices[0].shape)
    for feature, beta in zip(features, feature_coefficients(features), strict=True):
        total.addmm_(feature.left, (feature.right * beta).T)
    return total.to(touched[0])
