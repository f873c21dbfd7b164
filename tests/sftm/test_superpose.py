"""The mathematics of SFTM against a dense float64 reference.

Shapes: ``T`` task matrices [m, n] with r features in all.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from support.rounding import rounding
from support.sftm_reference import dense_features, dense_merge

from mergekit_slta.sftm.superpose import merge_task_matrices, trim

SHAPES = [(24, 24), (60, 20), (15, 50)]
Matrices = list[torch.Tensor]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def none(m: int, n: int) -> torch.Tensor:
    return torch.zeros(m, n, dtype=torch.float64)


def random(m: int, n: int) -> Matrices:
    return [trim(normal(m, n), 0.2) for _ in range(3)]


def contradictory(m: int, n: int) -> Matrices:
    """One matrix in three lengths and one of the others' differences: no matrix keeps all of their features."""
    first, second = normal(m, n), normal(m, n)
    return [first, 0.7 * first, second, first - second]


def orthogonal(m: int, n: int) -> Matrices:
    """Task matrices with orthogonal row and column spaces."""
    left, right = torch.linalg.qr(normal(m, 12))[0], torch.linalg.qr(normal(n, 12))[0]
    return [left[:, i : i + 4] @ torch.diag(normal(4)) @ right[:, i : i + 4].T for i in (0, 4, 8)]


def alike(m: int, n: int) -> Matrices:
    """Experts that share strong features, so that the system is ill-conditioned (about 1e3 to 1e5)."""
    shared = 3 * normal(m, 6) @ normal(6, n)
    return [shared + normal(m, n), 0.5 * shared + normal(m, n), 2 * shared + 0.3 * normal(m, n)]


KINDS: dict[str, Callable[[int, int], Matrices]] = {
    "random": random,
    "low rank": lambda m, n: [normal(m, rank) @ normal(rank, n) for rank in (1, 3, 4)],
    "some zero": lambda m, n: [normal(m, n), none(m, n), normal(m, n)],
    "alike": alike,
    "minute": lambda m, n: [1e-30 * normal(m, n) for _ in range(2)],
    "large": lambda m, n: [1e12 * normal(m, n) for _ in range(2)],
    "identical": lambda m, n: [normal(m, n)] * 3,
    "identical and another": lambda m, n: [twin := normal(m, n), normal(m, n), twin],
    "contradictory": contradictory,
    "orthogonal": orthogonal,
    "all zero": lambda m, n: [none(m, n)] * 2,
}


def error(matrix: torch.Tensor, reference: torch.Tensor, matrices: Sequence[torch.Tensor]) -> float:
    """Distance from the reference relative to it, or to the task matrices where they cancel out."""
    size = max(float(reference.norm()), 1e-3 * max(float(matrix.double().norm()) for matrix in matrices))
    return float((matrix.double() - reference).norm()) / (size or 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dense_reference(kind: str, m: int, n: int, dtype: torch.dtype) -> None:
    matrices = [matrix.to(dtype) for matrix in KINDS[kind](m, n)]
    merged = merge_task_matrices(matrices)
    assert merged.dtype == dtype and merged.isfinite().all()
    assert error(merged, dense_merge(matrices), matrices) < rounding()


@pytest.mark.parametrize(("m", "n", "experts"), [(2, 3, 5), (8, 8, 8), (1, 9, 3), (9, 1, 3), (1, 1, 3)])
def test_equals_the_dense_reference_with_as_many_features_as_entries_and_more(m: int, n: int, experts: int) -> None:
    matrices = [normal(m, n).float() for _ in range(experts)]
    assert error(merge_task_matrices(matrices), dense_merge(matrices), matrices) < rounding()


@pytest.mark.parametrize("others", [0, 2])
def test_a_single_matrix_comes_back_exactly(others: int) -> None:
    matrix = normal(20, 30).float()
    assert torch.equal(merge_task_matrices([matrix, *[torch.zeros_like(matrix)] * others]), matrix)


@pytest.mark.parametrize("rank", [1, 5, 1000])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_rank_keeps_the_first_features_only(m: int, n: int, rank: int) -> None:
    matrices = [matrix.float() for matrix in random(m, n)]
    assert error(merge_task_matrices(matrices, rank), dense_merge(matrices, rank), matrices) < rounding()
    left, values, right = dense_features(matrices[:1], rank)
    alone = merge_task_matrices(matrices[:1], rank).double()
    torch.testing.assert_close(alone, (left * values) @ right.T, rtol=0, atol=rounding() * float(values[0]))


@pytest.mark.parametrize("share", [0.001, 0.2, 0.999, 1.0])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (20, 31), (3, 4, 5, 6)])
def test_trim_keeps_the_largest_entries_as_they_are(shape: tuple[int, ...], share: float) -> None:
    task = normal(*shape)
    trimmed = trim(task, share)
    count = max(1, int(share * task.numel()))
    largest = task.abs().flatten().sort(descending=True).values[:count]
    kept = trimmed != 0
    assert trimmed.shape == task.shape and int(kept.sum()) == count
    assert torch.equal(trimmed[kept], task[kept])
    assert torch.equal(trimmed.abs().flatten().sort(descending=True).values[:count], largest)


def test_trim_breaks_ties_in_memory_order() -> None:
    task = torch.tensor([[1.0, -2.0, 1.0], [-1.0, 3.0, 1.0]])
    assert torch.equal(trim(task, 0.67), torch.tensor([[1.0, -2.0, 1.0], [0.0, 3.0, 0.0]]))


def test_trim_leaves_tasks_that_are_mostly_zero() -> None:
    task = torch.zeros(10, 10)
    task[3, 4] = -1.0
    assert torch.equal(trim(task, 0.2), task)
    assert torch.equal(trim(torch.zeros(4), 0.5), torch.zeros(4))
