"""The regression against explicit least squares in float64, and where its equations have no or no good solution.

Most tests run on both forms of its system: sums over the tokens, and the tokens themselves where they are few.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from support.rounding import IN_FLOAT64, regression_rounding, rounding

from mergekit_slta.featcal import regression
from mergekit_slta.featcal.regression import RIDGES, Change, RidgeRegression, Tokens

INPUTS, OUTPUTS = 12, 5
TOKENS_PER_SAMPLE = 5

# The inputs [n, d_in] and residuals [n, d_out] of a task.
Task = tuple[torch.Tensor, torch.Tensor]

both_forms = pytest.mark.parametrize("few", [False, True], ids=["sums", "tokens"])


@pytest.fixture(autouse=True)
def in_float64(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mathematics is judged in float64; ``test_float32_...`` says how far float32 is from that."""
    if "float32" not in request.node.name:
        monkeypatch.setattr(regression, "PRECISION", torch.float64)


def draws(seed: int = 0) -> Callable[..., torch.Tensor]:
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))


def random_tasks(
    tokens: Sequence[int] = (40, 25, 60), noise: float = 0.3, seed: int = 0, inputs: int = INPUTS
) -> list[Task]:
    """Tasks of different sizes, each with a linear map of its own, which noise hides a little."""
    draw = draws(seed)
    tasks = []
    for task, count in enumerate(tokens):
        given = (task + 1) * (draw(count, inputs) + 0.5)
        tasks.append((given, given @ draw(inputs, OUTPUTS) + noise * (draw(count, OUTPUTS) + task)))
    return tasks


def random_prior(inputs: int = INPUTS) -> torch.Tensor:
    """A symmetric positive definite matrix [inputs, inputs] with a unit mean diagonal."""
    root = draws(3)(inputs, inputs).double()
    prior = root @ root.T + 0.1 * torch.eye(inputs)
    return (prior / prior.diagonal().mean()).to(regression.PRECISION)


def solve(
    tasks: Sequence[Task],
    ridge: float | None = 0.003,
    batch: int = 1000,
    *,
    few: bool = False,
    prior: torch.Tensor | None = None,
    weights: Sequence[torch.Tensor] | None = None,
) -> Change:
    """The solution from batches of at most ``batch`` tokens; ``few`` takes the system of the tokens."""
    (_, inputs), (_, outputs) = (part.shape for part in tasks[0])
    near = draws(9)(outputs, inputs)
    equations = RidgeRegression(near, ridge, prior=prior, tokens=0 if few else None)
    token_weights = weights or [*map(_ones, tasks)]

    def tokens_of(task: int) -> Iterator[Tokens]:
        given, residuals = tasks[task]
        samples = torch.arange(len(given)) // TOKENS_PER_SAMPLE
        targets = (given.double() @ near.double().T + residuals).to(regression.PRECISION)
        parts = (part.split(batch) for part in (given, targets, samples, token_weights[task]))
        return zip(*parts, strict=True)

    equations.add_tasks([1.0] * len(tasks), tokens_of)
    assert equations.tokens == sum(len(given) for given, _ in tasks)
    return equations.solve()


def _ones(task: Task) -> torch.Tensor:
    return torch.ones(len(task[0]))


def scaled(tasks: Sequence[Task], weights: Sequence[torch.Tensor] | None = None) -> list[Task]:
    """The rows of each task times (s_t w_x)^(1/2), s_t without the dimensions that would decide it alone."""
    found = []
    for task, own in zip(tasks, weights or map(_ones, tasks), strict=True):
        inputs, residuals = (part.double() * own.double().sqrt()[:, None] for part in task)
        energy = inputs.square().sum(0)
        used = energy[energy > 0]
        few = energy > 1000 * used.quantile(0.9) if len(used) else energy > 0
        others = inputs[:, ~few] if few.sum() <= max(2, len(used) / 100) else inputs
        norm = (others.T @ others).norm()
        root = norm**-0.5 if norm else norm
        found.append((inputs * root, residuals * root))
    return found


def held_rows(rows: Sequence[Task], ridge: float, diagonal: bool, prior: torch.Tensor | None) -> Task:
    """Every token's row of ``scaled``, and one for each input dimension, which holds the solution.

    The latter have the prior for their Gram matrix, or else the unit matrix, apart from each one's strength.
    """
    inputs, targets = (torch.cat(parts) for parts in zip(*rows, strict=True))
    energy = inputs.square().sum(0)
    shape = torch.eye(len(energy)).double() if prior is None else prior
    held = torch.where(energy > 0, energy.clamp(min=energy.median() / 100), energy)
    strengths = held * energy.sum() / held.sum() if diagonal else energy.mean()
    hold = torch.linalg.cholesky(shape.double()).T * (ridge * strengths).sqrt()
    return torch.cat([inputs, hold]), torch.cat([targets, torch.zeros(len(hold), targets.shape[1]).double()])


def least_squares(
    rows: Sequence[Task], ridge: float, diagonal: bool = False, prior: torch.Tensor | None = None
) -> torch.Tensor:
    """D [d_out, d_in] by least squares on ``held_rows``."""
    design, wanted = held_rows(rows, ridge, diagonal, prior)
    norms = design.norm(dim=0)
    size = torch.where(norms > 0, norms, 1.0)  # columns of one size, or the oracle loses digits itself
    solution: torch.Tensor = torch.linalg.lstsq(design / size, wanted, driver="gelsd").solution / size[:, None]
    return solution.T


def condition(rows: Sequence[Task], ridge: float, diagonal: bool, prior: torch.Tensor | None, few: bool) -> float:
    """That of the system that is solved: a solution is off by the rounding of its numbers times this."""
    inputs = torch.cat([inputs for inputs, _ in rows])
    system = inputs.T @ inputs
    shape = torch.eye(len(system)).double() if prior is None else prior.double()
    energy = system.diagonal()
    root = torch.where(energy > 0, energy, 1.0).sqrt() if diagonal else energy.mean().sqrt()
    hold = (shape * root).T * root if root.ndim else shape * root**2
    if few:  # a system of more tokens than directions is held by the ridge alone
        return 1 + float(torch.linalg.eigvals(torch.linalg.solve(hold, system)).abs().max()) / ridge
    unit = (system + ridge * hold).diagonal().rsqrt()  # a diagonal scale costs no digits
    return float(torch.linalg.cond(unit[:, None] * (system + ridge * hold) * unit))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# The solution

WIDE = 48  # input dimensions


def massive(tasks: list[Task]) -> list[Task]:
    """One dimension of all tokens, which H follows, and another of one token, which does not decide s_t."""
    for inputs, _ in tasks:
        inputs[:, 3] *= 100
    tasks[0][0][2, 5] = 1e4
    return tasks


def vanishing(tasks: list[Task]) -> list[Task]:
    """Inputs of which some directions are ten thousand times smaller than others."""
    directions = torch.logspace(0, -4, WIDE)[:, None] * torch.linalg.qr(draws(7)(WIDE, WIDE))[0]
    return [(inputs @ directions, residuals) for inputs, residuals in tasks]


def few_directions(tasks: list[Task]) -> list[Task]:
    """Inputs of which all tokens lie in twelve directions."""
    directions = draws(7)(12, WIDE)
    return [(inputs[:, :12] @ directions, residuals) for inputs, residuals in tasks]


def nearly_silent(tasks: list[Task]) -> list[Task]:
    """Most dimensions of one task, and one of all tasks, are far below the others."""
    tasks[0][0][:, 4:] *= 1e-6
    for inputs, _ in tasks:
        inputs[:, 9] *= 1e-6
    return tasks


def without_dimensions(tasks: list[Task]) -> list[Task]:
    for inputs, _ in tasks:
        inputs[:, [2, 7]] = 0
    return tasks


def repeated(tasks: list[Task]) -> list[Task]:
    return [(inputs.repeat(2, 1), residuals.repeat(2, 1)) for inputs, residuals in tasks]


wide = functools.partial(random_tasks, inputs=WIDE)
CASES: dict[str, list[Task]] = {
    "many tokens": random_tasks(),
    "few tokens": wide((10, 7, 12)),
    "no tokens of a task": wide((11, 0, 9)),
    "one sample of a task": wide((20, TOKENS_PER_SAMPLE)),
    "same tokens": repeated(wide((10, 7, 12))),
    "massive dimensions": massive(wide((10, 7, 12))),
    "massive, others always zero": without_dimensions(massive(wide((10, 7, 12)))),
    "massive, others nearly silent": nearly_silent(massive(wide((70, 80, 60)))),
    "few directions": few_directions(wide((400, 400))),
    "vanishing directions": vanishing(wide((400, 400))),
}


@both_forms
@pytest.mark.parametrize("held", [False, True], ids=["alike", "prior"])
@pytest.mark.parametrize("ridge", [RIDGES[0], 0.003, None])
@pytest.mark.parametrize("case", CASES)
def test_equals_explicit_least_squares(case: str, ridge: float | None, held: bool, few: bool) -> None:
    tasks, draw = CASES[case], draws(5)
    weights = [draw(len(inputs)).double().exp() for inputs, _ in tasks]
    prior = random_prior(tasks[0][0].shape[1]) if held else None
    change = solve(tasks, ridge, batch=7, few=few, prior=prior, weights=weights)
    assert change.ridge is not None and change.ridge in (RIDGES if ridge is None else [ridge])
    rows, massive = scaled(tasks, weights), "massive" in case
    expected = least_squares(rows, change.ridge, massive, prior)
    assert difference(change.matrix, expected) < IN_FLOAT64 * condition(rows, change.ridge, massive, prior, few)


@both_forms
@pytest.mark.parametrize("held", [False, True], ids=["alike", "prior"])
@pytest.mark.parametrize("ridge", [RIDGES[0], 0.1])
@pytest.mark.parametrize("case", ["many tokens", "few tokens", "massive dimensions"])
def test_float32_is_off_by_its_rounding_times_the_condition(case: str, ridge: float, held: bool, few: bool) -> None:
    """What it minimizes is hardly more than the least, even where the matrix itself is hardly determined."""
    tasks = CASES[case]
    prior = random_prior(tasks[0][0].shape[1]) if held else None
    change = solve(tasks, ridge, few=few, prior=prior)
    assert change.matrix.dtype == torch.float32
    rows, massive = scaled(tasks), "massive" in case
    expected = least_squares(rows, ridge, massive, prior)
    assert difference(change.matrix, expected) < rounding() * condition(rows, ridge, massive, prior, few)
    design, wanted = held_rows(rows, ridge, massive, prior)
    reached, least = ((design @ own.double().T - wanted).square().sum() for own in (change.matrix, expected))
    assert reached <= (1 + regression_rounding(ridge)) * least


@both_forms
def test_an_input_that_is_nearly_silent_gets_no_large_weight(few: bool) -> None:
    """Another prompt may wake it; one that is always silent gets none."""
    sign = torch.where(torch.arange(100) % 3 > 0, 1.0, -1.0)
    inputs = torch.stack([torch.full((100,), 1000.0), torch.ones(100) * (-1) ** torch.arange(100), 1e-6 * sign], 1)
    change = solve([(inputs, 1e-3 * sign[:, None])], 1.0, few=few)
    assert change.matrix.abs().max() < 0.1  # without the median, 500


@both_forms
def test_a_task_whose_inputs_are_mostly_silent_counts_like_others(few: bool) -> None:
    tasks = random_tasks((200, 200), inputs=100)
    tasks[0][0][:, 9:] *= 1e-8
    roots = [(rows.double().T @ rows.double()).norm() ** -0.5 for rows, _ in tasks]
    rows = [(x.double() * root, y.double() * root) for (x, y), root in zip(tasks, roots, strict=True)]
    change = solve(tasks, 1.0, few=few)
    assert difference(change.matrix, least_squares(rows, 1.0)) < IN_FLOAT64 * condition(rows, 1.0, False, None, few)


# The ridge that left-out samples choose


def error_left_out(tasks: Sequence[Task], ridge: float, prior: torch.Tensor | None) -> float:
    """The squared error on each half of the samples of what least squares on the other half gives."""
    error = 0.0
    for half in (0, 1):
        kept, left = [], []
        for inputs, residuals in scaled(tasks):
            own = torch.arange(len(inputs)) // TOKENS_PER_SAMPLE % 2 == half
            kept.append((inputs[own], residuals[own]))
            left.append((inputs[~own], residuals[~own]))
        change = least_squares(kept, ridge, False, prior)
        error += sum(float((residuals - inputs @ change.T).square().sum()) for inputs, residuals in left)
    return error


@both_forms
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("noise", [0.3, 30.0])
def test_left_out_samples_choose_the_ridge(noise: float, held: bool, few: bool) -> None:
    prior = random_prior() if held else None
    for seed in range(3):
        tasks = random_tasks((20, 15, 25), noise, seed)
        errors = {ridge: error_left_out(tasks, ridge, prior) for ridge in RIDGES}
        # A few combinations of the outputs estimate the error.
        assert errors[solve(tasks, None, batch=7, few=few, prior=prior).ridge or 0.0] < 1.05 * min(errors.values())


@both_forms
@pytest.mark.parametrize("tokens", [(TOKENS_PER_SAMPLE, TOKENS_PER_SAMPLE), (40, TOKENS_PER_SAMPLE)])
def test_a_task_of_one_sample_leaves_none_out(tokens: tuple[int, ...], few: bool) -> None:
    assert solve(random_tasks(tokens), None, few=few).ridge == 1.0


# What the tokens do not tell


@both_forms
@pytest.mark.parametrize("held", [False, True])
def test_inputs_that_are_all_zero_keep_the_anchor(held: bool, few: bool) -> None:
    """Then no task has any weight, and none of the experts' biases counts."""
    draw = draws()
    tasks = [(torch.zeros(9, INPUTS), draw(9, OUTPUTS)) for _ in range(2)]
    change = solve(tasks, 0.1, few=few, prior=random_prior() if held else None)
    anchor, own = draw(OUTPUTS), draw(2, OUTPUTS)
    assert not change.matrix.any()
    assert torch.equal(change.offset(anchor, own), anchor)


@both_forms
@pytest.mark.parametrize("ridge", [0.003, None])
@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "residuals"])
def test_a_token_that_is_not_finite_keeps_the_anchor(part: int, ridge: float | None, few: bool) -> None:
    tasks = random_tasks()
    tasks[1][part][3, 2] = torch.nan
    change = solve(tasks, ridge, few=few)
    assert change.ridge is None
    assert torch.equal(change.matrix, torch.zeros(OUTPUTS, INPUTS).double())


# The bias


@both_forms
def test_the_mean_is_what_the_solution_leaves_of_the_residuals(few: bool) -> None:
    tasks, draw = random_tasks(), draws(5)
    weights = [draw(len(inputs)).double().exp() for inputs, _ in tasks]
    change = solve(tasks, 0.2, few=few, weights=weights)
    masses, left = [], []
    for (inputs, residuals), own in zip(tasks, weights, strict=True):
        x = inputs.double()
        size = 1 / ((x.T * own) @ x).norm()
        masses.append(size * own.sum())
        left.append(size * own @ (residuals.double() - x @ change.matrix.T))
    assert torch.allclose(change.shares, torch.stack(masses) / sum(masses), rtol=0, atol=IN_FLOAT64)
    assert difference(change.mean, torch.stack(left).sum(0) / sum(masses)) < IN_FLOAT64


def test_the_bias_takes_the_mean_residual_for_any_ridge_in_use_and_the_anchors_for_an_endless_one() -> None:
    change, draw = solve(random_tasks(), 0.003), draws()
    anchor, own = draw(OUTPUTS), draw(3, OUTPUTS)
    expected = change.shares @ own.double() + change.mean
    drawn = 0.003**2 * float((expected - anchor).abs().max())  # by so much the ridge draws towards the anchor's
    assert torch.allclose(change.offset(anchor, own).double(), expected, rtol=rounding(), atol=drawn)
    assert torch.equal(change.offset(anchor[1:3], own[:, 1:3], slice(1, 3)), change.offset(anchor, own)[1:3])
    assert torch.equal(solve(random_tasks(), 1e12).offset(anchor, own), anchor)
