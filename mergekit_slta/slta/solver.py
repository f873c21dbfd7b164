"""From Gram matrices to merging weights: the closed form of arXiv 2504.10902 (Eq. 12, 13, 32-34).

Symbols, for one submodule with ``N`` calibration samples and ``T`` experts, where sample x has tokens_x tokens:

    G_x  [T, T]     Gram matrix of sample x
    w_x             balance of sample x: 1 / mean_t G_x[t, t] (Eq. 33-34), or 1
    B_a  [T, T]     mean over task a's samples of w_x G_x (Eq. 14, 34)
    A    [T, T]     sum_a c_a B_a, c_a the weight of task a, and b_j = sum_a c_a B_a[j, a] (Eq. 13)
    alpha [T]       A^-1 b (Eq. 12, 32)
    J_a(alpha)      alpha^T B_a alpha - 2 alpha^T B_a[:, a] + B_a[a, a], the squared distance of the merge's feature
                    change from expert a's on task a

Expert a was trained for task a. Task T may be the base model's own: prompts on which the merge should do what the base
model does. Their target is no change, so they add to A and not to b. Their influence is measured per token, by one
number for the submodule. For T = 1 that gives alpha = g_1 / (g_1 + kappa g_0), g_0 the size of the change on task T:

    p_x  [T, T]     G_x / tokens_x
    g_a             mean over task a's samples of mean_t p_x[t, t]
    w_0             1 / the geometric mean of the g_a > 0 of the experts' tasks; zero without any
    B_0  [T, T]     s w_0 times the mean over task T's samples of p_x; s = 1 if balanced, else mean_a mean_t B_a[t, t]
    A               sum_a c_a B_a + kappa B_0, kappa the weight of the base model's task

``task_means``, ``base_changes`` and ``equations`` take leading batch dimensions too, which is how the bootstrap runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

EIGENVALUE_CUTOFF = 1e-10  # relative to the largest eigenvalue


@dataclass(frozen=True)
class SubmoduleSolution:
    """Merging weights of one submodule and what they are worth."""

    alpha: torch.Tensor  # [T] float64, the merging weights
    # [T] float64, the share of each expert's feature change that the merge retains on that expert's task,
    # 1 - J_a(alpha) / J_a(0); NaN where the expert changes nothing. It may be negative.
    retained: torch.Tensor
    share: torch.Tensor  # [T] float64, ``expert_share``
    condition: float  # of A, scaled to a unit diagonal, over the eigenvalues that are not cut; NaN where A is zero
    rank: int  # the number of these eigenvalues; below T the solution is that of least norm after the scaling
    # [T] bool, whether an expert changes the submodule's features on any sample of the experts' tasks that counts. If
    # not, its weight is zero because nothing is known of it, even where its task vector is not zero.
    measured: torch.Tensor
    # The share of the base model that the merge keeps on its own task, 1 - J_0(alpha) / mean_t J_0(e_t) with
    # J_0(alpha) = alpha^T (B_0 / s) alpha, e_t expert t added whole; NaN where no expert changes that task.
    kept_base: float = float("nan")
    base_share: float = 0.0  # mean_t J_0(e_t), the experts' mean change on that task relative to that on their own


def solve(
    grams: torch.Tensor,  # [N, T, T] float64
    task: torch.Tensor,  # [N] int64, the task of each sample; T for the base model's
    *,
    tokens: torch.Tensor | None = None,  # [N] int64, of each sample; needed where the base model has a task
    balance: bool = True,  # give every sample the same influence (Eq. 33-34)
    ridge: float = 0.0,  # adds ridge * trace(A) / T to A's diagonal, before B_0 is added
    task_weights: Sequence[float] | None = None,  # c_a of each expert's task; one each by default
    keep_weight: float = 1.0,  # kappa
) -> SubmoduleSolution:
    """Merging weights of one submodule from its per-sample Gram matrices (Eq. 12-14, 32-34).

    Where A is singular they have the least norm, once A is scaled; see ``solve_semidefinite``.
    """
    means = task_means(grams, task, balance)
    changes = base_changes(grams, task, tokens)
    matrix, right, measured = equations(means, changes, balance, ridge, task_weights, keep_weight)
    alpha, eigenvalues = solve_semidefinite(matrix, right)
    used = eigenvalues[eigenvalues > 0]
    whole = float(changes.diagonal().mean())
    return SubmoduleSolution(
        alpha=alpha,
        retained=retained_share(means, alpha),
        share=expert_share(means),
        condition=float(used.max() / used.min()) if used.numel() else float("nan"),
        rank=used.numel(),
        measured=measured,
        kept_base=1 - float(alpha @ changes @ alpha) / whole if whole else float("nan"),
        base_share=whole,
    )


def sample_weights(grams: torch.Tensor, balance: bool) -> torch.Tensor:
    """Balance w_x of each sample, [N] float64; zero leaves a sample out (every delta of it is zero)."""
    power = grams.diagonal(dim1=-2, dim2=-1).mean(-1)
    if not balance:
        return torch.ones_like(power)
    return torch.where(power > 0, 1 / power.clamp_min(torch.finfo(power.dtype).tiny), 0.0)


def task_means(
    grams: torch.Tensor, task: torch.Tensor, balance: bool, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """B_a of every expert's task, [..., T, T, T]; zero for a task without a usable sample.

    ``counts`` [..., N] float64 says how often each sample is drawn; once each by default.
    """
    experts, weights = grams.shape[-1], sample_weights(grams, balance)
    usable = (weights > 0).to(weights.dtype)
    counts = usable if counts is None else counts * usable
    return torch.stack([_mean(grams, task == index, counts, weights) for index in range(experts)], -3)


def base_changes(
    grams: torch.Tensor, task: torch.Tensor, tokens: torch.Tensor | None, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """w_0 times the mean of p_x over the base model's task, [..., T, T]; zero without such a task.

    ``counts`` are as for ``task_means``; w_0 is always that of all samples.
    """
    experts = grams.shape[-1]
    if int(task.max()) < experts:
        return torch.zeros_like(grams[0])
    assert tokens is not None
    sizes = grams.diagonal(dim1=-2, dim2=-1).mean(-1) / tokens
    of_tasks = torch.stack([sizes[task == index].mean() for index in range(experts)])
    weight = (-of_tasks[of_tasks > 0].log().mean()).exp() if bool((of_tasks > 0).any()) else sizes.new_zeros(())
    counts = torch.ones_like(sizes) if counts is None else counts
    return _mean(grams, task == experts, counts, weight / tokens)


def _mean(grams: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean over some ``rows`` of a sample's weight times its Gram matrix, [..., T, T]; zero without any."""
    drawn = counts[..., rows].sum(-1, keepdim=True).clamp_min(1)
    mean = (counts[..., rows] * weights[rows] / drawn) @ grams[rows].flatten(1)
    return mean.unflatten(-1, grams.shape[-2:])


def equations(
    means: torch.Tensor,
    changes: torch.Tensor,
    balance: bool,
    ridge: float = 0.0,
    task_weights: Sequence[float] | None = None,
    keep_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [..., T, T] with its ridge, b [..., T] (Eq. 13), and which experts change anything on a task that counts.

    From ``task_means`` and ``base_changes``, of which the experts that change nothing there are left out.
    """
    weights = means.new_tensor([1.0] * means.shape[-1] if task_weights is None else task_weights)
    measured = torch.einsum("a,...abb->...b", weights, means) != 0
    matrix = torch.einsum("a,...abc->...bc", weights, means)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += ridge * diagonal.mean(-1, keepdim=True)
    if keep_weight:
        scale = 1.0 if balance else means.diagonal(dim1=-2, dim2=-1).mean((-1, -2))[..., None, None]
        matrix = matrix + keep_weight * scale * changes * (measured[..., :, None] & measured[..., None, :])
    return matrix, means.diagonal(dim1=-3, dim2=-1) @ weights, measured  # column a of the diagonal is B_a[:, a]


def retained_share(means: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """The share of an expert's feature change that stays, 1 - J_a(alpha) / J_a(0), [..., T]; NaN where J_a(0) is 0."""
    agreement = means.diagonal(dim1=-3, dim2=-1)  # [..., T, T], whose column a is B_a[:, a]
    power = agreement.diagonal(dim1=-2, dim2=-1)
    cross = torch.einsum("...b,...ba->...a", alpha, agreement)
    square = torch.einsum("...b,...abc,...c->...a", alpha, means, alpha)
    return torch.where(power > 0, (2 * cross - square) / power, torch.nan)


def expert_share(means: torch.Tensor) -> torch.Tensor:
    """B_a[a, a] divided by the mean of B_a's diagonal, [T]. A submodule's scale cancels, with balance or without.

    It is 1 if all experts change the features on task a's data equally, T if only task a's own expert does.
    """
    power = means.diagonal(dim1=-2, dim2=-1)
    changed = power.diagonal(dim1=-2, dim2=-1)
    return torch.where(changed > 0, changed / power.mean(-1).clamp_min(torch.finfo(changed.dtype).tiny), 0.0)


def pooled(retained: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Mean of retained shares over submodules [S, ...], weighted by how much of the change is the expert's own.

    A submodule that an expert hardly changes can have an extreme retained share, so it must count for little.
    """
    weight = torch.where(retained.isnan(), 0.0, share)
    total = weight.sum(0)
    return torch.where(total > 0, (weight * retained.nan_to_num()).sum(0) / total, torch.nan)


def bootstrap(
    grams: torch.Tensor,
    task: torch.Tensor,
    repeats: int,
    *,
    seed: int = 0,
    tokens: torch.Tensor | None = None,
    balance: bool = True,
    **settings: Any,
) -> torch.Tensor:
    """Merging weights of ``repeats`` bootstrap samples, [repeats, T]; each task has as many samples as before.

    All are NaN if a task has one sample, which can only be drawn again. The arguments are those of ``solve``.
    """
    if settings.get("keep_weight") == 0:  # the base model's task is left out, also where it has one sample
        rows = task < grams.shape[-1]
        grams, task, tokens = grams[rows], task[rows], None
    counts = bootstrap_counts(task, repeats, seed)
    means, changes = task_means(grams, task, balance, counts), base_changes(grams, task, tokens, counts)
    matrix, right, _ = equations(means, changes, balance, **settings)
    alpha, _ = solve_semidefinite(matrix, right)
    return alpha if int(task.bincount().min()) > 1 else torch.full_like(alpha, torch.nan)


def bootstrap_counts(task: torch.Tensor, repeats: int, seed: int) -> torch.Tensor:
    """How often each sample is drawn in each bootstrap sample, [repeats, N] float64."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(repeats, len(task), dtype=torch.float64)
    for index in task.unique().tolist():
        rows = (task == index).nonzero().flatten()
        drawn = torch.randint(len(rows), (repeats, len(rows)), generator=generator)
        counts.scatter_add_(1, rows[drawn], torch.ones_like(drawn, dtype=counts.dtype))
    return counts


def solve_semidefinite(matrix: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve A x = b for positive semidefinite A [..., n, n] and b [..., n].

    A is scaled to a unit diagonal, its eigenvalues below ``EIGENVALUE_CUTOFF`` of the largest are cut, and the solution
    of least norm is scaled back. Returns x and the eigenvalues, both [..., n]; those that were cut are zero.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny).rsqrt(), 0.0)
    values, vectors = torch.linalg.eigh(scale[..., :, None] * matrix * scale[..., None, :])
    values = torch.where(values > EIGENVALUE_CUTOFF * values[..., -1:], values, 0.0)
    inverse = torch.where(values > 0, 1 / values, 0.0)
    coordinates = inverse * torch.einsum("...ji,...j->...i", vectors, scale * right)
    return scale * torch.einsum("...ij,...j->...i", vectors, coordinates), values
