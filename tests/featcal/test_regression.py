"""The regression against explicit least squares in float64, and where its equations have no or no good solution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch

from mergekit_slta.actmat import covariance
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.featcal import regression
from mergekit_slta.featcal.few_tokens import TokenEquations, equations_for
from mergekit_slta.featcal.regression import (
    DECISIVE,
    LARGER_RIDGES,
    MASSIVE,
    PREDICTED,
    RIDGES,
    SMALLEST_RIDGE,
    UNKNOWN_RIDGE,
    Change,
    NormalEquations,
    _Sums,
)

INPUTS, OUTPUTS = 12, 5
TOKENS_PER_SAMPLE = 5
TOLERANCE = 1e-8  # all sums are of float64 products

# The inputs [n, INPUTS] and residuals [n, OUTPUTS] of a task.
Task = tuple[torch.Tensor, torch.Tensor]


def draws(seed: int = 0) -> Callable[..., torch.Tensor]:
    """``torch.randn`` with a seed."""
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))


def random_tasks(tokens: Sequence[int] = (40, 25, 60), noise: float = 0.3, seed: int = 0) -> list[Task]:
    """Tasks of different sizes, each with a linear map of its own, which noise hides a little."""
    draw = draws(seed)
    tasks = []
    for task, count in enumerate(tokens):
        inputs = (task + 1) * (draw(count, INPUTS) + 0.5)
        tasks.append((inputs, inputs @ draw(INPUTS, OUTPUTS) + noise * (draw(count, OUTPUTS) + task)))
    return tasks


def solve(
    tasks: Sequence[Task],
    ridge: float | None = 0.003,
    batch: int = 1000,
    prior: torch.Tensor | None = None,
    *,
    weights: Sequence[torch.Tensor] | None = None,
    by_tokens: bool = False,
) -> Change:
    """The solution from batches of at most ``batch`` tokens."""
    (_, inputs), (_, outputs) = (part.shape for part in tasks[0])
    equations: NormalEquations | TokenEquations = NormalEquations(inputs, outputs, ridge, prior=prior)
    if by_tokens:
        equations = TokenEquations(inputs, outputs, ridge, prior=None if prior is None else prior.clone())
    for (inputs_of_task, residuals), own in zip(tasks, weights or map(_ones, tasks), strict=True):
        samples = torch.arange(len(inputs_of_task)) // TOKENS_PER_SAMPLE
        for start in range(0, len(inputs_of_task), batch):
            part = slice(start, start + batch)
            equations.add(inputs_of_task[part], residuals[part], samples[part], own[part])
        equations.finish_task()
    assert equations.tokens == sum(len(inputs_of_task) for inputs_of_task, _ in tasks)
    return equations.solve()


def _ones(task: Task) -> torch.Tensor:
    return torch.ones(len(task[0]))


def scales(tasks: Sequence[Task]) -> list[float]:
    """s_t of every task, without the dimensions that would decide it alone."""
    found = []
    for inputs, _ in tasks:
        energy = inputs.double().square().sum(0)
        others = inputs.double()[:, energy <= DECISIVE * energy[energy > 0].quantile(0.9)]
        found.append(float(1 / (others.T @ others).norm()))
    return found


def explicit(
    tasks: Sequence[Task], ridge: float, *, diagonal: bool = False, prior: torch.Tensor | None = None
) -> torch.Tensor:
    """D [OUTPUTS, INPUTS] by least squares on every token's row, held by a row for each input dimension.

    The rows that hold it have the prior for their Gram matrix, or else the unit matrix, apart from each one's strength.
    """
    roots = [scale**0.5 for scale in scales(tasks)]
    rows = torch.cat([root * inputs.double() for root, (inputs, _) in zip(roots, tasks, strict=True)])
    targets = torch.cat([root * residuals.double() for root, (_, residuals) in zip(roots, tasks, strict=True)])
    energy = rows.square().sum(0)
    shape = torch.eye(len(energy)).double() if prior is None else prior
    hold = torch.linalg.cholesky(shape).T * (ridge * (energy if diagonal else energy.mean())).sqrt()
    design, wanted = torch.cat([rows, hold]), torch.cat([targets, torch.zeros(len(energy), targets.shape[1]).double()])
    solution: torch.Tensor = torch.linalg.lstsq(design, wanted, driver="gelsd").solution.T
    return solution


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# The solution


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.003, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_equals_explicit_least_squares(count: int, ridge: float) -> None:
    tasks = random_tasks()[:count]
    change = solve(tasks, ridge)
    assert change.ridge == max(ridge, SMALLEST_RIDGE)
    assert difference(change.matrix, explicit(tasks, ridge)) < TOLERANCE


WIDE = 48  # input dimensions


def few_tokens(draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    return draw(15, WIDE)


def few_directions(draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    return draw(400, 12) @ draws(7)(12, WIDE)


def few_different_tokens(draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    return draw(20, WIDE).repeat(20, 1)


def vanishing_directions(draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    return draw(400, WIDE) * torch.logspace(0, -4, WIDE) @ torch.linalg.qr(draws(7)(WIDE, WIDE))[0]


def dominant_direction(draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    return draw(400, WIDE) + 30 * draw(400, 1) * draws(7)(1, WIDE)


def few_directions_and_a_dominant_one(draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    return few_directions(draw) + 100 * draw(400, 1) * draws(8)(1, WIDE)


HARD = [
    few_tokens, few_directions, few_different_tokens,
    vanishing_directions, dominant_direction, few_directions_and_a_dominant_one,
]  # fmt: skip


def tasks_of(inputs_of: Callable[[Callable[..., torch.Tensor]], torch.Tensor]) -> list[Task]:
    """Two tasks with a map each, which noise hides a little."""
    draw, tasks = draws(1), []
    for _ in range(2):
        inputs = inputs_of(draw)
        tasks.append((inputs, 0.1 * inputs @ draw(WIDE, 32) + 0.3 * draw(len(inputs), 32)))
    return tasks


@pytest.mark.parametrize("ridge", [1e-6, 0.9e-4, 1.1e-4, 0.003, 0.03, 0.3])
@pytest.mark.parametrize("inputs", HARD, ids=lambda inputs: inputs.__name__)
def test_no_digits_are_lost_where_inputs_are_rank_deficient_or_ill_conditioned(
    inputs: Callable[[Callable[..., torch.Tensor]], torch.Tensor], ridge: float
) -> None:
    tasks = tasks_of(inputs)
    assert difference(solve(tasks, ridge, batch=100).matrix, explicit(tasks, ridge)) < 1e-5


def test_a_larger_ridge_changes_less() -> None:
    sizes = [float(solve(random_tasks(), ridge).matrix.norm()) for ridge in (0.0, 0.1, 10.0, 1e6, 1e12)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-11 * sizes[0]


@pytest.mark.parametrize("batch", [1, 7])
def test_batches_do_not_matter(batch: int) -> None:
    tasks = random_tasks()
    assert difference(solve(tasks, batch=batch).matrix, solve(tasks).matrix) < TOLERANCE


def test_the_order_of_the_tokens_and_of_the_tasks_does_not_matter() -> None:
    tasks = random_tasks()
    backwards = [(inputs.flip(0), residuals.flip(0)) for inputs, residuals in reversed(tasks)]
    first, second = solve(tasks, batch=8), solve(backwards, batch=8)
    assert difference(second.matrix, first.matrix) < TOLERANCE
    assert difference(second.mean, first.mean) < TOLERANCE
    assert torch.allclose(second.shares.flip(0), first.shares, rtol=TOLERANCE)


@pytest.mark.parametrize("ridge", [0.003, None])
@pytest.mark.parametrize("block", [1, 5, INPUTS])
def test_products_in_blocks_are_the_same(block: int, ridge: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = solve(random_tasks(), ridge).matrix
    monkeypatch.setattr(covariance, "BLOCK", block)
    assert difference(solve(random_tasks(), ridge).matrix, whole) < TOLERANCE


def test_what_all_inputs_have_in_common_costs_no_digits() -> None:
    tasks = [(inputs + 30 * (task + 1), residuals) for task, (inputs, residuals) in enumerate(random_tasks())]
    assert difference(solve(tasks, 1e-4, batch=16).matrix, explicit(tasks, 1e-4)) < 1e-5


def test_every_task_counts_alike_whatever_the_size_of_its_inputs() -> None:
    """The maps of two tasks on inputs of one distribution are averaged, although one task's inputs are larger."""
    draw = draws()
    maps = [draw(INPUTS, OUTPUTS).double() for _ in range(2)]
    inputs = draw(400, INPUTS).double()
    change = solve([(scale * inputs, scale * inputs @ own) for scale, own in zip((1, 100), maps, strict=True)], 0.0)
    assert difference(change.matrix, (maps[0] + maps[1]).T / 2) < TOLERANCE


@pytest.mark.parametrize("ridge", [0.003, None])
def test_a_token_of_weight_three_is_three_tokens(ridge: float | None) -> None:
    counts = torch.tensor([1, 3])
    found, expected = (NormalEquations(INPUTS, OUTPUTS, ridge) for _ in range(2))
    for inputs, residuals in random_tasks():
        samples = torch.arange(len(inputs)) // TOKENS_PER_SAMPLE
        weights = counts[torch.arange(len(inputs)) % 2]
        found.add(inputs, residuals, samples, weights)
        repeated = [part.repeat_interleave(weights, 0) for part in (inputs, residuals, samples)]
        expected.add(repeated[0], repeated[1], repeated[2], torch.ones(len(repeated[0])))
        found.finish_task()
        expected.finish_task()
    assert 3 * found.tokens > expected.tokens > found.tokens
    weighted, several = found.solve(), expected.solve()
    assert weighted.ridge == several.ridge
    assert difference(weighted.matrix, several.matrix) < TOLERANCE
    assert difference(weighted.mean, several.mean) < TOLERANCE
    assert torch.allclose(weighted.shares, several.shares)


def test_tokens_of_all_tasks_are_counted() -> None:
    equations = NormalEquations(INPUTS, OUTPUTS, 0.003)
    for inputs, residuals in random_tasks((40, 25)):
        equations.add(inputs, residuals, torch.zeros(len(inputs), dtype=torch.long), torch.ones(len(inputs)))
        equations.finish_task()
    assert equations.tokens == 65


# The prior


def random_prior(inputs: int = INPUTS) -> torch.Tensor:
    """A symmetric positive definite matrix [inputs, inputs] with a unit mean diagonal."""
    root = draws(3)(inputs, inputs).double()
    prior = root @ root.T + 0.1 * torch.eye(inputs)
    return prior / prior.diagonal().mean()


@pytest.mark.parametrize("tokens", [(40, 25, 60), (3, 4)])
@pytest.mark.parametrize("ridge", [1e-6, 0.03, 3.0])
def test_a_prior_holds_each_direction_as_it_says(ridge: float, tokens: tuple[int, ...]) -> None:
    tasks, prior = random_tasks(tokens), random_prior()
    found = solve(tasks, ridge, prior=prior).matrix
    assert difference(found, explicit(tasks, ridge, prior=prior)) < TOLERANCE
    assert difference(found, explicit(tasks, ridge)) > 1e-7


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_a_prior_does_not_hold_the_others_where_a_dimension_is_massive(size: float) -> None:
    tasks, prior = massive_tasks(4, size), random_prior()
    expected = explicit(tasks, 0.05, diagonal=True, prior=prior)
    found = solve(tasks, 0.05, prior=prior).matrix
    assert all(difference(found[:, j], expected[:, j]) < 1e-6 for j in range(INPUTS))


def test_a_prior_alone_gives_the_anchor() -> None:
    nothing = [(torch.zeros(9, INPUTS), torch.zeros(9, OUTPUTS))]
    assert not solve(nothing, 0.1, prior=random_prior()).matrix.any()


# The ridge that left-out samples choose


def error_left_out(tasks: Sequence[Task], ridge: float, prior: torch.Tensor | None) -> float:
    """The squared error on each half of the samples of what least squares on the other half gives."""
    error, weights = 0.0, scales(tasks)
    for half in (0, 1):
        kept, left = [], []
        for weight, (inputs, residuals) in zip(weights, tasks, strict=True):
            other = torch.arange(len(inputs)) // TOKENS_PER_SAMPLE % 2 == half
            # The task's weight in the whole regression, not in the half of it.
            scaled = (inputs[other].double() * weight**0.5, residuals[other].double() * weight**0.5)
            kept.append(scaled)
            left.append((inputs[~other].double() * weight**0.5, residuals[~other].double() * weight**0.5))
        rows, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
        shape = torch.eye(INPUTS).double() if prior is None else prior
        hold = (ridge * rows.square().sum(0).mean()).sqrt() * torch.linalg.cholesky(shape).T
        design, wanted = torch.cat([rows, hold]), torch.cat([targets, torch.zeros(INPUTS, OUTPUTS).double()])
        change = torch.linalg.lstsq(design, wanted, driver="gelsd").solution
        error += sum(float((residuals - inputs @ change).square().sum()) for inputs, residuals in left)
    return error


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_left_out_samples_choose_the_ridge(noise: float, held: bool) -> None:
    tasks, prior = random_tasks((20, 15, 25), noise), random_prior() if held else None
    change = solve(tasks, None, prior=prior)
    errors = {ridge: error_left_out(tasks, ridge, prior) for ridge in RIDGES}
    assert change.ridge is not None and not change.enlarged
    assert errors[change.ridge] < 1.05 * min(errors.values())
    assert difference(change.matrix, explicit(tasks, change.ridge, prior=prior)) < TOLERANCE


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0, 30.0])
def test_the_search_for_the_ridge_ends_where_trying_all_would(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    attempt = NormalEquations._solution

    def counting(self: NormalEquations, *system: torch.Tensor, ridge: float) -> torch.Tensor | None:
        tried.append(ridge)
        return attempt(self, *system, ridge=ridge)

    monkeypatch.setattr(NormalEquations, "_solution", counting)
    for seed in range(5):
        tasks = random_tasks((40, 25, 60), noise, seed)
        tried.clear()
        found = solve(tasks, None).ridge or 0.0
        errors = {ridge: error_left_out(tasks, ridge, None) for ridge in RIDGES}
        assert errors[found] < 1.01 * min(errors.values())  # which a few combinations of the outputs estimate
        steps = abs(RIDGES.index(found) - len(RIDGES) // 2)
        assert len(tried) <= 2 * (3 + steps) + 1


def test_memory_holds_one_set_of_moments_and_two_of_products_while_a_task_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With halves of the samples apart, two of moments; the products of inputs with outputs are of all samples."""
    monkeypatch.setattr(covariance, "BLOCK", 2)
    inputs, outputs = 300, 400
    for ridge, sets in ((0.003, 1), (None, 2)):
        equations = NormalEquations(inputs, outputs, ridge)
        samples, ones = torch.arange(8), torch.ones(8)
        equations.add(torch.randn(8, inputs), torch.randn(8, outputs), samples, ones)
        tensors = _tensors(list(vars(equations).values()))
        held = sum(
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
        )
        needed = 8 * (sets * inputs**2 + 2 * inputs * outputs)
        assert needed <= held < 1.02 * needed + 8 * PREDICTED * (4 * inputs + outputs)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, _Sums)) else []


def test_noise_asks_for_a_larger_ridge() -> None:
    found = [solve(random_tasks((40,), noise), None).ridge or 0.0 for noise in (0.0, 3.0, 30.0)]
    assert found == sorted(found) and 0 < found[0] < 0.01 < 0.1 < found[-1]


def test_batches_and_the_order_of_tasks_do_not_change_the_chosen_ridge() -> None:
    tasks = random_tasks()
    found = [solve(tasks, None), solve(tasks, None, batch=7), solve(tasks[::-1], None)]
    assert len({change.ridge for change in found}) == 1
    assert all(difference(change.matrix, found[0].matrix) < TOLERANCE for change in found)


@pytest.mark.parametrize("tokens", [(TOKENS_PER_SAMPLE, TOKENS_PER_SAMPLE), (40, TOKENS_PER_SAMPLE)])
def test_a_task_of_one_sample_leaves_none_out(tokens: tuple[int, ...]) -> None:
    tasks = random_tasks(tokens)
    change = solve(tasks, None)
    assert change.ridge == UNKNOWN_RIDGE
    assert difference(change.matrix, explicit(tasks, UNKNOWN_RIDGE)) < TOLERANCE


# What the tokens do not tell


def test_a_task_without_tokens_has_no_say() -> None:
    tasks = random_tasks()
    with_empty = solve([tasks[0], (torch.zeros(0, INPUTS), torch.zeros(0, OUTPUTS)), *tasks[1:]])
    without = solve(tasks)
    assert torch.equal(with_empty.matrix, without.matrix)
    assert torch.equal(with_empty.mean, without.mean)
    assert torch.equal(with_empty.shares[[0, 2, 3]], without.shares)
    assert with_empty.shares[1] == 0


@pytest.mark.parametrize("ridge", [0.0, 0.003])
def test_input_dimensions_that_are_always_zero_keep_the_anchors_columns(ridge: float) -> None:
    tasks = random_tasks()
    for inputs, _ in tasks:
        inputs[:, [2, 7]] = 0
    change = solve(tasks, ridge)
    assert change.ridge == max(ridge, SMALLEST_RIDGE)
    assert not change.matrix[:, [2, 7]].any()
    assert difference(change.matrix, explicit(tasks, ridge)) < TOLERANCE


@pytest.mark.parametrize("tokens", [INPUTS // 2, INPUTS - 1])
@pytest.mark.parametrize("ridge", [0.0, 1e-9, 1e-6])
def test_fewer_tokens_than_dimensions_are_followed_with_the_smallest_change(ridge: float, tokens: int) -> None:
    """What only the rounding of products speaks for is not learnt."""
    for seed in range(20):
        tasks = random_tasks((tokens,), noise=0.0, seed=seed)
        inputs, residuals = (part.double() for part in tasks[0])
        smallest = torch.linalg.lstsq(inputs, residuals, driver="gelsd").solution.T
        change = solve(tasks, ridge)
        assert change.ridge is not None and change.ridge < 1e-4
        assert difference(inputs @ change.matrix.T, residuals) < 1e-3
        assert difference(change.matrix, smallest) < 0.1


def test_a_ridge_that_suffices_is_not_enlarged() -> None:
    tasks = random_tasks((INPUTS // 2,))
    change = solve(tasks, 0.01)
    assert change.ridge == 0.01
    assert difference(change.matrix, explicit(tasks, 0.01)) < 1e-4


def test_the_first_ridge_that_suffices_is_taken_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = NormalEquations._solution

    def fail(self: NormalEquations, *system: torch.Tensor, ridge: float) -> torch.Tensor | None:
        return attempt(self, *system, ridge=ridge) if ridge >= 0.25 else None

    monkeypatch.setattr(NormalEquations, "_solution", fail)
    tasks = random_tasks()
    change = solve(tasks, 0.003)
    assert change.ridge == pytest.approx(0.3)
    assert difference(change.matrix, explicit(tasks, 0.3)) < TOLERANCE


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "residuals"])
def test_what_is_not_finite_keeps_the_anchor(part: int, value: float) -> None:
    tasks = random_tasks()
    tasks[1][part][3, 2] = value
    change = solve(tasks)
    assert change.ridge is None
    assert torch.equal(change.matrix, torch.zeros(OUTPUTS, INPUTS).double())


def test_all_larger_ridges_are_tried_before_the_anchor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    monkeypatch.setattr(NormalEquations, "_solution", lambda self, *system, ridge: tried.append(ridge))
    assert solve(random_tasks(), 0.5).ridge is None
    assert tried == [0.5 * factor for factor in LARGER_RIDGES]


# Massive dimensions


def massive_tasks(dimension: int, size: float) -> list[Task]:
    """Tasks with one input dimension that is ``size`` times as large as the others."""
    tasks = random_tasks((200, 200))
    for inputs, _ in tasks:
        inputs[:, dimension] *= size
    return tasks


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_the_ridge_follows_the_diagonal_where_a_dimension_is_massive(size: float) -> None:
    tasks = massive_tasks(4, size)
    expected = explicit(tasks, 0.05, diagonal=True)
    found = solve(tasks, 0.05).matrix
    assert difference(found, explicit(tasks, 0.05)) > 0.01
    # Column by column: that of the massive dimension is as much smaller as the dimension is larger.
    assert all(difference(found[:, j], expected[:, j]) < 1e-5 for j in range(INPUTS))


def test_the_ridge_follows_the_mean_where_no_dimension_is_massive() -> None:
    tasks = massive_tasks(4, (0.5 * MASSIVE) ** 0.5)
    assert difference(solve(tasks, 0.05).matrix, explicit(tasks, 0.05)) < TOLERANCE


def test_the_unit_of_a_massive_dimension_changes_no_function() -> None:
    """A thousand times the input and a thousandth of the anchor's column: the residuals are what they were."""
    (inputs, residuals), *_ = massive_tasks(4, 1e3)
    unit = torch.ones(INPUTS)
    unit[4] = 1e3
    first, second = (solve([(inputs * scale, residuals)], 0.01) for scale in (torch.ones(INPUTS), unit))
    outputs = inputs.double() @ first.matrix.T
    assert difference((inputs * unit).double() @ second.matrix.T, outputs) < 1e-5
    assert difference(second.mean, first.mean) < 1e-5


def test_a_massive_dimension_does_not_hold_the_others_at_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ridge by the mean of the diagonal would: what a regression without any massive dimension leaves tells."""
    (inputs, residuals), *_ = random_tasks((200,), noise=0.0)
    inputs = inputs.clone()
    inputs[:, 4] *= 1e3

    def left(ridge: float) -> float:
        return difference(inputs.double() @ solve([(inputs, residuals)], ridge).matrix.T, residuals.double())

    assert left(0.003) < 0.02
    monkeypatch.setattr(regression, "MASSIVE", torch.inf)
    assert left(0.003) > 0.5


def test_a_few_massive_tokens_do_not_decide_what_a_task_counts() -> None:
    """One token in twenty of the first task is massive in a dimension that is zero at all others."""
    tasks = [(inputs.clone(), residuals) for inputs, residuals in random_tasks((200, 200), noise=0.0)]
    for inputs, _ in tasks:
        inputs[:, 4] = 0
    expected = solve(tasks, 0.01).matrix
    tasks[0][0][::20, 4] = 1e3
    found = solve(tasks, 0.01).matrix
    others = [j for j in range(INPUTS) if j != 4]
    assert difference(found[:, others], expected[:, others]) < 0.1
    (inputs, residuals), own = tasks[0], [j for j in range(200) if j % 20]
    left = difference(inputs[own].double() @ found.T, residuals[own].double())
    assert left < 1.5 * difference(inputs[own].double() @ expected.T, residuals[own].double())


def test_dimensions_that_are_always_zero_make_no_other_decisive() -> None:
    tasks = random_tasks((200, 200))
    for inputs, _ in tasks:
        inputs[:, 3:] = 0
    assert difference(solve(tasks, 0.05).matrix, explicit(tasks, 0.05, diagonal=True)) < TOLERANCE


# A system of tokens


def few(tokens: Sequence[int] = (10, 7, 12), noise: float = 0.3) -> list[Task]:
    """Tasks whose tokens are fewer than the dimensions of their inputs, in all."""
    draw, tasks = draws(2), []
    for task, count in enumerate(tokens):
        inputs = (task + 1) * (draw(count, WIDE) + 0.5)
        tasks.append((inputs, inputs @ draw(WIDE, OUTPUTS) + noise * (draw(count, OUTPUTS) + task)))
    return tasks


def few_and_massive() -> list[Task]:
    """One dimension of all tokens, which the penalty follows, and another of one token, which does not decide s_t."""
    tasks = few()
    for inputs, _ in tasks:
        inputs[:, 3] *= 100
    tasks[0][0][2, 5] = 1e4
    return tasks


def few_without_dimensions() -> list[Task]:
    tasks = few()
    for inputs, _ in tasks:
        inputs[:, [2, 7]] = 0
    return tasks


def few_and_massive_without_dimensions() -> list[Task]:
    """A dimension is zero in all samples, and another in every second sample, so in one half."""
    tasks = few_and_massive()
    for inputs, _ in tasks:
        inputs[:, 9] = 0
        inputs[torch.arange(len(inputs)) // TOKENS_PER_SAMPLE % 2 == 0, 11] = 0
    return tasks


FEW: dict[str, list[Task]] = {
    "few": few(),
    "noise": few(noise=10.0),
    "as many as dimensions": few((30, WIDE - 30)),
    "more": few((40, 25, 60)),
    "one task": few((20,)),
    "no tokens of a task": few((11, 0, 9)),
    "one sample of a task": few((20, TOKENS_PER_SAMPLE)),
    "massive": few_and_massive(),
    "massive without dimensions": few_and_massive_without_dimensions(),
    "dimensions without inputs": few_without_dimensions(),
    "same tokens": [(inputs.repeat(2, 1), residuals.repeat(2, 1)) for inputs, residuals in few()],
    "nothing": [(torch.zeros(9, WIDE), torch.ones(9, OUTPUTS))],
}


@pytest.mark.parametrize("prior", [None, random_prior(WIDE)], ids=["alike", "prior"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ridge", [1e-6, 0.003, 1.0, None])
@pytest.mark.parametrize("tasks", FEW.values(), ids=FEW)
def test_a_system_of_tokens_gives_the_same_change(
    tasks: list[Task], ridge: float | None, weighted: bool, prior: torch.Tensor | None
) -> None:
    draw = draws(5)
    weights = [draw(len(inputs)).exp() if weighted else torch.ones(len(inputs)) for inputs, _ in tasks]
    found = solve(tasks, ridge, batch=4, prior=prior, weights=weights, by_tokens=True)
    expected = solve(tasks, ridge, prior=prior, weights=weights)
    tolerance = TOLERANCE if prior is None else 10 * TOLERANCE  # the prior is factorized too
    assert found.ridge == expected.ridge and found.enlarged == expected.enlarged
    assert (found.matrix - expected.matrix).norm() <= tolerance * expected.matrix.norm()
    assert torch.allclose(found.mean, expected.mean, rtol=tolerance, atol=tolerance)
    assert torch.allclose(found.shares, expected.shares, rtol=tolerance)
    anchor, own = draw(OUTPUTS).double(), draw(len(tasks), OUTPUTS)
    offsets = found.offset(anchor, own), expected.offset(anchor, own)
    assert torch.allclose(*offsets, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.003, 1.0, None])
@pytest.mark.parametrize("kind", sorted(set(FEW) - {"no tokens of a task", "nothing"}))
def test_a_system_of_tokens_equals_explicit_least_squares(kind: str, ridge: float | None) -> None:
    """With weights, which multiply a token's row by their roots."""
    tasks, draw = FEW[kind], draws(5)
    weights = [draw(len(inputs)).double().exp() for inputs, _ in tasks]
    rows = [
        (inputs * own.sqrt()[:, None], residuals * own.sqrt()[:, None])
        for (inputs, residuals), own in zip(tasks, weights, strict=True)
    ]
    change = solve(tasks, ridge, weights=weights, by_tokens=True)
    expected = explicit(rows, change.ridge or 0.0, diagonal="massive" in kind)
    assert difference(change.matrix, expected) < (1e-5 if ridge == 0 or "massive" in kind else TOLERANCE)


@pytest.mark.parametrize("ridge", [1e-6, 0.003, 0.3])
@pytest.mark.parametrize("inputs", HARD, ids=lambda inputs: inputs.__name__)
def test_a_system_of_tokens_loses_no_digits(
    inputs: Callable[[Callable[..., torch.Tensor]], torch.Tensor], ridge: float
) -> None:
    tasks = tasks_of(inputs)
    assert difference(solve(tasks, ridge, by_tokens=True).matrix, explicit(tasks, ridge)) < 1e-5


@pytest.mark.parametrize("ridge", [0.003, None])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "residuals"])
@pytest.mark.parametrize("prior", [None, random_prior(WIDE)], ids=["alike", "prior"])
def test_a_token_that_is_not_finite_keeps_the_anchor(
    prior: torch.Tensor | None, part: int, value: float, ridge: float | None
) -> None:
    tasks = few()
    tasks[1][part][3, 2] = value
    change = solve(tasks, ridge, prior=prior, by_tokens=True)
    assert change.ridge is None
    assert torch.equal(change.matrix, torch.zeros(OUTPUTS, WIDE).double())


def test_a_system_of_tokens_tries_larger_ridges(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = regression.finite_solution
    tried: list[float] = []

    def fail(target: torch.Tensor, system: torch.Tensor) -> torch.Tensor | None:
        tried.append(float(system.trace()))
        return attempt(target, system) if len(tried) > 2 else None

    monkeypatch.setattr("mergekit_slta.featcal.few_tokens.finite_solution", fail)
    change = solve(few(), 0.003, by_tokens=True)
    assert change.ridge == pytest.approx(0.3) and change.enlarged
    assert difference(change.matrix, explicit(few(), 0.3)) < TOLERANCE


def test_a_system_of_tokens_is_for_fewer_tokens_than_dimensions_in_one_process() -> None:
    def chosen(tokens: int, processes: int = 1, ridge: float | None = 0.1, prior: torch.Tensor | None = None) -> type:
        return type(equations_for(INPUTS, 1, ridge, "cpu", tokens=tokens, ranks=Ranks(0, processes), prior=prior))

    assert chosen(INPUTS - 1) is TokenEquations
    assert {chosen(INPUTS), chosen(INPUTS - 1, processes=2)} == {NormalEquations}
    assert chosen(INPUTS - 1, ridge=None, prior=random_prior()) is TokenEquations
    assert chosen(INPUTS // 2 - 1, prior=random_prior()) is TokenEquations
    assert chosen(INPUTS // 2, prior=random_prior()) is NormalEquations


# The bias


def test_the_mean_is_what_the_solution_leaves_of_the_residuals() -> None:
    tasks = random_tasks()
    change = solve(tasks, 0.2)
    masses = torch.tensor([s * len(inputs) for s, (inputs, _) in zip(scales(tasks), tasks, strict=True)]).double()
    means = torch.stack([(r.double() - x.double() @ change.matrix.T).mean(0) for x, r in tasks])
    assert torch.allclose(change.shares, masses / masses.sum(), rtol=1e-6)
    assert difference(change.mean, masses @ means / masses.sum()) < 1e-5


def test_the_bias_takes_the_mean_residual_for_any_ridge_in_use() -> None:
    change = solve(random_tasks(), 0.003)
    draw = draws()
    anchor, own = draw(OUTPUTS), draw(3, OUTPUTS)
    expected = change.shares @ own.double() + change.mean
    assert torch.allclose(change.offset(anchor, own).double(), expected, rtol=1e-4, atol=1e-5)
    part = change.offset(anchor[1:3], own[:, 1:3], slice(1, 3))
    assert torch.equal(part, change.offset(anchor, own)[1:3])


def test_the_bias_is_the_anchors_for_an_endless_ridge() -> None:
    draw = draws()
    anchor, own = draw(OUTPUTS), draw(3, OUTPUTS)
    assert torch.equal(solve(random_tasks(), 1e12).offset(anchor, own), anchor)


def test_the_bias_is_the_anchors_where_every_input_is_zero() -> None:
    """Then no task has any weight, and none of the experts' biases counts."""
    draw = draws()
    change = solve([(torch.zeros(9, INPUTS), draw(9, OUTPUTS)) for _ in range(2)])
    anchor, own = draw(OUTPUTS), draw(2, OUTPUTS)
    assert not change.matrix.any()
    assert torch.equal(change.offset(anchor, own), anchor)
