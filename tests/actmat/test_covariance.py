"""The regression of ACTMat against a dense float64 reference."""

from collections.abc import Callable

import pytest
import torch
from support.actmat_reference import dense_merge
from support.rounding import rounding

from mergekit_slta.actmat.covariance import merge_by_covariance
from mergekit_slta.errors import SltaError

# More outputs than inputs, and fewer; in the last, all experts' rows together are fewer than the inputs.
SHAPES = [(200, 40), (40, 90), (14, 90)]

Matrices = list[torch.Tensor]


def falling(m: int, n: int) -> torch.Tensor:
    """Singular values that fall as those of trained task matrices do, which makes the system ill-conditioned."""
    u, s, v = torch.linalg.svd(torch.randn(m, n, dtype=torch.float64), full_matrices=False)
    return (u * (torch.arange(len(s)) + 1.0) ** -1.5 @ v).float()


def adapters(m: int, n: int) -> Matrices:
    """LoRA of rank 4, as it comes back from a float32 checkpoint that it was added to."""
    base = 0.02 * torch.randn(m, n)
    return [(base + 0.01 * torch.randn(m, 4) @ torch.randn(4, n)) - base for _ in range(3)]


KINDS: dict[str, Callable[[int, int], Matrices]] = {
    "full": lambda m, n: [torch.randn(m, n) for _ in range(3)],
    "falling": lambda m, n: [falling(m, n) for _ in range(3)],
    "unequal": lambda m, n: [scale * torch.randn(m, n) for scale in (1e-6, 1, 1e3)],
    "untouched": lambda m, n: [torch.randn(m, n), torch.zeros(m, n), torch.randn(m, n)],
    "identical": lambda m, n: [torch.randn(m, n)] * 3,
    "adapters": adapters,
}


@pytest.mark.parametrize(("dtype", "ridge"), [(torch.float32, 10.0), (torch.float64, 10.0), (torch.float64, 1e-4)])
@pytest.mark.parametrize("weights", [None, (1.0, 0.3, 2.5), (3.0, 1.0, 0.0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_equals_the_dense_solution(
    m: int, n: int, kind: str, ridge: float, weights: tuple[float, ...] | None, dtype: torch.dtype
) -> None:
    tasks = [task.to(dtype) for task in KINDS[kind](m, n)]
    wanted, found = dense_merge(tasks, ridge, weights or ()), merge_by_covariance(tasks, ridge, weights)
    assert found.dtype == dtype
    exact = [(weight, task.double()) for weight, task in zip(weights or [1.0] * 3, tasks, strict=True) if task.any()]
    total = torch.stack([weight * task.T @ task / task.square().sum() for weight, task in exact]).sum(0)
    # A solution is off by the rounding of its system, magnified by at most the condition.
    condition = 1 + float(torch.linalg.eigvalsh(total)[-1] / (ridge * total.square().sum() / total.trace()))
    assert (found - wanted).norm() <= rounding(terms=max(m, n), dtype=dtype) * condition * wanted.norm()


def test_a_change_near_zero_counts_as_none_and_one_beyond_float32_is_refused() -> None:
    task = torch.randn(6, 9)
    assert merge_by_covariance([task, task * 1e-20], 0.1).allclose(merge_by_covariance([task, 0 * task], 0.1))
    with pytest.raises(SltaError, match="by numbers too large: check the expert"):
        merge_by_covariance([task, task * 1e30], 0.1)


def test_one_expert_comes_back() -> None:
    task = torch.randn(6, 9)
    for weights in (None, [0.5]):
        assert torch.equal(merge_by_covariance([task], 0.1, weights), task)
    assert not merge_by_covariance([task, task], 0.1, [0.0, 0.0]).any()


def test_experts_on_inputs_of_their_own_come_back_whole() -> None:
    """What a mean would shrink to a third: the reason for the method."""
    tasks = [torch.zeros(30, 30) for _ in range(3)]
    for index, task in enumerate(tasks):
        task[:, 10 * index : 10 * (index + 1)] = torch.linalg.qr(torch.randn(30, 10)).Q
    total = torch.stack(tasks).sum(0)
    for ridge in (1e-3, 1e3):  # which leaves 1 / (1 + ridge) of what differs from the mean
        wanted = (total / 3 + total * 2 / 3 / (1 + ridge)).double()
        change = merge_by_covariance(tasks, ridge).double()
        assert (change - wanted).norm() < rounding() * (1 + 1 / ridge) * total.norm()


@pytest.mark.parametrize(("ridge", "error"), [(1e-2, 1e-7), (1e-3, 1e-5), (1e-4, 1e-3)])
@pytest.mark.parametrize("kind", ["falling", "adapters"])
@pytest.mark.parametrize(("m", "n"), [*SHAPES, (64, 400)])
def test_float32_bears_the_smallest_ridge_of_a_recipe_however_wide_the_matrix_is(
    m: int, n: int, kind: str, ridge: float, error: float
) -> None:
    """What τ minimizes is hardly more than the least; with a tenth of the ridge it is a hundred times as far off."""
    tasks = KINDS[kind](m, n)
    changes = dense_merge(tasks, ridge), merge_by_covariance(tasks, ridge)
    least, reached = (objective(change, tasks, ridge) for change in changes)
    assert reached <= (1 + error) * least


def objective(change: torch.Tensor, tasks: Matrices, ridge: float) -> float:
    """Σ |(τ − τ_t) C_t^½|² + μ |τ − τ̄|²."""
    change, exact = change.double(), [task.double() for task in tasks]
    total = torch.stack([task.T @ task / task.square().sum() for task in exact]).sum(0)
    held = ridge * total.square().sum() / total.trace() * (change - torch.stack(exact).mean(0)).square().sum()
    return float(sum(((change - task) @ task.T).square().sum() / task.square().sum() for task in exact) + held)
