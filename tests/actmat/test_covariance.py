"""The regression of ACTMat against a dense float64 reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.actmat_reference import dense_merge

from mergekit_slta.actmat import covariance
from mergekit_slta.actmat.covariance import (
    add_gram,
    blocks_of,
    gram,
    low_rank,
    merge_by_covariance,
    mirror,
    times_inverse,
    two_grams,
)

# Square, tall, all experts' rows fewer than a half of the inputs, fewer than the inputs, and more.
SHAPES = [(48, 48), (200, 40), (14, 90), (20, 90), (40, 90)]
TOLERANCE = 1e-6  # of the reference's norm

Matrices = list[torch.Tensor]


def full(m: int, n: int) -> Matrices:
    return [torch.randn(m, n) for _ in range(3)]


def falling(m: int, n: int) -> Matrices:
    """Singular values that fall as those of trained task matrices do, which makes the system ill-conditioned."""
    matrices = [torch.linalg.svd(torch.randn(m, n, dtype=torch.float64), full_matrices=False) for _ in range(3)]
    return [(u * (torch.arange(len(s)) + 1.0) ** -1.5 @ v).float() for u, s, v in matrices]


def unequal(m: int, n: int) -> Matrices:
    return [1e-6 * torch.randn(m, n), torch.randn(m, n), 1e3 * torch.randn(m, n)]


def untouched(m: int, n: int) -> Matrices:
    return [torch.randn(m, n), torch.zeros(m, n), torch.randn(m, n)]


def identical(m: int, n: int) -> Matrices:
    return [torch.randn(m, n)] * 3


def after_rounding(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product as it comes back from a float32 checkpoint that it was added to."""
    base = 0.02 * torch.randn(len(left), right.shape[1])
    return (base + left @ right) - base


def lora(m: int, n: int) -> Matrices:
    return [after_rounding(0.01 * torch.randn(m, 16), 0.1 * torch.randn(16, n)) for _ in range(3)]


def assert_solved(tasks: Matrices, ridge: float = 0.1, weights: tuple[float, ...] = ()) -> None:
    wanted = dense_merge(tasks, ridge, weights)
    inputs = tasks[0].shape[1]
    total = torch.eye(inputs, dtype=torch.float64)  # is added to
    found = merge_by_covariance(tasks, ridge, weights or None, total)
    assert found.dtype == torch.float64
    assert (found - wanted).norm() <= TOLERANCE * wanted.norm()
    without_total = merge_by_covariance(tasks, ridge, weights or None)  # perhaps by another system
    assert (found - without_total).norm() <= 1e-9 * wanted.norm()
    for task, weight in zip(tasks, weights or [1.0] * len(tasks), strict=True):
        if task.any():
            total -= weight * task.double().T @ task.double() / task.double().norm() ** 2
    assert (mirror(total) - torch.eye(inputs)).norm() <= TOLERANCE * inputs


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("ridge", [1e-4, 0.1, 10.0])
@pytest.mark.parametrize("matrices", [full, falling, unequal, untouched, identical])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_equals_the_dense_solution(m: int, n: int, matrices: Callable[[int, int], Matrices], ridge: float) -> None:
    assert_solved(matrices(m, n), ridge)
    assert_solved(matrices(m, n), ridge, (1.0, 0.3, 2.5))


@pytest.mark.parametrize(("m", "n"), [(256, 256), (640, 200), (200, 640)])
def test_task_matrices_of_low_rank_equal_the_dense_solution(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = lora(m, n)
    mixed = [*tasks[:2], torch.randn(m, n) * 1e-2]
    found = [low_rank(task, 1.0, 1e-6 * 0.1 * 3 / n) for task in mixed]
    assert [part and len(part.rows) for part in found] == [16, 16, None]
    assert_solved(mixed)
    monkeypatch.setattr(covariance, "add_moments", None)  # which the ranks, 48 in all, leave no need for
    assert_solved(tasks)
    assert_solved(tasks, 0.3, (1.0, 0.0, 2.0))


def test_a_matrix_that_is_nearly_of_low_rank_is_not_cut() -> None:
    """Rounding to bfloat16 leaves an adapter's task matrix with noise that counts."""
    base = 0.02 * torch.randn(256, 256)
    tasks = [
        (base + 1e-3 * torch.randn(256, 16) @ torch.randn(16, 256)).bfloat16().float() - base.bfloat16().float()
        for _ in range(2)
    ]
    assert low_rank(tasks[0], 1.0, 1e-6 * 0.1 * 2 / 256) is None
    assert_solved(tasks)


def test_few_rows_and_columns_that_were_changed_are_of_low_rank() -> None:
    """Wherever they lie, even beside the part of the matrix that is looked at first."""
    for start in (0, 3):
        task = torch.zeros(256, 200)
        task[start : start + 5] = torch.randn(5, 200)
        found = low_rank(task, 1.0, 1e-9)
        assert found is not None and len(found.rows) == 5


def test_a_matrix_of_high_rank_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariance, "_probed_rows", None)
    assert low_rank(torch.randn(256, 200), 1.0, 1e-9) is None


def test_one_expert_comes_back() -> None:
    task = torch.randn(6, 9)
    assert torch.equal(merge_by_covariance([task], 0.1), task.double())
    assert torch.equal(merge_by_covariance([task], 0.1, [0.5]), task.double())
    assert_solved([task])


def test_an_expert_without_weight_is_as_good_as_not_listed() -> None:
    tasks = full(12, 20)
    wanted = merge_by_covariance(tasks[:2], 0.1)
    torch.testing.assert_close(merge_by_covariance(tasks, 0.1, [1.0, 1.0, 0.0]), wanted)
    torch.testing.assert_close(merge_by_covariance(tasks, 0.1, [3.0, 3.0, 0.0]), wanted)
    assert not merge_by_covariance(tasks, 0.1, [0.0, 0.0, 0.0]).any()


def test_nothing_changed_merges_to_nothing() -> None:
    assert not merge_by_covariance([torch.zeros(4, 7)] * 2, 0.1).any()


def test_experts_on_inputs_of_their_own_come_back_whole() -> None:
    """What a mean would shrink to a third: the reason for the method."""
    tasks = [torch.zeros(30, 30) for _ in range(3)]
    for index, task in enumerate(tasks):
        task[:, 10 * index : 10 * (index + 1)] = torch.linalg.qr(torch.randn(30, 10)).Q
    total = torch.stack(tasks).sum(0).double()
    assert (merge_by_covariance(tasks, 1e-3) - total).norm() < 1e-2 * total.norm()
    assert (merge_by_covariance(tasks, 1e3) - total / 3).norm() < 1e-2 * total.norm()


def test_a_ridge_of_zero_has_a_solution() -> None:
    merged = merge_by_covariance([torch.randn(40, 3) @ torch.randn(3, 60) for _ in range(2)], 0.0)
    assert merged.isfinite().all()


@pytest.mark.parametrize("n", [1, 6, 7, 8, 14, 20])
def test_two_sums_share_a_memory_and_no_element(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariance, "BLOCK", 7)
    matrices = [torch.randn(5, n, dtype=torch.float64) for _ in range(4)]
    sums = two_grams(n, "cpu")
    for number, matrix in enumerate(matrices):
        add_gram(matrix, sums[number % 2])
    for matrix in matrices[1::2]:
        for block in blocks_of(sums[1]):
            block.zero_()
        add_gram(matrix, sums[1])
    first, last = (torch.stack([matrix.T @ matrix for matrix in own]).sum(0) for own in (matrices[::2], matrices[3:]))
    torch.testing.assert_close(sums[1].triu(), last.triu())  # before the other's blocks are written over
    torch.testing.assert_close(mirror(sums[0]), first)
    assert sums[0].untyped_storage().nbytes() <= 8 * n * (n + 7)


@pytest.mark.parametrize("layout", ["by rows", "by columns"])
def test_a_product_with_an_inverse_takes_the_place_of_what_is_multiplied(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, given = torch.randn(30, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    given, system = given if layout == "by rows" else given.T.contiguous().T, rows.T @ rows
    wanted, factorize, in_place = given @ torch.linalg.inv(system), torch.linalg.cholesky_ex, []

    def noting(matrix: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        in_place.append(matrix is out[0] and matrix.T.is_contiguous())  # else torch copies it, and the factor back
        factorize(matrix, out=out)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", noting)
    found = times_inverse(given, system.triu())
    assert found is given and in_place == [True]
    torch.testing.assert_close(found, wanted)


def test_a_matrix_that_is_not_positive_definite_has_no_inverse_here() -> None:
    for system in (-torch.eye(3), torch.zeros(3, 3), torch.full((3, 3), torch.nan)):
        assert times_inverse(torch.ones(2, 3).double(), system.double()) is None


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_blocks_do_not_show(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariance, "BLOCK", 7)
    matrix = torch.randn(m, n, dtype=torch.float64)
    torch.testing.assert_close(gram(matrix), matrix.T @ matrix)
    assert_solved(full(m, n))
