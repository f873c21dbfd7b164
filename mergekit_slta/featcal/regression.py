"""The ridge regression of one group of linear maps that share an input.

Symbols, as in ``merge.py``: inputs x [d_in] of the merged model with weights w_x, targets y [d_out] and their residuals
r = y - W_n x against the map W_n that the solution stays near, tasks t with weights s_t, and the change D = W - W_n
[d_out, d_in], which minimizes

    sum_t s_t sum_x w_x |D x - r|^2 + ridge * trace(D H D^T),     s_t = c_t / n_t,   n_t = |sum_x w_x x x^T|_F

where c_t says how much the task counts: 1, or kappa for the base model's.

With A = sum_t s_t sum_x w_x x x^T and C = sum_t s_t sum_x w_x r x^T, that is D = C (A + ridge H)^-1. (To sum y x^T and
to subtract W_n A would save products, but lose digits where A is ill-conditioned.) H [d_in, d_in] says how strongly
each direction of the input is held:

- H = h I with h = trace(A) / d_in. A few dimensions of the input may be so much larger than the others that
  h says nothing about the others: then H = diag(A), at least a hundredth of its median, below which an input that is
  silent on these prompts would get large weights. Where a few would decide n_t, perhaps by a single token, n_t is
  computed without them.
- A prior P [d_in, d_in], whose diagonal has the mean 1, holds some directions more than others: H is then
  p^(1/2) P p^(1/2), where p is the diagonal of the H above.

A ridge that is not given is the one of ``RIDGES`` that predicts left-out samples best: the samples of every task are
dealt to two halves by their content; D is solved from one half with a ridge, and its error is summed over the other,
and the reverse. The error has one minimum in all but rare cases, so the search goes downhill, from ``LIKELY_RIDGE``. It
is measured on a few random combinations of the outputs, so that only these have sums for each half.

A few prompts have fewer tokens than a map has inputs. With the tokens' inputs as the rows of X [n, d_in] and their
residuals as those of R [n, d_out], each times (s_t w_x)^(1/2), the same change is

    D^T = H^-1 X^T (X H^-1 X^T + ridge I)^-1 R

whose system is only [n, n].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.linalg import solve_triangular

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.numerics.symmetric import add_gram, frobenius, gram, mirror, times_inverse
from mergekit_slta.recipe.settings import SMALLEST_FEATCAL_RIDGE

MASSIVE = 10.0  # H follows A's diagonal if the diagonal's mean is this many times its median
LEAST_HELD = 0.01  # of that median
# s_t leaves out the dimensions whose sum of squares is this many times the 90 % quantile of the sums above zero.
DECISIVE = 1000.0
RIDGES = (SMALLEST_FEATCAL_RIDGE, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
LIKELY_RIDGE = 1.0  # where the search begins, and where a task does not have samples in both halves
PREDICTED = 64  # random combinations of the outputs by which the error on left-out samples is estimated

# Of all sums, systems and solutions; where that does not suffice to factor a system, ``times_inverse`` takes float64.
PRECISION = torch.float32

# Of n tokens that reach some maps: the merged model's inputs x [n, d_in], the targets y [n, d_out], the number of each
# token's sample [n], whose last bit says which half it is in, and its weight w_x [n].
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Change:
    """The solution of a regression."""

    matrix: torch.Tensor  # D [d_out, d_in]; zero where there is no solution
    mean: torch.Tensor  # the mean residual [d_out] that is left, weighted as in the regression
    shares: torch.Tensor  # each task's weight [T] in that mean
    ridge: float | None  # that was used; None where the equations cannot be solved, as with inputs that are not finite

    def offset(self, usual: torch.Tensor, biases: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The bias of some rows: with the mean residual for a small ridge, the usual one for an endless one.

        From the experts' mean bias [rows], the usual one, and those of each task's own model [T, rows].
        """
        if not self.shares.any():  # every input was zero
            return usual
        mean = self.shares @ biases.to(self.shares.dtype) + self.mean[rows] - usual
        return (usual + mean / (1 + (self.ridge or 0.0) ** 2)).to(usual.dtype)


@dataclass
class Sums:
    """Sums over tokens, zero at first; those with a first dimension of ``h`` are of each half of the samples."""

    inputs: torch.Tensor  # of x [d_in]
    residuals: torch.Tensor  # of r [d_out]
    mass: torch.Tensor  # of the weights w_x []
    tokens: torch.Tensor  # how many tokens [h]
    cross: torch.Tensor  # of r x^T [d_out, d_in]; [d_out, 0] where the tokens themselves are held, as the next two
    moments: torch.Tensor  # of x x^T [h, d_in, d_in], on and above the diagonal
    predicted: torch.Tensor  # of combinations of r with x [h, combinations, d_in]


class RidgeRegression:
    """A regression whose tokens are added task by task; it holds sums over them or, if they are few, the tokens."""

    def __init__(
        self,
        near: torch.Tensor,  # W_n [d_out, d_in]; the sums are on its device
        ridge: float | None,  # how strongly the change is drawn towards zero; None to choose it by left-out samples
        *,
        prior: torch.Tensor | None = None,  # P [d_in, d_in], positive definite; by default no direction is held more
        tokens: int | None = None,  # how many this process will add, if that is known
        ranks: Ranks | None = None,  # the processes that share them
    ) -> None:
        self._near, self._ridge, self._prior, self._ranks = near.to(PRECISION), ridge, prior, ranks or Ranks()
        (outputs, inputs), device = near.shape, near.device
        # Without a search for the ridge, the sums need no more than one factorization, and a prior is another one.
        most = inputs // 2 if prior is not None and ridge is not None else inputs
        self._few = tokens is not None and tokens < most and self._ranks.count == 1
        combined, halves = (PREDICTED, 2) if ridge is None else (0, 1)
        size = 0 if self._few else inputs
        draw = torch.Generator().manual_seed(0)  # the same at every call
        combinations = torch.randn(outputs, combined, generator=draw, dtype=torch.float64)
        self._combinations = combinations.to(PRECISION).to(device)
        shapes: dict[str, tuple[int, ...]] = {
            "inputs": (inputs,),
            "residuals": (outputs,),
            "mass": (),
            "tokens": (halves,),
            "cross": (outputs, size),
            "moments": (halves, size, size),
            "predicted": (halves, combined, size),
        }
        # Of all tasks with their weights, and of the current one before it has a weight.
        self._all, self._task = (
            Sums(**{name: torch.zeros(shape, dtype=PRECISION, device=device) for name, shape in shapes.items()})
            for _ in range(2)
        )
        # The inputs and residuals of tokens, each times the root of its weight, and the half of its sample.
        self._rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._earlier = 0  # how many of these are of the tasks before the current one
        self._masses: list[torch.Tensor] = []
        self._halved = ridge is None  # whether each task has samples in both halves
        self.tokens = 0  # that all processes have added

    def add_tasks(self, counts: Sequence[float], tokens_of: Callable[[int], Iterable[Tokens]]) -> None:
        """Add the tokens of every task, ``tokens_of`` it; ``counts`` says how much each counts (c_t)."""
        for task, count in enumerate(counts):
            for tokens in tokens_of(task):  # may run layers, batch by batch
                self._add(*tokens)
                del tokens  # which must not wait beside the next batch
            self._finish_task(count)

    def _add(self, inputs: torch.Tensor, targets: torch.Tensor, samples: torch.Tensor, weights: torch.Tensor) -> None:
        """Add ``Tokens`` of the current task."""
        task, roots = self._task, weights.to(inputs.device, PRECISION).sqrt()[:, None]
        inputs, halves = inputs.to(PRECISION), samples.to(inputs.device) % len(task.tokens)
        residuals = torch.addmm(targets.to(PRECISION), inputs, self._near.T, alpha=-1).mul_(roots)
        inputs = inputs * roots
        task.inputs += (roots.T @ inputs)[0]
        task.residuals += (roots.T @ residuals)[0]
        task.mass += roots.square().sum()
        task.tokens += halves.bincount(minlength=len(task.tokens))
        if self._few:
            self._rows.append((inputs, residuals, halves))
            return
        task.cross.addmm_(residuals.T, inputs)
        combined = residuals @ self._combinations
        for half, (moments, predicted) in enumerate(zip(task.moments, task.predicted, strict=True)):
            rows = halves == half if len(task.tokens) > 1 else slice(None)
            add_gram(inputs[rows], moments)
            predicted += combined[rows].T @ inputs[rows]

    def _finish_task(self, count: float) -> None:
        """Weight the current task's tokens, and go on to the next task."""
        task = self._task
        for part in vars(task).values():
            self._ranks.sum(part)
        self._halved &= bool(task.tokens.all() or not task.tokens.any())
        self.tokens += int(task.tokens.sum())
        norm = self._norm_of_task()
        weight = torch.where(norm > 0, count / norm, 0.0)  # a task none of whose tokens came here has no say
        self._masses.append(weight * task.mass)
        for total, part in zip(vars(self._all).values(), vars(task).values(), strict=True):
            total.addcmul_(part, weight)
            part.zero_()
        for inputs, residuals, _ in self._rows[self._earlier :]:
            inputs *= weight.sqrt()
            residuals *= weight.sqrt()
        self._earlier = len(self._rows)

    def _norm_of_task(self) -> torch.Tensor:
        """|sum_x w_x x x^T|_F of the current task, without the dimensions that would decide it alone."""
        if self._few:
            if len(self._rows) == self._earlier:
                return self._task.mass
            inputs = torch.cat([rows for rows, *_ in self._rows[self._earlier :]])
            # Tokens by tokens or dimensions by dimensions, the norm is the same.
            return frobenius(gram(inputs[:, not_decisive(inputs.square().sum(0))].T))
        moments = mirror(self._task.moments.sum(0))
        decisive = ~not_decisive(moments.diagonal())
        moments[decisive], moments[:, decisive] = 0, 0
        return frobenius(moments)

    def solve(self) -> Change:
        del self._task  # its memory is needed
        total, masses, ridge = self._all, torch.stack(self._masses), self._ridge
        equations: _TokenEquations | _SumEquations
        if self._few:
            inputs, residuals, halves = map(torch.cat, zip(*self._rows, strict=True))
            self._rows = []  # their memory is needed
            equations = _TokenEquations(inputs, residuals, halves, self._combinations, self._prior)
        else:
            equations = _SumEquations(total, self._prior)
        if ridge is None:
            ridge = lowest_ridge(equations.error_left_out) if self._halved else LIKELY_RIDGE
        mass = total.mass.clamp_min(torch.finfo(PRECISION).tiny)
        if (matrix := equations.change(ridge)) is not None:
            return Change(matrix, (total.residuals - matrix @ total.inputs) / mass, masses / mass, ridge)
        return Change(torch.zeros_like(self._near), total.residuals / mass, masses / mass, None)


def regression_bytes(rows: int, columns: int, tokens: int) -> tuple[int, int]:
    """The bytes of a regression for a matrix of this shape: while tokens are added, and what solving it adds."""
    matrices, square = 3 * rows * columns, columns**2
    if tokens < columns:
        adding, solving = square + tokens * (rows + columns), square + tokens * (2 * columns + rows + 2 * tokens)
    else:
        adding, solving = 5 * square, 2 * square + matrices
    return PRECISION.itemsize * (adding + matrices), PRECISION.itemsize * solving


class _SumEquations:
    """The equations from the sums over the tokens of all tasks."""

    def __init__(self, sums: Sums, prior: torch.Tensor | None) -> None:
        self._moments, self._cross, self._predicted = sums.moments, sums.cross, sums.predicted
        for half in self._moments:
            mirror(half)
        self._shape, hold = hold_of(self._moments.sum(0).diagonal(), prior)
        self._hold = hold.diag() if hold.ndim == 1 else hold

    def change(self, ridge: float) -> torch.Tensor | None:
        """D [d_out, d_in]; None where the ridge does not make the equations solvable."""
        return self._solve(self._cross, self._moments.sum(0), ridge)

    def error_left_out(self, ridge: float) -> float:
        """The error of each half's solution on the other half, but for a summand that is the same for every ridge."""
        error, sums = 0.0, list(zip(self._moments, self._predicted, strict=True))
        for (moments, predicted), (others, others_predicted) in (sums, sums[::-1]):
            change = self._solve(predicted, moments, ridge)
            if change is None:
                return torch.inf
            error += float((change * (change @ others - 2 * others_predicted)).sum())
        return error

    def _solve(self, cross: torch.Tensor, moments: torch.Tensor, ridge: float) -> torch.Tensor | None:
        hold = ridge * float(strength(moments.diagonal(), self._shape))
        return times_inverse(cross, torch.add(moments, self._hold, alpha=hold))


class _TokenEquations:
    """The equations from the tokens themselves, each in one of two halves."""

    def __init__(
        self,
        inputs: torch.Tensor,
        residuals: torch.Tensor,
        halves: torch.Tensor,
        combinations: torch.Tensor,
        prior: torch.Tensor | None,
    ) -> None:
        self._residuals, self._combined = residuals, residuals @ combinations
        self._halves = [(halves == half).nonzero()[:, 0] for half in (0, 1)]
        energies = torch.stack([inputs[half].square().sum(0) for half in self._halves])
        shape, hold = hold_of(energies.sum(0), prior)
        self._strengths = [strength(energy, shape) for energy in (energies.sum(0), *energies)]
        if hold.ndim == 1:
            whitened, self._held_inputs = inputs / hold.sqrt(), inputs / hold
        else:  # H = V^T V, and X V^-1 V^-T = X H^-1
            root = torch.linalg.cholesky_ex(hold, upper=True).L
            whitened = solve_triangular(root, inputs, upper=True, left=False)
            self._held_inputs = solve_triangular(root.T, whitened, upper=False, left=False)
        self._products = gram(whitened.T)

    def change(self, ridge: float) -> torch.Tensor | None:
        """D [d_out, d_in]; None where the ridge does not make the equations solvable."""
        inputs, residuals = self._held_inputs, self._residuals
        system = self._products.clone()
        system.diagonal().add_(ridge * self._strengths[0])
        if residuals.shape[1] < inputs.shape[1]:
            solution = times_inverse(residuals.T, system)
            return None if solution is None else solution @ inputs
        solution = times_inverse(inputs.T, system)
        return None if solution is None else (solution @ residuals).T

    def error_left_out(self, ridge: float) -> float:
        """The squared error of each half's solution on the other half."""
        error = 0.0
        for half, other, held in zip(self._halves, self._halves[::-1], self._strengths[1:], strict=True):
            system = self._products[half[:, None], half]
            system.diagonal().add_(ridge * held)
            solution = times_inverse(self._combined[half].T, system)
            if solution is None:
                return torch.inf
            error += float((solution @ self._products[half[:, None], other] - self._combined[other].T).square().sum())
        return error


def hold_of(diagonal: torch.Tensor, prior: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """H in units of its strength, from the diagonal of A [d_in]: its shape [d_in], and H [d_in, d_in].

    The shape is the diagonal that H has without a prior; where there is none, H is returned as its diagonal. A
    dimension that is always zero is held apart from the others, so that its change is zero, but where there is a prior
    and H does not follow A's diagonal: the prior says then how it changes with the others.
    """
    median = diagonal.median()
    held = diagonal.clamp_min(LEAST_HELD * median) * (diagonal > 0)
    shape = held if diagonal.mean() > MASSIVE * median else torch.ones_like(diagonal)
    if prior is None:
        return shape, torch.where(shape > 0, shape, 1.0)
    if bool((shape == 1).all()):
        return shape, prior
    hold = prior * shape.sqrt() * shape.sqrt()[:, None]
    hold.diagonal()[shape == 0] = 1
    return shape, hold


def strength(diagonal: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """The strength [] of H in units of its ``shape`` [d_in], from the diagonal of A, or of its part of a half."""
    total = diagonal.sum()
    return torch.where(total > 0, total / shape.sum(), 1.0)


def not_decisive(diagonal: torch.Tensor) -> torch.Tensor:
    """Which dimensions [d_in] would not decide the norm of moments with this diagonal alone."""
    used = diagonal[diagonal > 0].sort().values
    if not len(used):
        return torch.ones_like(diagonal, dtype=torch.bool)
    low, rest = divmod(9 * (len(used) - 1), 10)  # not torch.quantile, which newer versions compute in float64
    others = diagonal <= DECISIVE * used[low].lerp(used[low + (rest > 0)], rest / 10)
    return others if (~others).sum() <= max(2, len(used) // 100) else torch.ones_like(others)  # most may be silent


def lowest_ridge(error: Callable[[float], float]) -> float:
    """The ridge whose error is lowest, downhill from the likely one."""
    error = functools.cache(error)
    place, lowest = -1, RIDGES.index(LIKELY_RIDGE)
    while lowest != place:
        place = lowest
        near = (place, place - 1, place + 1)
        lowest = min((at for at in near if 0 <= at < len(RIDGES)), key=lambda at: error(RIDGES[at]))
    return RIDGES[place]
