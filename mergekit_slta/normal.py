"""The ridge regression of one group of linear maps that share an input, from sums over tokens.

Symbols (section 2 of ``featcal.py``): inputs x [d_in] of the merged model, residuals r = y - W_a x [d_out] against the
anchor's map W_a, tasks t with weights s_t, and the change D = W - W_a [d_out, d_in], which minimizes

    sum_t s_t sum_x |D x - r|^2 + ridge * K(D),     s_t = 1 / |sum_x x x^T|_F

with K(D) = kappa |D|^2 and kappa = trace(A) / d_in for A = sum_t s_t sum_x x x^T. Where a few dimensions of the input
are so much larger than the others that kappa says nothing about these, K(D) = sum_j A_jj |D[:, j]|^2 instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mergekit_slta.ranks import Ranks

# So many times the median of A's diagonal its mean must be for the ridge to follow the diagonal.
MASSIVE = 10.0
# The ridges to try, relative to the one asked for, before the anchor is kept.
LARGER_RIDGES = (1.0, 10.0, 100.0, 1000.0)
SMALLEST_RIDGE = 1e-8  # of a ridge that is enlarged because the one asked for, perhaps zero, was too small
BLOCK = 1024  # columns of the inputs' products that are computed at once, above the diagonal only


@dataclass(frozen=True)
class Change:
    """The solution of a regression.

    Attributes:
        matrix: D [d_out, d_in] float64; zero where no ridge made the equations solvable.
        mean: the mean residual [d_out] that is left, weighted as in the regression.
        shares: each task's weight [T] in that mean.
        ridge: the ridge that was used; None where the anchor is kept.
    """

    matrix: torch.Tensor
    mean: torch.Tensor
    shares: torch.Tensor
    ridge: float | None

    def offset(self, anchor: torch.Tensor, own: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The bias of some rows: the mean residual for any ridge in use, the anchor's for an endless one.

        Args:
            anchor: the anchor's bias [rows].
            own: the experts' biases [T, rows].
            rows: which rows of the regression.
        """
        mean = self.shares @ own.double() + self.mean[rows] - anchor
        return (anchor + mean / (1 + (self.ridge or 0.0) ** 2)).to(anchor.dtype)


class NormalEquations:
    """Sums of a regression, gathered task by task in float64 from float32 products.

    Args:
        inputs, outputs: the numbers of dimensions d_in and d_out.
        device: where the sums are.
        ranks: the processes whose sums belong together.

    Attributes:
        tokens: how many tokens have been added by all processes.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device, ranks: Ranks | None = None) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self._ranks = ranks or Ranks()
        self._moments, self._cross = zeros(inputs, inputs), zeros(inputs, outputs)  # A and sum_t s_t sum_x x r^T
        self._input_sum, self._residual_sum = zeros(inputs), zeros(outputs)
        self._task = [zeros(inputs, inputs), zeros(inputs, outputs), zeros(inputs), zeros(outputs), zeros(1)]
        self._masses: list[torch.Tensor] = []
        self.tokens = 0

    def add(self, inputs: torch.Tensor, residuals: torch.Tensor) -> None:
        """Add tokens of the current task: inputs [n, d_in] and residuals [n, d_out]."""
        moments, cross, input_sum, residual_sum, tokens = self._task
        for start in range(0, inputs.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            moments[block, start:] += inputs[:, block].T @ inputs[:, start:]
        cross += inputs.T @ residuals
        input_sum += inputs.sum(0, dtype=torch.float64)
        residual_sum += residuals.sum(0, dtype=torch.float64)
        tokens += len(inputs)

    def finish_task(self) -> None:
        """Weight the current task's sums and go on to the next task."""
        for part in self._task:
            self._ranks.sum(part)
        moments, cross, input_sum, residual_sum, tokens = self._task
        lower = torch.ones_like(moments, dtype=torch.bool).tril(-1)
        moments[lower] = moments.T[lower]
        norm = moments.norm()
        weight = torch.where(norm > 0, 1 / norm, 0.0)  # a task none of whose tokens came here has no say
        self._moments.add_(moments.mul_(weight))
        self._cross.add_(cross.mul_(weight))
        self._input_sum.add_(input_sum * weight)
        self._residual_sum.add_(residual_sum * weight)
        self._masses.append(weight * tokens[0])
        self.tokens += int(tokens)
        for part in self._task:
            part.zero_()

    def solve(self, ridge: float) -> Change:
        """Solve for the change, with a larger ridge where the one asked for does not make the equations solvable."""
        masses = torch.stack(self._masses)
        shares = masses / masses.sum().clamp_min(torch.finfo(torch.float64).tiny)
        matrix, used = torch.zeros_like(self._cross.T), None
        for factor in LARGER_RIDGES:
            tried = ridge if factor == 1 else max(ridge, SMALLEST_RIDGE) * factor
            solution = self._try(tried)
            if solution is not None:
                matrix, used = solution, tried
                break
        mean = (self._residual_sum - matrix @ self._input_sum) / masses.sum().clamp_min(torch.finfo(torch.float64).tiny)
        return Change(matrix, mean, shares, used)

    def _try(self, ridge: float) -> torch.Tensor | None:
        """D [d_out, d_in], or None where the equations are singular or not finite."""
        diagonal = self._moments.diagonal()
        mean = diagonal.mean()
        penalty = diagonal if mean > MASSIVE * diagonal.median() else torch.full_like(diagonal, float(mean))
        penalized = diagonal + ridge * penalty
        scale = penalized.rsqrt()  # to a unit diagonal, so that no dimension's unit matters to the factorization
        unused = diagonal == 0  # the change of a dimension that is always zero is zero
        scale[unused] = 0
        scaled = self._moments * scale[:, None] * scale
        scaled.diagonal().fill_(1.0)
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if int(failed):
            return None
        solution = torch.cholesky_solve(self._cross * scale[:, None], factor) * scale[:, None]
        return solution.T if bool(torch.isfinite(solution).all()) else None
