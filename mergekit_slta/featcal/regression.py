"""The ridge regression of one group of linear maps that share an input, from sums over tokens.

Symbols, as in ``merge.py``: inputs x [d_in] of the merged model, residuals r = y - W_a x [d_out] against the
anchor's map W_a, tasks t with weights s_t, and the change D = W - W_a [d_out, d_in], which minimizes

    sum_t s_t sum_x |D x - r|^2 + ridge * K(D),     s_t = 1 / |sum_x x x^T|_F

with K(D) = kappa |D|^2 and kappa = trace(A) / d_in for A = sum_t s_t sum_x x x^T. A few dimensions of the input may be
so much larger than the others that kappa says nothing about the others: then K(D) = sum_j A_jj |D[:, j]|^2. Where those
few would decide s_t, perhaps by a single token, s_t is computed without them.

The sums are first made of float32 products, and the error that their rounding causes in the solution is measured: a
few random combinations of the columns of A and of the right-hand side are summed up in float64 too, which costs little,
and the equations are solved for the difference. Where the error is too large (inputs that are rank-deficient or
ill-conditioned, with a small ridge), all tokens are added once more with float64 products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# The penalty follows A's diagonal if the diagonal's mean is so many times its median.
MASSIVE = 10.0
# s_t leaves out the dimensions whose sum of squares is so many times the 90 % quantile of all dimensions' sums.
DECISIVE = 1000.0
# Where the equations cannot be solved, these multiples of the ridge are tried before the anchor is kept.
LARGER_RIDGES = (1.0, 10.0, 100.0, 1000.0, 10000.0)
SMALLEST_RIDGE = 1e-10  # used for a ridge of zero; with less, inputs that were never seen decide
BLOCK = 256  # rows of the inputs' products that are computed at once, from the diagonal on
ROUNDING = 2e-6  # the largest part of the solution that the rounding of float32 products may make up
PROBES = 4  # random combinations of columns by which that is measured


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
        exact: use float64 products from the start.

    Attributes:
        tokens: how many tokens have been added by all processes.
        exact: whether the sums are of float64 products.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        ridge: float,
        device: torch.device | str = "cpu",
        *,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        exact: bool = False,
    ) -> None:
        self._ridge = ridge
        self._reduce = reduce
        self._device = device
        draw = torch.Generator().manual_seed(0)
        self._probes = [
            torch.randn(size, PROBES, generator=draw, dtype=torch.float64).to(device) for size in (inputs, outputs)
        ]
        self._precise = True
        self._start(exact)

    def _start(self, exact: bool) -> None:
        self.exact = exact
        self.tokens = 0
        inputs, outputs = map(len, self._probes)
        shapes: list[tuple[int, ...]] = [(inputs, inputs), (inputs, outputs), (inputs,), (outputs,)]
        shapes += [(inputs, 2 * PROBES), ()]  # what float64 products make of the probes, and the number of tokens
        self._sums = [torch.zeros(shape, dtype=torch.float64, device=self._device) for shape in shapes]
        self._of_task = [torch.zeros_like(total) for total in self._sums]
        self._masses: list[torch.Tensor] = []
        # What a batch's inputs have in common would take up most digits of a float32 product, so each is summed up
        # without its mean: this mean, the sums of the inputs without and with it, and the sum of the residuals.
        self._centered: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, inputs: torch.Tensor, residuals: torch.Tensor) -> None:
        """Add tokens of the current task: inputs [n, d_in] and residuals [n, d_out]."""
        moments, cross, *_, probed, tokens = self._of_task
        if self.exact:
            inputs, residuals = inputs.double(), residuals.double()
        else:
            parts = inputs @ self._probes[0].to(inputs.dtype), residuals @ self._probes[1].to(residuals.dtype)
            for part, combined in zip(inputs.split(BLOCK), torch.cat(parts, 1).split(BLOCK), strict=True):
                probed += part.double().T @ combined.double()
        center = inputs.mean(0)
        inputs = inputs - center
        for start in range(0, inputs.shape[1], BLOCK):
            moments[start : start + BLOCK, start:] += inputs[:, start : start + BLOCK].T @ inputs[:, start:]
        cross += inputs.T @ residuals
        center, centered_sum = center.double(), _sum(inputs)
        self._centered.append((center, centered_sum, centered_sum + len(inputs) * center, _sum(residuals)))
        tokens += len(inputs)

    def _add_centers(self) -> None:
        """Turn the current task's sums over inputs without their batch's mean into sums over inputs."""
        if not self._centered:
            return
        moments, cross, input_sum, residual_sum, *_ = self._of_task
        centers, centered, whole, residuals = map(torch.stack, zip(*self._centered, strict=True))
        moments.addmm_(centers.T, whole).addmm_(centered.T, centers)
        cross.addmm_(centers.T, residuals)
        input_sum += whole.sum(0)
        residual_sum += residuals.sum(0)
        self._centered.clear()

    def finish_task(self) -> None:
        """Weight the current task's sums and go on to the next task."""
        self._add_centers()
        for part in self._of_task:
            self._reduce(part)
        tokens = self._of_task[-1]
        norm = _mirrored_norm(_without_decisive(self._of_task[0]))
        weight = torch.where(norm > 0, 1 / norm, 0.0)  # a task none of whose tokens came here has no say
        for total, part in zip(self._sums, self._of_task, strict=True):
            total.addcmul_(part, weight)
        self._masses.append(weight * tokens)
        self.tokens += int(tokens)
        for part in self._of_task:
            part.zero_()

    def solve(self, gather: Callable[[NormalEquations], object] | None = None) -> Change:
        """Solve for the change, with a larger ridge where the one asked for does not make the equations solvable.

        Args:
            gather: adds all tasks once more, should float32 products not suffice; without it they have to.
        """
        if gather is None or self.exact:
            return self._solve(LARGER_RIDGES)
        change = self._solve(LARGER_RIDGES[:1])
        failed = torch.tensor(float(change.ridge is None or not self._precise))
        if not self._reduce(failed):  # on no process
            return change
        self._start(exact=True)
        gather(self)
        return self._solve(LARGER_RIDGES)

    def _solve(self, factors: Sequence[float]) -> Change:
        self._of_task.clear()  # its memory is needed
        _, cross, input_sum, residual_sum, *_ = self._sums
        masses = torch.stack(self._masses)
        mass = masses.sum().clamp_min(torch.finfo(torch.float64).tiny)
        matrix, used, enlarged = torch.zeros_like(cross.T), None, False
        for factor in factors:
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
        solution = torch.cholesky_solve(cross * scale[:, None], factor, upper=True)
        if not self.exact:
            self._precise = self._is_precise(solution, factor, scale)
        solution.mul_(scale[:, None])
        return solution.T if bool(torch.isfinite(solution).all()) else None

    def _is_precise(self, solution: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor) -> bool:
        """Whether the rounding of float32 products makes up little of a solution, in its unit and in that of ``scale``.

        Their rounding of the moments counts as much as it does for the probes, by the size of what they multiply.
        """
        moments, cross, *_, probed, _ = self._sums
        products = torch.cat([_mirrored_product(moments, self._probes[0]), cross @ self._probes[1]], 1)
        noise = torch.cholesky_solve((products - probed) * scale[:, None], factor, upper=True)
        sizes, energy = torch.linalg.vector_norm(solution, dim=1), moments.diagonal()
        noise[:, :PROBES] *= (energy.sqrt() * scale * sizes).norm() / energy.sum().sqrt()
        noises = torch.linalg.vector_norm(noise, dim=1) / PROBES**0.5
        return all(bool((unit * noises).norm() <= ROUNDING * (unit * sizes).norm()) for unit in (1.0, scale))


def _sum(features: torch.Tensor) -> torch.Tensor:
    """The sum over tokens [n, d] in float64; few are added up in float32 first, which is twenty times faster."""
    return torch.stack([part.sum(0) for part in features.split(64)]).sum(0, dtype=torch.float64)


def _without_decisive(moments: torch.Tensor) -> torch.Tensor:
    """The moments with those of dimensions that would decide their norm alone set to zero."""
    diagonal = moments.diagonal()
    used = diagonal[diagonal > 0]
    if not len(used):
        return moments
    decisive = diagonal > DECISIVE * used.quantile(0.9)
    return moments.where(~(decisive | decisive[:, None]), 0.0) if bool(decisive.any()) else moments


def _mirrored_product(upper: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix, of which only blocks from the diagonal on are there, times another matrix."""
    product = torch.empty_like(right)
    for start in range(0, len(upper), BLOCK):
        stop = start + BLOCK
        product[start:stop] = upper[:start, start:stop].T @ right[:start] + upper[start:stop, start:] @ right[start:]
    return product


def _mirrored_norm(upper: torch.Tensor) -> torch.Tensor:
    """The Frobenius norm of a symmetric matrix, of which only blocks from the diagonal on are there."""
    starts = range(0, len(upper), BLOCK)
    inside = torch.stack([upper[i : i + BLOCK, i : i + BLOCK].square().sum() for i in starts])
    beside = torch.stack([upper[i : i + BLOCK, i + BLOCK :].square().sum() for i in starts])
    return (inside.sum() + 2 * beside.sum()).sqrt()
