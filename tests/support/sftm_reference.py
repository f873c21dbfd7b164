"""The naive reference of ``sftm``: all features of all task matrices at once, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dense_features(matrices: Sequence[torch.Tensor], rank: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U [m, r], σ [r] and V [n, r] of all matrices, by float64 SVDs."""
    parts = []
    for matrix in matrices:
        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        kept = values > max(matrix.shape) * torch.finfo(matrix.dtype).eps * values[0]
        kept[rank or len(kept) :] = False
        parts.append((left[:, kept], values[kept], right[kept].T))
    left, values, right = zip(*parts, strict=True)
    return torch.cat(left, 1), torch.cat(values), torch.cat(right, 1)


def dense_merge(matrices: Sequence[torch.Tensor], rank: int = 0) -> torch.Tensor:
    """The r x r system of Eq. 4 formed in float64 and solved by least squares."""
    left, values, right = dense_features(matrices, rank)
    if not len(values):
        return torch.zeros_like(matrices[0]).double()
    system = (left.T @ left) * (right.T @ right)
    beta = torch.linalg.lstsq(system, values[:, None], rcond=1e-9, driver="gelsd").solution[:, 0]
    return (left * beta) @ right.T
