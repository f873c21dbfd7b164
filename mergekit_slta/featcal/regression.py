"""The ridge regression of one group of linear maps that share an input, from sums over tokens.

Symbols, as in ``merge.py``: inputs x [d_in] of the merged model with weights w_x, residuals r = y - W_a x [d_out]
against the anchor's map W_a, tasks t with weights s_t, and the change D = W - W_a [d_out, d_in], which minimizes

    sum_t s_t sum_x w_x |D x - r|^2 + ridge * K(D),     s_t = 1 / |sum_x w_x x x^T|_F

with K(D) = kappa |D|^2 and kappa = trace(A) / d_in for A = sum_t s_t sum_x w_x x x^T. A few dimensions of the input
may be so much larger than the others that kappa says nothing about the others: then K(D) = sum_j A_jj |D[:, j]|^2.
Where those few would decide s_t, perhaps by a single token, s_t is computed without them.

A prior P [d_in, d_in], whose diagonal has the mean 1, says in which directions of the input the change is drawn towards
zero more than in others: then K(D) = kappa trace(D P D^T), or sum_ij (A_ii A_jj)^(1/2) P_ij D[:, i] D[:, j] where some
dimensions are so much larger.

A ridge that is not given is the one of ``RIDGES`` that predicts left-out samples best: the samples of every task are
dealt to two halves; D is solved from one half with a ridge, and its error is summed over the other, and the reverse.
The error has one minimum in all but rare cases, so the search goes from the middle ridge downhill. It is measured on a
few random combinations of the outputs, so that only these have sums for each half: those of inputs and outputs, the
larger ones, are of all samples.

Where a map has more inputs than tokens, ``few_tokens.py`` solves the same in a smaller system.

The sums are of float64 products: where inputs are rank-deficient or ill-conditioned and the ridge is small, rounding
float32 products makes up as much as 1e-4 of the solution.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mergekit_slta.actmat.covariance import add_gram, blocks_of, gram_norm, mirror, times_inverse, two_grams

# The penalty follows A's diagonal if the diagonal's mean is so many times its median.
MASSIVE = 10.0
# s_t leaves out the dimensions whose sum of squares is so many times the 90 % quantile of all dimensions' sums.
DECISIVE = 1000.0
# Where the equations cannot be solved, these multiples of the ridge are tried before the anchor is kept.
LARGER_RIDGES = (1.0, 10.0, 100.0, 1000.0, 10000.0)
RIDGES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
UNKNOWN_RIDGE = 0.1  # where a task does not have samples in both halves
PREDICTED = 64  # random combinations of the outputs by which the error on left-out samples is estimated
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


class _Sums:
    """Sums over tokens, zero at first: of all samples, and of each of the halves into which they are dealt.

    Args:
        moments: for each half the zero matrix [d_in, d_in] for the products of the inputs, to which ``add_gram`` adds.
        outputs: the number of dimensions d_out.
        combined: the number of combinations of the residuals.
    """

    def __init__(self, moments: list[torch.Tensor], outputs: int, combined: int) -> None:
        inputs, halves = len(moments[0]), len(moments)
        zeros = moments[0].new_zeros
        self.inputs, self.residuals, self.cross = zeros(inputs), zeros(outputs), zeros(outputs, inputs)
        self.moments = moments
        self.predicted = [zeros(combined, inputs) for _ in range(halves)]  # combinations of the residuals with inputs
        self.masses, self.tokens = zeros(halves), zeros(halves)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (self.inputs, self.residuals, self.cross, *self.predicted, self.masses, self.tokens)
        for moments in self.moments:
            yield from blocks_of(moments)


class NormalEquations:
    """Sums of a regression, gathered task by task in float64.

    Args:
        inputs, outputs: the numbers of dimensions d_in and d_out.
        ridge: how strongly the change is drawn towards zero; None to choose it by left-out samples.
        device: where the sums are.
        prior: P [d_in, d_in] float64, symmetric and positive definite, if the change is not drawn alike everywhere.
        reduce: adds up a tensor in place over the processes whose sums belong together, and returns it.

    Attributes:
        tokens: how many tokens have been added by all processes.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        ridge: float | None,
        device: torch.device | str = "cpu",
        *,
        prior: torch.Tensor | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._ridge = ridge
        self._prior = prior
        self._reduce = reduce
        self.tokens = 0
        combined, halves = (PREDICTED, 2) if ridge is None else (0, 1)
        self._combinations = random_combinations(outputs, combined).to(device)
        # Of all tasks with their weights, and of the current one before it has a weight.
        moments = zip(*[two_grams(inputs, device) for _ in range(halves)], strict=True)
        self._all, self._task = (_Sums(list(own), outputs, combined) for own in moments)
        self._masses: list[torch.Tensor] = []
        self._halved = ridge is None  # whether each task has samples in both halves

    def add(self, inputs: torch.Tensor, residuals: torch.Tensor, samples: torch.Tensor, weights: torch.Tensor) -> None:
        """Add tokens of the current task.

        Args:
            inputs: [n, d_in].
            residuals: [n, d_out].
            samples: the number of each token's sample [n].
            weights: w_x [n], each token's weight.
        """
        roots = weights.to(inputs.device, torch.float64).sqrt()[:, None]
        inputs, residuals, samples = inputs * roots, residuals * roots, samples.to(inputs.device)
        task = self._task
        task.cross.addmm_(residuals.T, inputs)
        task.inputs += (roots.T @ inputs)[0]
        task.residuals += (roots.T @ residuals)[0]
        combined = residuals @ self._combinations
        for half, (moments, predicted) in enumerate(zip(task.moments, task.predicted, strict=True)):
            own = slice(None) if len(task.moments) == 1 else samples % 2 == half
            given = inputs[own]
            add_gram(given, moments)
            predicted.addmm_(combined[own].T, given)
            task.masses[half] += (roots[own] ** 2).sum()
            task.tokens[half] += len(given)

    def finish_task(self) -> None:
        """Weight the current task's sums and go on to the next task."""
        task = self._task
        for part in task:
            self._reduce(part)
        self._halved &= bool(task.tokens.all() or not task.tokens.any())
        self.tokens += int(task.tokens.sum())
        diagonal = torch.stack([moments.diagonal() for moments in task.moments]).sum(0)
        norm = gram_norm(task.moments, not_decisive(diagonal))
        weight = torch.where(norm > 0, 1 / norm, 0.0)  # a task none of whose tokens came here has no say
        self._masses.append(weight * task.masses.sum())
        for total, part in zip(self._all, task, strict=True):
            total.addcmul_(part, weight)
            part.zero_()

    def solve(self) -> Change:
        """Solve for the change, with a larger ridge where the one asked for does not make the equations solvable."""
        del self._task  # its memory is needed
        sums = self._all
        ridge = self._best_ridge() if self._ridge is None else max(self._ridge, SMALLEST_RIDGE)
        sums.predicted.clear()
        moments = sums.moments.pop()
        while sums.moments:
            moments += sums.moments.pop()

        def solution_of(ridge: float) -> torch.Tensor | None:
            return self._solution(moments, sums.cross, ridge=ridge)

        return first_change(solution_of, ridge, sums.inputs, sums.residuals, torch.stack(self._masses))

    def _best_ridge(self) -> float:
        """The ridge that predicts each half of the samples best from the other."""
        if not self._halved:
            return UNKNOWN_RIDGE
        halves = list(zip(map(mirror, self._all.moments), self._all.predicted, strict=True))

        def error(ridge: float) -> float:
            found = 0.0
            for (moments, cross), (other_moments, other_cross) in itertools.permutations(halves):
                solution = self._solution(moments, cross, ridge=ridge)
                if solution is None:
                    return torch.inf
                # But for the sum of the squared residuals, which is the same for every ridge.
                found += float((solution * (solution @ other_moments - 2 * other_cross)).sum())
            return found

        return lowest_ridge(error)

    def _solution(self, moments: torch.Tensor, cross: torch.Tensor, *, ridge: float) -> torch.Tensor | None:
        """D [d_out, d_in], or None where the equations are singular or not finite."""
        diagonal = moments.diagonal().clone()
        penalty = penalties(diagonal)
        if self._prior is None:
            system, whole = moments.clone(), diagonal + ridge * penalty
        else:
            root = penalty.sqrt()
            system = (self._prior * root).mul_(root[:, None]).mul_(ridge).add_(moments)
            whole = system.diagonal().clone()
        scale = whole.rsqrt()  # to a unit diagonal, so that no dimension's unit matters
        scale[whole == 0] = 0  # the change of a dimension that is always zero is zero
        system.mul_(scale[:, None]).mul_(scale).diagonal().fill_(1.0)
        solution = finite_solution(cross * scale, system)
        return None if solution is None else solution.mul_(scale)


def random_combinations(outputs: int, count: int) -> torch.Tensor:
    """Random combinations [d_out, count] of the outputs, the same ones at every call."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(outputs, count, generator=draw, dtype=torch.float64)


def not_decisive(diagonal: torch.Tensor) -> torch.Tensor:
    """Which dimensions would not decide the norm of moments with this diagonal alone."""
    used = diagonal[diagonal > 0]
    return diagonal <= DECISIVE * used.quantile(0.9) if len(used) else torch.ones_like(diagonal, dtype=torch.bool)


def penalties(diagonal: torch.Tensor) -> torch.Tensor:
    """How much K holds each dimension of the input [d_in], from the diagonal of A."""
    mean = diagonal.mean()
    return diagonal if mean > MASSIVE * diagonal.median() else mean.expand_as(diagonal)


def finite_solution(target: torch.Tensor, system: torch.Tensor) -> torch.Tensor | None:
    """What ``times_inverse`` finds, or None where something in it is not finite."""
    solution = times_inverse(target, system)
    return solution if solution is not None and bool(torch.isfinite(solution).all()) else None


def lowest_ridge(error: Callable[[float], float]) -> float:
    """The ridge whose error is lowest, downhill from the middle one."""
    error = functools.cache(error)
    place, lowest = -1, len(RIDGES) // 2
    while lowest != place:
        place = lowest
        near = (place, place - 1, place + 1)
        lowest = min((at for at in near if 0 <= at < len(RIDGES)), key=lambda at: error(RIDGES[at]))
    return RIDGES[place]


def first_change(
    solution_of: Callable[[float], torch.Tensor | None],
    ridge: float,
    input_sum: torch.Tensor,
    residual_sum: torch.Tensor,
    masses: torch.Tensor,
) -> Change:
    """The change by the ridge asked for, or by the first larger one that makes the equations solvable.

    Args:
        solution_of: D [d_out, d_in] by the ridge, or None where it does not make them solvable.
        ridge: the ridge asked for.
        input_sum, residual_sum: the weighted sums of the inputs [d_in] and of the residuals [d_out].
        masses: each task's sum of weights [T].
    """
    mass = masses.sum().clamp_min(torch.finfo(torch.float64).tiny)
    for factor in LARGER_RIDGES:
        if (solution := solution_of(ridge * factor)) is not None:
            matrix, used, enlarged = solution, ridge * factor, factor > 1
            break
    else:
        matrix, used, enlarged = input_sum.new_zeros(len(residual_sum), len(input_sum)), None, False
    return Change(matrix, (residual_sum - matrix @ input_sum) / mass, masses / mass, used, enlarged)
