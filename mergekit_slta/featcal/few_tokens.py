"""The regression of ``regression.py`` in a system of tokens by tokens, for fewer tokens than dimensions of the input.

With the tokens' inputs as the rows of X [n, d_in] and their residuals as those of R [n, d_out], each multiplied by
(s_t w_x)^(1/2), and with H [d_in, d_in] such that K(D) = trace(D H D^T), the same change is

    D^T = H^-1 X^T (X H^-1 X^T + ridge I)^-1 R

because (X^T X + ridge H)^-1 X^T = H^-1 X^T (X H^-1 X^T + ridge I)^-1. With H = V^T V, all that is needed is X V^-1, the
inputs in units of what holds the change. Its error on left-out samples needs no more than the products of their inputs
with those of the others. So a prior is factorized once, where the sums of ``regression.py`` are for every ridge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergekit_slta.actmat.covariance import add_gram, gram
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.featcal.regression import (
    PREDICTED,
    SMALLEST_RIDGE,
    UNKNOWN_RIDGE,
    Change,
    NormalEquations,
    finite_solution,
    first_change,
    lowest_ridge,
    not_decisive,
    penalties,
    random_combinations,
)


class TokenEquations:
    """The tokens of a regression, gathered task by task in float64; see ``NormalEquations``.

    Args:
        inputs, outputs: the numbers of dimensions d_in and d_out.
        ridge: how strongly the change is drawn towards zero; None to choose it by left-out samples.
        device: where the tokens are.
        prior: as for ``NormalEquations``; it is used up.

    Attributes:
        tokens: how many tokens have been added.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        ridge: float | None,
        device: torch.device | str = "cpu",
        *,
        prior: torch.Tensor | None = None,
    ) -> None:
        self._ridge = ridge
        self._prior = prior
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
        input_sum, residual_sum = (roots.T @ inputs)[0], (roots.T @ residuals)[0]
        searched = self._ridge is None and self._halved
        own = [halves == half for half in range(2 if searched else 0)]
        rows = _Rows(inputs, self._prior, [*own, torch.ones_like(halves, dtype=torch.bool)])
        del inputs, self._prior
        ridge = UNKNOWN_RIDGE if self._ridge is None else self._ridge
        if searched:
            ridge = _best_ridge(rows, residuals, own)
        whitened = rows.whitened(-1)

        def solution_of(ridge: float) -> torch.Tensor | None:
            system = add_gram(whitened.T, whitened.new_zeros(len(whitened), len(whitened)))
            system.diagonal().add_(ridge)
            found = finite_solution(residuals.T.clone(memory_format=torch.contiguous_format), system)
            return None if found is None else rows.unwhitened(found @ whitened)

        return first_change(solution_of, max(ridge, SMALLEST_RIDGE), input_sum, residual_sum, torch.stack(self._masses))


class _Rows:
    """The tokens' inputs X and what holds the change, by the penalties of parts of the tokens.

    With the penalties p of the dimensions and a prior P = U^T U, what holds the change is H = diag(p)^(1/2) P
    diag(p)^(1/2), so that V^-1 = diag(p)^(-1/2) U^-1.

    Args:
        inputs: X [n, d_in], which are used up.
        prior: P [d_in, d_in], which is used up, or None for the unit matrix.
        parts: for each part [n] bool, which tokens are in it; all of them in the last.
    """

    def __init__(self, inputs: torch.Tensor, prior: torch.Tensor | None, parts: Sequence[torch.Tensor]) -> None:
        self._inputs = inputs
        self._prior = prior
        penalty = [penalties(inputs[part].square().sum(0)) for part in parts]
        # p^(-1/2) of each part; zero for a dimension that is always zero.
        self._scales = torch.stack([torch.where(own > 0, own.rsqrt(), 0.0) for own in penalty])
        self._root: tuple[torch.Tensor, torch.Tensor] | None = None  # U, and which dimensions it leaves out
        self._one_factor = bool(((self._scales == 0) == (self._scales[-1] == 0)).all())
        # Where no dimension is held more than another, X U^-1 serves all parts.
        self._alike = bool(((self._scales == self._scales[:, :1]) & (self._scales > 0)).all())
        if prior is not None and self._alike:
            self._divide(inputs, self._scales[-1])

    def whitened(self, part: int) -> torch.Tensor:
        """X V^-1 [n, d_in] by a part's penalties; by the last part's it takes the place of X."""
        scale = self._scales[part]
        scaled = self._inputs.mul_(scale) if part == -1 else self._inputs * scale
        return scaled if self._prior is None or self._alike else self._divide(scaled, scale)

    def unwhitened(self, changes: torch.Tensor) -> torch.Tensor:
        """changes [k, d_in], which are used up, times V^-T by the last part's penalties."""
        scale = self._scales[-1]
        if self._prior is not None:
            columns = changes.T
            torch.linalg.solve_triangular(self._factor(scale), columns, upper=True, out=columns)
        return changes.mul_(scale)

    def _divide(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Turn rows [n, d_in] into rows U^-1, in place."""
        return torch.linalg.solve_triangular(self._factor(scale), rows, upper=True, left=False, out=rows)

    def _factor(self, scale: torch.Tensor) -> torch.Tensor:
        """U [d_in, d_in] without the dimensions that are always zero, which have no say in the others."""
        assert self._prior is not None
        absent = scale == 0
        if self._root is None or not torch.equal(self._root[1], absent):
            self._root = None  # its memory is needed
            prior = self._prior if self._one_factor else self._prior.clone()
            prior[absent], prior[:, absent] = 0, 0
            prior.diagonal()[absent] = 1
            prior = prior.mT  # the same matrix, in the order that is factorized without a copy
            self._root = torch.linalg.cholesky(prior, upper=True, out=prior), absent
        return self._root[0]


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
        inputs, outputs, ridge, device, prior: as for ``NormalEquations``; the prior may be used up.
        tokens: how many tokens this process will add.
        ranks: the processes that share the tokens.
    """
    if by_tokens(tokens, inputs, ranks.count, prior=prior is not None, search=ridge is None):
        return TokenEquations(inputs, outputs, ridge, device, prior=prior)
    return NormalEquations(inputs, outputs, ridge, device, prior=prior, reduce=ranks.sum)


def by_tokens(tokens: int, inputs: int, processes: int, *, prior: bool, search: bool) -> bool:
    """Whether a regression is solved in a system of its tokens, which are all in one process.

    Without a search for the ridge, the sums need no more than one factorization either, and a prior is another one.
    """
    most = inputs // 2 if prior and not search else inputs
    return tokens < most and processes == 1


def _best_ridge(rows: _Rows, residuals: torch.Tensor, halves: Sequence[torch.Tensor]) -> float:
    """The ridge that predicts each half of the samples, the first parts of the rows, best from the other."""
    predicted = random_combinations(residuals.shape[1], PREDICTED).to(residuals.device).T @ residuals.T
    parts = []
    for half, own in enumerate(halves):
        whitened = rows.whitened(half)
        products = whitened @ whitened[own].T
        parts.append((products[own], products[~own], predicted[:, own], predicted[:, ~own]))
        del whitened, products  # their memory is needed for the other half

    def error(ridge: float) -> float:
        total = 0.0
        for own, others, given, wanted in parts:
            system = own.clone()
            system.diagonal().add_(ridge)
            found = finite_solution(given.clone(), system)
            if found is None:
                return torch.inf
            total += float((found @ others.T - wanted).square().sum())
        return total

    return lowest_ridge(error)
