"""The ridge regression of one group of linear maps that share an input, from sums over tokens.

Symbols, as in ``merge.py``: inputs x [d_in] of the merged model, residuals r = y - W_a x [d_out] against the
anchor's map W_a, tasks t with weights s_t, and the change D = W - W_a [d_out, d_in], which minimizes

    sum_t s_t sum_x |D x - r|^2 + ridge * K(D),     s_t = 1 / |sum_x x x^T|_F

with K(D) = kappa |D|^2 and kappa = trace(A) / d_in for A = sum_t s_t sum_x x x^T. A few dimensions of the input may be
so much larger than the others that kappa says nothing about the others: then K(D) = sum_j A_jj |D[:, j]|^2. Where those
few would decide s_t, perhaps by a single token, s_t is computed without them.

The sums are of float64 products: where inputs are rank-deficient or ill-conditioned and the ridge is small, rounding
float32 products makes up as much as 1e-4 of the solution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mergekit_slta.actmat.covariance import add_gram, gram_norm

# The penalty follows A's diagonal if the diagonal's mean is so many times its median.
MASSIVE = 10.0
# s_t leaves out the dimensions whose sum of squares is so many times the 90 % quantile of all dimensions' sums.
DECISIVE = 1000.0
# Where the equations cannot be solved, these multiples of the ridge are tried before the anchor is kept.
LARGER_RIDGES = (1.0, 10.0, 100.0, 1000.0, 10000.0)
SMALLEST_RIDGE = 1e-10  # used for a ridge of zero; with less, inputs that were never seen decide


@dataclass(frozen=True)
class Change:
    """The solution of a regression.

    Attributes:
        matrix: D [d_out, d_in] float64; zero where there is no solution.
        mean: the mean residual [d_out] that is left, weighted as in the regression.
        shares: each task's weight [T] in that mean.
        ridge: the ridge that was used; None where no ridge made the equations solvable.
        enlarged: whether that is more than was asked for.
    """

    matrix: torch.Tensor
    mean: torch.Tensor
    shares: torch.Tensor
    ridge: float | None
    enlarged: bool

    def offset(self, anchor: torch.Tensor, own: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The bias of some rows: the mean residual for any ridge in use, the anchor's for an endless one.

        Args:
            anchor: the anchor's bias [rows].
            own: the experts' biases [T, rows].
            rows: which rows of the regression.
        """
        if not self.shares.any():  # every input was zero
            return anchor
        mean = self.shares @ own.double() + self.mean[rows] - anchor
        return (anchor + mean / (1 + (self.ridge or 0.0) ** 2)).to(anchor.dtype)


class NormalEquations:
    """Sums of a regression, gathered task by task in float64.

    Args:
        inputs, outputs: the numbers of dimensions d_in and d_out.
        ridge: how strongly the change is drawn towards zero.
        device: where the sums are.
        reduce: adds up a tensor in place over the processes whose sums belong together, and returns it.

    Attributes:
        tokens: how many tokens have been added by all processes.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        ridge: float,
        device: torch.device | str = "cpu",
        *,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._ridge = ridge
        self._reduce = reduce
        self.tokens = 0
        shapes: list[tuple[int, ...]] = [(inputs, inputs), (inputs, outputs), (inputs,), (outputs,), ()]
        self._sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
        self._of_task = [torch.zeros_like(total) for total in self._sums]
        self._masses: list[torch.Tensor] = []

    def add(self, inputs: torch.Tensor, residuals: torch.Tensor) -> None:
        """Add tokens of the current task: inputs [n, d_in] and residuals [n, d_out]."""
        moments, cross, input_sum, residual_sum, tokens = self._of_task
        inputs, residuals = inputs.double(), residuals.double()
        add_gram(inputs, moments)
        cross.addmm_(inputs.T, residuals)
        input_sum += inputs.sum(0)
        residual_sum += residuals.sum(0)
        tokens += len(inputs)

    def finish_task(self) -> None:
        """Weight the current task's sums and go on to the next task."""
        for part in self._of_task:
            self._reduce(part)
        tokens = self._of_task[-1]
        norm = gram_norm(_without_decisive(self._of_task[0]))
        weight = torch.where(norm > 0, 1 / norm, 0.0)  # a task none of whose tokens came here has no say
        for total, part in zip(self._sums, self._of_task, strict=True):
            total.addcmul_(part, weight)
        self._masses.append(weight * tokens)
        self.tokens += int(tokens)
        for part in self._of_task:
            part.zero_()

    def solve(self) -> Change:
        """Solve for the change, with a larger ridge where the one asked for does not make the equations solvable."""
        self._of_task.clear()  # its memory is needed
        _, cross, input_sum, residual_sum, _ = self._sums
        masses = torch.stack(self._masses)
        mass = masses.sum().clamp_min(torch.finfo(torch.float64).tiny)
        matrix, used, enlarged = torch.zeros_like(cross.T), None, False
        for factor in LARGER_RIDGES:
            ridge = max(self._ridge, SMALLEST_RIDGE) * factor
            solution = self._try(ridge)
            if solution is not None:
                matrix, used, enlarged = solution, ridge, factor > 1
                break
        return Change(matrix, (residual_sum - matrix @ input_sum) / mass, masses / mass, used, enlarged)

    def _try(self, ridge: float) -> torch.Tensor | None:
        """D [d_out, d_in], or None where the equations are singular or not finite."""
        moments, cross = self._sums[:2]
        diagonal = moments.diagonal().clone()
        mean = diagonal.mean()
        penalty = diagonal if mean > MASSIVE * diagonal.median() else mean.expand_as(diagonal)
        scale = (diagonal + ridge * penalty).rsqrt()  # to a unit diagonal, so that no dimension's unit matters
        scale[diagonal == 0] = 0  # the change of a dimension that is always zero is zero
        scaled = (moments * scale[:, None]).mul_(scale)
        scaled.diagonal().fill_(1.0)
        factor, failed = torch.linalg.cholesky_ex(scaled, upper=True)  # reads what is on and above the diagonal
        del scaled
        if int(failed):
            return None
        solution = torch.cholesky_solve(cross * scale[:, None], factor, upper=True).mul_(scale[:, None])
        return solution.T if bool(torch.isfinite(solution).all()) else None


def _without_decisive(moments: torch.Tensor) -> torch.Tensor:
    """The moments with those of dimensions that would decide their norm alone set to zero."""
    diagonal = moments.diagonal()
    used = diagonal[diagonal > 0]
    if not len(used):
        return moments
    decisive = diagonal > DECISIVE * used.quantile(0.9)
    return moments.where(~(decisive | decisive[:, None]), 0.0) if bool(decisive.any()) else moments
