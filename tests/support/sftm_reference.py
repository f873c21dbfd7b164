"""The naive reference of ``sftm``: all features of all task matrices at once, in float64."""

from collections.abc import Sequence

import torch

from mergekit_slta.layers.maps import Role


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


def _keep_largest(task: torch.Tensor, density: float) -> torch.Tensor:
    """Of entries of the same size, which rounded checkpoints have, the first ones stay."""
    kept = task.abs().flatten().argsort(descending=True, stable=True)[: max(1, int(density * task.numel()))]
    return torch.zeros_like(task).flatten().index_copy(0, kept, task.flatten()[kept]).view_as(task)


def merged_tensor(
    role: Role,
    base: torch.Tensor,
    experts: list[torch.Tensor],
    weight: list[float],
    density: list[float],
    scale: float,
    rank: int = 0,
) -> torch.Tensor:
    """Algorithm 2 for one tensor of the merged model, of a role, in float64."""
    tasks = [share * (expert.double() - base.double()) for expert, share in zip(experts, weight, strict=True)]
    if role is Role.LINEAR and base.ndim == 3:
        parts = zip(base, *experts, strict=True)
        return torch.stack([merged_tensor(role, own, theirs, weight, density, scale, rank) for own, *theirs in parts])
    tasks = [_keep_largest(task, share) for task, share in zip(tasks, density, strict=True)]
    if role is Role.NORM:
        return base.double() + torch.stack(tasks).mean(0)
    if role is Role.OTHER:
        return base.double() + scale * torch.stack(tasks).sum(0)
    precision = torch.promote_types(base.dtype, torch.float32)  # of the method; singular values below its eps are cut
    merged = dense_merge([task.flatten(1).to(precision) for task in tasks], rank)
    return base.double() + scale * merged.view_as(base)
