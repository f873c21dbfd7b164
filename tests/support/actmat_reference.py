"""The naive reference of ``actmat``: the formula as it stands, dense and in float64."""

from collections.abc import Sequence
from typing import Any

import torch

from mergekit_slta.layers.maps import Role


def dense_merge(tasks: Sequence[torch.Tensor], ridge: float, weights: Sequence[float] = ()) -> torch.Tensor:
    """τ̄ + [Σ (τ_t − τ̄) C_t] [S + ridge · |S|²_F / trace S · I]⁻¹, S = Σ C_t, for task matrices [out, in]."""
    weights = weights or [1.0] * len(tasks)
    exact = [task.double() for task in tasks]
    mean = sum(weight * task for weight, task in zip(weights, exact, strict=True)) / sum(weights)
    moments = [
        weight * task.T @ task / task.square().sum()
        if task.any()
        else torch.zeros(task.shape[1], task.shape[1]).double()
        for weight, task in zip(weights, exact, strict=True)
    ]
    total = torch.stack(moments).sum(0)
    penalty = ridge * total.square().sum() / total.trace().clamp_min(1e-300)
    system = total + penalty * torch.eye(len(total), dtype=torch.float64)
    target = torch.stack([(task - mean) @ own for task, own in zip(exact, moments, strict=True)]).sum(0)
    return mean + torch.linalg.solve(system, target, left=False)


def merged_tensor(
    role: Role,
    base: torch.Tensor,
    experts: list[torch.Tensor],
    ridge: float = 0.03,
    scale: float = 1.0,
    weights: Any = (),
) -> torch.Tensor:
    """One tensor of the merged model, of a role, in float64."""
    if role is Role.TRANSPOSED:
        return merged_tensor(Role.LINEAR, base.mT, [expert.mT for expert in experts], ridge, scale, weights).mT
    if role is Role.LINEAR and base.ndim == 3:
        parts = zip(base, *experts, strict=True)
        return torch.stack([merged_tensor(role, own, theirs, ridge, scale, weights) for own, *theirs in parts])
    tasks = [expert.double() - base.double() for expert in experts]
    shares = torch.tensor(weights or [1.0] * len(tasks), dtype=torch.float64)
    if role is Role.LINEAR:
        merged = dense_merge(tasks, ridge, weights)
    else:
        merged = torch.tensordot(shares / shares.sum(), torch.stack(tasks), 1)
    return base.double() + scale * merged
