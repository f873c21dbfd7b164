"""The closed form against dense least squares over all features, and where it is singular."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import reference
from support.rounding import SOLVED_IN_FLOAT64

from mergekit_slta.slta.solver import bootstrap, bootstrap_counts, sample_weights, solve

EXPERTS = 3
SETTINGS = [
    {},
    {"balance": False},
    {"ridge": 0.1},
    {"task_weights": [1.0, 3.0, 0.25]},
    {"balance": False, "ridge": 0.02, "task_weights": [2.0, 0.0, 1.0]},
]


def tasks(deltas: reference.Deltas) -> torch.Tensor:
    return torch.tensor(deltas.task)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=SOLVED_IN_FLOAT64, equal_nan=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_dense_least_squares(settings: dict[str, Any]) -> None:
    """And the share retained is that of the squared feature change."""
    deltas = reference.random_deltas()
    solution = solve(deltas.grams(), tasks(deltas), **settings)
    assert close(solution.alpha, reference.merging_weights(deltas, **settings))
    assert close(solution.retained, reference.retained([deltas], [solution.alpha], settings.get("balance", True)))
    assert solution.rank == EXPERTS


def test_condition_is_that_of_the_scaled_matrix() -> None:
    deltas = reference.random_deltas()
    design, _ = reference.stacked(deltas)
    singular_values = torch.linalg.svdvals(design / design.norm(dim=0))
    expected = (singular_values[0] / singular_values[-1]) ** 2
    assert solve(deltas.grams(), tasks(deltas)).condition == pytest.approx(expected.item(), rel=SOLVED_IN_FLOAT64)


def test_a_sample_without_any_change_is_left_out_when_balanced() -> None:
    deltas = reference.random_deltas()
    before = solve(deltas.grams(), tasks(deltas)).alpha
    deltas.samples.insert(0, torch.zeros(EXPERTS, 12, dtype=torch.float64))
    deltas.task.insert(0, 0)
    assert close(solve(deltas.grams(), tasks(deltas)).alpha, before)
    assert sample_weights(deltas.grams(), balance=True)[0] == 0


# How an extreme third expert's features follow from all experts' features.
EXTREMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "equal": lambda found: found[1],
    "opposite": lambda found: -found[1],
    "zero": lambda found: 0 * found[1],
    "1e6 times larger": lambda found: 1e6 * found[2],
    "1e6 times smaller": lambda found: 1e-6 * found[2],
    "nearly collinear": lambda found: found[1] + 1e-6 * found[2] * found[1].norm() / found[2].norm(),
    "the sum of the others": lambda found: found[0] + found[1],
}


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_experts_get_the_least_weights_that_fit_best(kind: str, balance: bool) -> None:
    """The oracle decomposes the features themselves, whose singular values are the roots of the Gram's eigenvalues."""
    deltas = reference.random_deltas()
    for features in deltas.samples:
        features[2] = EXTREMES[kind](features)
    solution = solve(deltas.grams(), tasks(deltas), balance=balance)
    design, target = reference.stacked(deltas, balance)
    scale = design.norm(dim=0) / target.norm()
    assert solution.alpha.isfinite().all()
    assert close(solution.alpha * scale, reference.merging_weights(deltas, balance=balance) * scale)
    assert solution.rank == EXPERTS - (0 if "times" in kind else 1)


def with_base_task(experts: int = EXPERTS) -> tuple[reference.Deltas, torch.Tensor]:
    """Feature deltas whose last task is the base model's, and each sample's tokens."""
    deltas = reference.random_deltas(samples=(*(4, 5, 3)[:experts], 6), experts=experts)
    return deltas, torch.tensor([1 + row % 4 for row in range(len(deltas.task))])


def dense_with_base(
    deltas: reference.Deltas, tokens: torch.Tensor, drawn: Sequence[int], balance: bool, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merging weights by least squares on drawn samples, and the base model's rows, in the scale of all samples."""
    own, kept = ([row for row in drawn if (deltas.task[row] < EXPERTS) == expert] for expert in (True, False))
    experts = reference.Deltas([deltas.samples[row] for row in own], [deltas.task[row] for row in own])
    design, target = reference.stacked(experts, balance)
    per_token = torch.stack([found.square().sum(1).mean() for found in deltas.samples]) / tokens
    sizes = torch.stack([per_token[tasks(deltas) == task].mean() for task in range(EXPERTS)])
    scale = weight * sizes.log().mean().neg().exp() / len(kept)
    scale = scale if balance else scale * design.square().sum() / EXPERTS**2
    base = torch.cat([(scale / tokens[row]).sqrt() * deltas.samples[row].T for row in kept])
    wanted = torch.cat([target, torch.zeros(len(base)).double()])
    return torch.linalg.lstsq(torch.cat([design, base]), wanted).solution, base


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("weight", [0.3, 2.0])
def test_the_base_models_prompts_are_rows_whose_target_is_no_change(balance: bool, weight: float) -> None:
    deltas, tokens = with_base_task()
    solution = solve(deltas.grams(), tasks(deltas), tokens=tokens, balance=balance, keep_weight=weight)
    expected, base = dense_with_base(deltas, tokens, range(len(tokens)), balance, weight)
    assert close(solution.alpha, expected)
    kept = float(1 - (base @ expected).square().sum() / base.square().sum(0).mean())
    assert solution.kept_base == pytest.approx(kept, rel=SOLVED_IN_FLOAT64)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_weight_of_zero_leaves_the_base_models_prompts_out(settings: dict[str, Any]) -> None:
    deltas, tokens = with_base_task()
    own = tasks(deltas) < EXPERTS
    without = solve(deltas.grams()[own], tasks(deltas)[own], **settings)
    found = solve(deltas.grams(), tasks(deltas), tokens=tokens, keep_weight=0.0, **settings)
    assert torch.equal(found.alpha, without.alpha)


def test_an_expert_that_only_the_base_models_prompts_show_is_not_measured() -> None:
    deltas, tokens = with_base_task()
    for sample, task in zip(deltas.samples, deltas.task, strict=True):
        sample[0] *= task == EXPERTS
    solution = solve(deltas.grams(), tasks(deltas), tokens=tokens)
    assert solution.measured.tolist() == [False, True, True]
    assert solution.alpha[0] == 0
    for sample in deltas.samples:
        sample[0] = 0
    assert close(solve(deltas.grams(), tasks(deltas), tokens=tokens).alpha, solution.alpha)
    for expert in range(EXPERTS):  # whose prompts change nothing at all, as an adapter's do where it has no matrices
        for sample, task in zip(deltas.samples, deltas.task, strict=True):
            sample *= task != expert
        found = solve(deltas.grams(), tasks(deltas), tokens=tokens)
        assert found.alpha.isfinite().all() and found.alpha[0] == 0
    assert not found.alpha.any()


@pytest.mark.parametrize("balance", [True, False])
def test_the_bootstrap_draws_the_base_models_prompts_and_keeps_their_scale(balance: bool) -> None:
    deltas, tokens = with_base_task()
    counts = bootstrap_counts(tasks(deltas), 5, seed=3).long()
    settings: dict[str, Any] = {"tokens": tokens, "balance": balance, "keep_weight": 2.0}
    for drawn, alpha in zip(counts, bootstrap(deltas.grams(), tasks(deltas), 5, seed=3, **settings), strict=True):
        rows = torch.arange(len(tokens)).repeat_interleave(drawn).tolist()
        assert close(alpha, dense_with_base(deltas, tokens, rows, balance, 2.0)[0])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_bootstrap_solves_the_drawn_samples(settings: dict[str, object]) -> None:
    deltas = reference.random_deltas()
    counts = bootstrap_counts(tasks(deltas), 20, seed=3)
    found = bootstrap(deltas.grams(), tasks(deltas), 20, seed=3, **settings)  # type: ignore[arg-type]
    for drawn, alpha in zip(counts, found, strict=True):
        rows = torch.arange(len(deltas.task)).repeat_interleave(drawn.long())
        expected = solve(deltas.grams()[rows], tasks(deltas)[rows], **settings).alpha  # type: ignore[arg-type]
        assert close(alpha, expected)
        assert torch.equal(tasks(deltas)[rows].bincount(), tasks(deltas).bincount())
    assert not torch.equal(counts, bootstrap_counts(tasks(deltas), 20, seed=1))


def test_bootstrap_of_one_sample_says_nothing() -> None:
    deltas = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert bootstrap(deltas @ deltas.mT, torch.tensor([0, 0, 1]), 10).std(0).isnan().all()
