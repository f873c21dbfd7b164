"""Task matrices merged by their own covariances: the regression of ACTMat (arXiv 2604.01329), with a ridge.

A linear map that is fine-tuned on inputs x changes along them: its gradients are sums of g xᵀ. So the rows of a task
matrix span the inputs of its task, and its Gram matrix stands in for theirs. Symbols, for ``T`` experts:

    τ_t        [m, n]    task matrix of expert t, its weights [out, in] minus the base model's
    w_t                  how much expert t counts
    C_t        [n, n]    w_t τ_tᵀτ_t / |τ_t|², the stand-in for the covariance of expert t's inputs
    τ̄          [m, n]    Σ_t w_t τ_t / Σ_t w_t, the mean
    μ                    ridge · |S|²_F / trace S with S = Σ_t C_t

The merged task matrix τ minimizes Σ_t |(τ − τ_t) C_t^½|² + μ |τ − τ̄|², so that

    τ = [Σ_t τ_t C_t + μ τ̄] [Σ_t C_t + μ I]⁻¹
      = τ_r + [Σ_t (τ_t − τ_r) C_t + μ (τ̄ − τ_r)] [Σ_t C_t + μ I]⁻¹

for any expert r, whose own product the second form saves.

An expert that did not touch the matrix does not constrain it (C_t = 0) and counts in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.maps import Role
from mergekit_slta.numerics.symmetric import add_ridge, gram, times_inverse

# With the method's ridge, float32 moves τ by 1e-5 of its norm. It moves what τ minimizes by 1e-9, 1e-7, 1e-5, 1e-3 and
# 0.1 of itself with ridges of 1e-2, 1e-3, 1e-4, 1e-5 and 1e-6, whatever the matrices' shapes and ranks are.
PRECISION = torch.float32
UNTOUCHED = 1e-30  # the square of a change's norm below which it counts as none: its inverse could overflow


def merged_vector(role: Role, vectors: Sequence[torch.Tensor], ridge: float, weights: Sequence[float]) -> torch.Tensor:
    """The merged task vector in at least ``PRECISION``; each matrix of a stack [..., m, n] is solved by itself.

    A fused matrix, such as the one of queries, keys and values, is one linear map of one input.
    """
    if role is Role.TRANSPOSED:
        return merged_vector(Role.LINEAR, [vector.mT for vector in vectors], ridge, weights).mT
    if role is not Role.LINEAR:
        return weighted_mean(vectors, weights)
    if vectors[0].ndim == 2:
        return merge_by_covariance(vectors, ridge, weights)
    return torch.stack([merged_vector(role, matrices, ridge, weights) for matrices in zip(*vectors, strict=True)])


def merge_by_covariance(
    matrices: Sequence[torch.Tensor],
    ridge: float,
    weights: Sequence[float] | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The merged task matrix τ of one linear map from ``T`` task matrices [out, in], in at least ``PRECISION``.

    ``ridge`` is above 0, ``weights`` are at least 0; by default every expert counts the same. S is added to
    ``into`` [in, in].
    """
    weights = [1.0] * len(matrices) if weights is None else weights
    mean = weighted_mean(matrices, weights)
    rows, inputs = mean.shape
    total, change = mean.new_zeros(inputs, inputs), torch.zeros_like(mean)
    reference: torch.Tensor | None = None
    for matrix, weight in zip(matrices, weights, strict=True):
        exact = matrix.to(total.dtype)
        size = float(exact.square().sum())
        if weight == 0 or size < UNTOUCHED:
            continue
        of_task = gram(exact).mul_(weight / size)
        total += of_task
        if reference is None:
            reference = exact
        elif 2 * rows < inputs:  # two products through [m, m] are less than one with C_t
            change.addmm_((exact - reference) @ exact.T, exact, alpha=weight / size)
        else:
            change.addmm_(exact - reference, of_task)
        del exact, of_task  # the next of_task would be beside this one
    if into is not None:
        into += total
    if len(matrices) == 1 or reference is None:
        return mean
    change.add_(mean - reference, alpha=add_ridge(total, ridge))
    solution = times_inverse(change, total)
    if solution is None:  # otherwise a Gram matrix, with the ridge of a recipe, is positive definite
        raise SltaError("A matrix of an expert differs from the base model's by numbers too large: check the expert.")
    return reference + solution


def matrix_bytes(rows: int, columns: int) -> int:
    """The bytes that it takes to merge matrices of this shape, beside their task matrices."""
    return PRECISION.itemsize * (7 * rows * columns + 2 * columns**2)


def weighted_mean(vectors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The mean of the experts' task vectors, by how much each expert counts; zero if none does."""
    total = torch.zeros_like(vectors[0], dtype=torch.promote_types(vectors[0].dtype, PRECISION))
    for vector, weight in zip(vectors, weights, strict=True):
        total.add_(vector, alpha=weight / (sum(weights) or 1.0))
    return total
