"""From Gram matrices to merging weights: the closed form of arXiv 2504.10902 (Eq. 12, 13, 32-34).

Symbols, for one submodule with ``N`` calibration samples and ``T`` experts:

    G_x  [T, T]     Gram matrix of sample x
    w_x             balance of sample x: 1 / mean_t G_x[t, t] (Eq. 33-34), or 1
    B_a  [T, T]     mean over task a's samples of w_x G_x (Eq. 14, 34)
    A    [T, T]     sum_a c_a B_a, c_a the weight of task a, and b_j = sum_a c_a B_a[j, a] (Eq. 13)
    alpha [T]       A^-1 b (Eq. 12, 32)

The functions of means and alpha work on leading batch dimensions too, which is how the bootstrap runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

EIGENVALUE_CUTOFF = 1e-10
MOST_NUMBERS = 2**20  # of the matrices A of draws that are in memory at once


@dataclass(frozen=True)
class SubmoduleSolution:
    """Merging weights of one submodule and what they are worth.

    Attributes:
        alpha: [T] float64, the merging weights.
        retained: [T] float64, the share of each expert's feature change that the merge keeps on that expert's own
            task, 1 - J_a(alpha) / J_a(0); NaN where the expert changes nothing. It may be negative.
        share: [T] float64, the expert's part in the feature change on its own task's data, ``own_share``.
        condition: condition number of the scaled A over its kept eigenvalues; NaN where A is zero.
        rank: number of kept eigenvalues; below T the solution is the minimum-norm one.
        measured: [T] bool, whether an expert changes the submodule's features on any sample that counts. If not, its
            weight is zero because nothing is known of it, even where its task vector is not zero.
    """

    alpha: torch.Tensor
    retained: torch.Tensor
    share: torch.Tensor
    condition: float
    rank: int
    measured: torch.Tensor


def sample_weights(grams: torch.Tensor, balance: bool) -> torch.Tensor:
    """Balance w_x of each sample, [N] float64; zero leaves a sample out (every delta of it is zero)."""
    power = grams.diagonal(dim1=-2, dim2=-1).mean(-1)
    if not balance:
        return torch.ones_like(power)
    return torch.where(power > 0, 1 / power.clamp_min(torch.finfo(power.dtype).tiny), torch.zeros_like(power))


def sample_shares(weights: torch.Tensor, task: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """What each sample's Gram matrix is multiplied by in its task's mean B_a, [..., N].

    Args:
        weights: [..., N], of ``sample_weights``.
        task: as for ``solve``.
        counts: [..., N] float64, how often each sample is drawn; once each by default.
    """
    usable = (weights > 0).to(weights.dtype)
    counts = usable if counts is None else counts * usable
    drawn = counts @ torch.nn.functional.one_hot(task).to(weights.dtype)  # samples of each task
    return counts * weights / drawn.clamp_min(1)[..., task]


def task_means(grams: torch.Tensor, task: torch.Tensor, balance: bool) -> torch.Tensor:
    """B_a of every task, [T, T, T] with the task first; the arguments are those of ``solve``."""
    shares = sample_shares(sample_weights(grams, balance), task)
    experts = grams.shape[-1]
    return grams.new_zeros(experts, experts, experts).index_add_(0, task, shares[:, None, None] * grams)


def equations(
    grams: torch.Tensor, task: torch.Tensor, shares: torch.Tensor, task_weights: Sequence[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [..., T, T] and b [..., T] (Eq. 13) straight from the samples, without the T matrices B_a.

    Args:
        grams, task, task_weights: as for ``solve``; the weights are the c_a.
        shares: [..., N], of ``sample_shares``.
    """
    if task_weights is not None:
        shares = shares * shares.new_tensor(task_weights)[task]
    return torch.einsum("...n,nbc->...bc", shares, grams), shares @ grams[torch.arange(len(task)), :, task]


def merging_weights(matrix: torch.Tensor, right: torch.Tensor, ridge: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve A alpha = b, as the minimum-norm solution where A is singular.

    A is scaled to a unit diagonal, its eigenvalues below 1e-10 of the largest are cut, and the solution is scaled
    back.

    Args:
        matrix, right: A [..., T, T] and b [..., T], of ``equations``.
        ridge: adds ridge * trace(A) / T to the diagonal.

    Returns:
        alpha [..., T] and the kept eigenvalues of the scaled A [..., T], zero where cut.
    """
    power = matrix.diagonal(dim1=-2, dim2=-1)
    matrix = matrix + torch.diag_embed((ridge * power.mean(-1, keepdim=True)).expand(power.shape))
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny).rsqrt(), 0.0)
    values, vectors = torch.linalg.eigh(scale[..., :, None] * matrix * scale[..., None, :])
    kept = torch.where(values > EIGENVALUE_CUTOFF * values[..., -1:], values, torch.zeros_like(values))
    inverse = torch.where(kept > 0, 1 / kept, torch.zeros_like(kept))
    coordinates = inverse * torch.einsum("...ji,...j->...i", vectors, scale * right)
    return scale * torch.einsum("...ij,...j->...i", vectors, coordinates), kept


def retained_share(means: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Share of each expert's feature change that is kept, 1 - J_a(alpha) / J_a(0), [..., T]; NaN where J_a(0) is 0.

    Args:
        means: [..., T, T, T], the B_a of ``task_means``.
        alpha: [..., T], the merging weights.
    """
    own = means.diagonal(dim1=-3, dim2=-1)  # column a is B_a[:, a]
    power = own.diagonal(dim1=-2, dim2=-1)
    cross = torch.einsum("...b,...ba->...a", alpha, own)
    loss = torch.einsum("...b,...abc,...c->...a", alpha, means, alpha) - 2 * cross + power
    return torch.where(power > 0, 1 - loss / power, torch.nan)


def own_share(means: torch.Tensor) -> torch.Tensor:
    """B_a[a, a] divided by the mean of B_a's diagonal, [T]. A submodule's scale cancels, with balance or without.

    It is 1 if all experts change the features on task a's data equally, T if only task a's own expert does.
    """
    power = means.diagonal(dim1=-2, dim2=-1)
    own = power.diagonal()
    return torch.where(own > 0, own / power.mean(-1).clamp_min(torch.finfo(own.dtype).tiny), 0.0)


def pooled(retained: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Mean of retained shares over submodules [S, ...], weighted by how much of the change is the expert's own.

    A submodule that an expert hardly changes can have an extreme retained share, so it must count for little.
    """
    weight = torch.where(retained.isnan(), 0.0, share)
    total = weight.sum(0)
    return torch.where(total > 0, (weight * retained.nan_to_num()).sum(0) / total, torch.nan)


def solve(
    grams: torch.Tensor,
    task: torch.Tensor,
    *,
    balance: bool = True,
    ridge: float = 0.0,
    task_weights: Sequence[float] | None = None,
) -> SubmoduleSolution:
    """Merging weights of one submodule from its per-sample Gram matrices (Eq. 12-14, 32-34).

    Args:
        grams: [N, T, T] float64, one Gram matrix per calibration sample.
        task: [N] int64, the index of the expert whose data each sample came from.
        balance: give every sample the same influence (Eq. 33-34).
        ridge: adds ridge * trace(A) / T to A's diagonal.
        task_weights: the weight of each task, ``T`` in all; one each by default.
    """
    shares = sample_shares(sample_weights(grams, balance), task)
    matrix, right = equations(grams, task, shares, task_weights)
    alpha, kept = merging_weights(matrix, right, ridge)
    used = kept[kept > 0]
    condition = float(used.max() / used.min()) if used.numel() else float("nan")
    means = task_means(grams, task, balance)
    return SubmoduleSolution(
        alpha, retained_share(means, alpha), own_share(means), condition, int(used.numel()), matrix.diagonal() != 0
    )


def bootstrap(
    grams: torch.Tensor,
    task: torch.Tensor,
    repeats: int,
    *,
    seed: int = 0,
    balance: bool = True,
    ridge: float = 0.0,
    task_weights: Sequence[float] | None = None,
) -> torch.Tensor:
    """Merging weights of ``repeats`` bootstrap samples, [repeats, T]; tasks keep their number of samples.

    NaN where a task has one sample, which can only be drawn again.
    """
    alpha = drawn_weights(grams, task, bootstrap_counts(task, repeats, seed), balance, ridge, task_weights)
    return alpha if int(task.bincount().min()) > 1 else torch.full_like(alpha, torch.nan)


def drawn_weights(
    grams: torch.Tensor,
    task: torch.Tensor,
    counts: torch.Tensor,
    balance: bool = True,
    ridge: float = 0.0,
    task_weights: Sequence[float] | None = None,
) -> torch.Tensor:
    """Merging weights of draws of the samples, [draws, T]; many draws of many experts are solved in parts.

    Args:
        grams, task, balance, ridge, task_weights: as for ``solve``.
        counts: [draws, N] float64, how often each sample is drawn.
    """
    shares = sample_shares(sample_weights(grams, balance), task, counts)
    parts = shares.split(max(1, MOST_NUMBERS // grams.shape[-1] ** 2))
    return torch.cat([merging_weights(*equations(grams, task, part, task_weights), ridge)[0] for part in parts])


def bootstrap_counts(task: torch.Tensor, repeats: int, seed: int) -> torch.Tensor:
    """How often each sample is drawn in each bootstrap sample, [repeats, N] float64.

    Args:
        task: as for ``solve``.
        repeats: the number of bootstrap samples.
        seed: what the draws depend on.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(repeats, len(task), dtype=torch.float64)
    for index in task.unique().tolist():
        rows = (task == index).nonzero().flatten()
        drawn = torch.randint(len(rows), (repeats, len(rows)), generator=generator)
        counts.scatter_add_(1, rows[drawn], torch.ones_like(drawn, dtype=counts.dtype))
    return counts
