"""The regression of ``regression.py`` in a system of tokens by tokens, for fewer tokens than dimensions of the input.

With the tokens' inputs as the rows of X [n, d_in] and their residuals as those of R [n, d_out], each multiplied by
(s_t w_x)^(1/2), and K(D) = sum_j p_j |D[:, j]|^2, the same change is

    D^T = P^-1 X^T (X P^-1 X^T + ridge I)^-1 R,     P = diag(p)

because (X^T X + ridge P)^-1 X^T = P^-1 X^T (X P^-1 X^T + ridge I)^-1. Its error on left-out samples needs no more than
the products of their inputs with those of the others. A prior whose matrix is not diagonal would have to be inverted.
"""

from __future__ import annotations

import torch

from mergekit_slta.actmat.covariance import add_gram, gram
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.featcal.regression import (
    PREDICTED,
    SMALLEST_RIDGE,
    UNKNOWN_RIDGE,
    Change,
    NormalEquations,
    first_change,
    lowest_ridge,
    not_decisive,
    penalties,
    random_combinations,
    solve_positive,
)


class TokenEquations:
    """The tokens of a regression, gathered task by task in float64; see ``NormalEquations``.

    Args:
        inputs, outputs: the numbers of dimensions d_in and d_out.
        ridge: how strongly the change is drawn towards zero; None to choose it by left-out samples.
        device: where the tokens are.

    Attributes:
        tokens: how many tokens have been added.
    """

    def __init__(self, inputs: int, outputs: int, ridge: float | None, device: torch.device | str = "cpu") -> None:
        self._ridge = ridge
        self.tokens = 0
        empty = torch.zeros(0, inputs + outputs + 1, dtype=torch.float64, device=device)
        # Rows of X, rows of R, the roots of the weights, and the half of the samples; None yet of the current task.
        self._nothing = (*empty.split([inputs, outputs, 1], 1), torch.zeros(0, dtype=torch.int64, device=device))
        self._task, self._tasks = [self._nothing], [self._nothing]
        self._masses: list[torch.Tensor] = []
        self._halved = True  # whether each task has samples in both halves

    def add(self, inputs: torch.Tensor, residuals: torch.Tensor, samples: torch.Tensor, weights: torch.Tensor) -> None:
        """Add tokens of the current task; see ``NormalEquations.add``."""
        roots = weights.to(inputs.device, torch.float64).sqrt()[:, None]
        self._task.append((inputs * roots, residuals * roots, roots, samples.to(inputs.device) % 2))

    def finish_task(self) -> None:
        """Weight the current task's tokens and go on to the next task."""
        inputs, residuals, roots, halves = map(torch.cat, zip(*self._task, strict=True))
        self._task = [self._nothing]
        mass, counts = roots.square().sum(), halves.bincount(minlength=2)
        self._halved &= bool(counts.all() or not counts.any())
        # Tokens by tokens or dimensions by dimensions, the norm is the same.
        norm = gram(inputs[:, not_decisive(inputs.square().sum(0))].T).norm()
        weight = torch.where(norm > 0, 1 / norm, 0.0)  # a task none of whose tokens came here has no say
        for part in (inputs, residuals, roots):
            part *= weight.sqrt()
        self._tasks.append((inputs, residuals, roots, halves))
        self._masses.append(weight * mass)
        self.tokens += len(roots)

    def solve(self) -> Change:
        """Solve for the change, with a larger ridge where the one asked for does not make the equations solvable."""
        inputs, residuals, roots, halves = map(torch.cat, zip(*self._tasks, strict=True))
        self._tasks.clear()  # their memory is needed
        ridge = self._ridge
        if ridge is None:
            ridge = _best_ridge(inputs, residuals, halves) if self._halved else UNKNOWN_RIDGE
        input_sum, residual_sum = (roots.T @ inputs)[0], (roots.T @ residuals)[0]
        scale = _scale(inputs)
        inputs *= scale

        def solution_of(ridge: float) -> torch.Tensor | None:
            system = add_gram(inputs.T, inputs.new_zeros(len(inputs), len(inputs)))
            system.diagonal().add_(ridge)
            found = solve_positive(system, residuals)
            return None if found is None else (inputs.T @ found).mul_(scale[:, None])

        return first_change(solution_of, max(ridge, SMALLEST_RIDGE), input_sum, residual_sum, torch.stack(self._masses))


def equations_for(
    inputs: int,
    outputs: int,
    ridge: float | None,
    device: torch.device | str,
    *,
    tokens: int,
    ranks: Ranks,
    prior: torch.Tensor | None = None,
) -> NormalEquations | TokenEquations:
    """The equations that take less: a system of the tokens or, as sums over processes need it, of the dimensions.

    Args:
        inputs, outputs, ridge, device, prior: as for ``NormalEquations``.
        tokens: how many tokens this process will add.
        ranks: the processes that share the tokens.
    """
    if by_tokens(tokens, inputs, ranks.count, prior is not None):
        return TokenEquations(inputs, outputs, ridge, device)
    return NormalEquations(inputs, outputs, ridge, device, prior=prior, reduce=ranks.sum)


def by_tokens(tokens: int, inputs: int, processes: int, prior: bool) -> bool:
    """Whether a regression is solved in a system of its tokens, which are all in one process."""
    return tokens < inputs and processes == 1 and not prior


def _scale(rows: torch.Tensor) -> torch.Tensor:
    """p^(-1/2) [d_in], zero for a dimension that is always zero."""
    penalty = penalties(rows.square().sum(0))
    return torch.where(penalty > 0, penalty.rsqrt(), 0.0)


def _best_ridge(rows: torch.Tensor, residuals: torch.Tensor, halves: torch.Tensor) -> float:
    """The ridge that predicts each half of the samples best from the other."""
    predicted = residuals @ random_combinations(residuals.shape[1], PREDICTED).to(rows.device)
    parts = []
    for half in range(2):
        own = halves == half
        scaled = rows * _scale(rows[own])
        products = scaled @ scaled[own].T
        parts.append((products[own], products[~own], predicted[own], predicted[~own]))
        del scaled, products  # their memory is needed for the other half

    def error(ridge: float) -> float:
        total = 0.0
        for own, others, given, wanted in parts:
            system = own.clone()
            system.diagonal().add_(ridge)
            found = solve_positive(system, given)
            if found is None:
                return torch.inf
            total += float((others @ found - wanted).square().sum())
        return total

    return lowest_ridge(error)
