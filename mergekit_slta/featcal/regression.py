"""The ridge regression of one group of linear maps that share an input.

Symbols, as in ``merge.py``: inputs x [d_in] of the merged model with weights w_x, residuals r = y - W_n x [d_out]
against the map W_n that the solution stays near, tasks t with weights s_t, and the change D = W - W_n [d_out, d_in],
which minimizes

    sum_t s_t sum_x w_x |D x - r|^2 + ridge * trace(D H D^T),     s_t = c_t / n_t,   n_t = |sum_x w_x x x^T|_F

where c_t says how much the task counts: 1, or the keep weight for the base model's.

With A = sum_t s_t sum_x w_x x x^T and C = sum_t s_t sum_x w_x r x^T, that is D = C (A + ridge H)^-1. H [d_in, d_in]
says how strongly each direction of the input is held:

- H = h I with h = trace(A) / d_in. A few dimensions of the input may be so much larger than the others that
  h says nothing about the others: then H = diag(A). Where those few would decide n_t, perhaps by a single token,
  n_t is computed without them.
- A prior P [d_in, d_in], whose diagonal has the mean 1, holds some directions more than others: H is then
  p^(1/2) P p^(1/2), where p is the diagonal of the H above.

A ridge that is not given is the one of ``RIDGES`` that predicts left-out samples best: the samples of every task are
dealt to two halves; D is solved from one half with a ridge, and its error is summed over the other, and the reverse.
The error has one minimum in all but rare cases, so the search goes from the middle ridge downhill. It is measured on a
few random combinations of the outputs, so that only these have sums for each half.

A few prompts have fewer tokens than a map has inputs. With the tokens' inputs as the rows of X [n, d_in] and their
residuals as those of R [n, d_out], each times (s_t w_x)^(1/2), the same change is

    D^T = H^-1 X^T (X H^-1 X^T + ridge I)^-1 R

whose system is only [n, n].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.linalg import solve_triangular

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.numerics.symmetric import add_gram, gram, mirror, times_inverse

# H follows A's diagonal if the diagonal's mean is this many times its median.
MASSIVE = 10.0
# s_t leaves out the dimensions whose sum of squares is this many times the 90 % quantile of all dimensions' sums.
DECISIVE = 1000.0
RIDGES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
UNKNOWN_RIDGE = 1.0  # where a task does not have samples in both halves
PREDICTED = 64  # random combinations of the outputs by which the error on left-out samples is estimated
SMALLEST_RIDGE = 1e-10  # used for a ridge of zero; with less, inputs that were never seen decide

# Of all sums, systems and solutions; where that does not suffice to factor a system, ``times_inverse`` takes float64.
PRECISION = torch.float32

# D [k, d_in] by the ridge, or None where that does not make the equations solvable.
Solver = Callable[[float], torch.Tensor | None]


@dataclass(frozen=True)
class Change:
    """The solution of a regression.

    Attributes:
        matrix: D [d_out, d_in]; zero where there is no solution.
        mean: the mean residual [d_out] that is left, weighted as in the regression.
        shares: each task's weight [T] in that mean.
        ridge: the ridge that was used; None where the equations cannot be solved, as with inputs that are not finite.
    """

    matrix: torch.Tensor
    mean: torch.Tensor
    shares: torch.Tensor
    ridge: float | None

    def offset(self, anchor: torch.Tensor, biases: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The bias of some rows: with the mean residual for a small ridge, the anchor's for an endless one.

        Args:
            anchor: the anchor's bias [rows].
            biases: the experts' [T, rows].
            rows: which rows of the regression.
        """
        if not self.shares.any():  # every input was zero
            return anchor
        mean = self.shares @ biases.to(self.shares.dtype) + self.mean[rows] - anchor
        return (anchor + mean / (1 + (self.ridge or 0.0) ** 2)).to(anchor.dtype)


@dataclass
class Sums:
    """Sums over tokens, zero at first; those with a first dimension of ``h`` are of each half of the samples.

    Attributes:
        inputs, residuals: sums of x [d_in] and of r [d_out].
        mass: sum of the weights w_x [].
        tokens: how many tokens [h].
        cross: sum of r x^T [d_out, d_in]; [d_out, 0] where the tokens themselves are kept, as the next two.
        moments: sum of x x^T [h, d_in, d_in], on and above the diagonal.
        predicted: sum of combinations of r with x [h, combinations, d_in].
    """

    inputs: torch.Tensor
    residuals: torch.Tensor
    mass: torch.Tensor
    tokens: torch.Tensor
    cross: torch.Tensor
    moments: torch.Tensor
    predicted: torch.Tensor


class RidgeRegression:
    """A regression whose tokens are added task by task; it keeps sums over them or, if they are few, the tokens.

    Args:
        inputs, outputs: the numbers of dimensions d_in and d_out.
        ridge: how strongly the change is drawn towards zero; None to choose it by left-out samples.
        device: where the sums are.
        prior: P [d_in, d_in], symmetric and positive definite; by default no direction is held more.
        tokens: how many tokens this process will add, if that is known.
        ranks: the processes that share the tokens.

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
        tokens: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ridge, self._prior, self._ranks = ridge, prior, ranks or Ranks()
        # Without a search for the ridge, the sums need no more than one factorization, and a prior is another one.
        most = inputs // 2 if prior is not None and ridge is not None else inputs
        self._few = tokens is not None and tokens < most and self._ranks.count == 1
        combined, halves, size = PREDICTED if ridge is None else 0, 2 if ridge is None else 1, inputs
        if self._few:
            size = 0
        self._combinations = random_combinations(outputs, combined).to(PRECISION).to(device)
        shapes = [
            (inputs,),
            (outputs,),
            (),
            (halves,),
            (outputs, size),
            (halves, size, size),
            (halves, combined, size),
        ]
        # Of all tasks with their weights, and of the current one before it has a weight.
        self._all, self._task = (
            Sums(*(torch.zeros(shape, dtype=PRECISION, device=device) for shape in shapes)) for _ in range(2)
        )
        # The inputs and residuals of tokens, each times the root of its weight, and the half of its sample.
        none = torch.zeros(0, inputs + outputs, dtype=PRECISION, device=device).split([inputs, outputs], 1)
        self._rows = [(*none, torch.zeros(0, dtype=torch.int64, device=device))]
        self._rows_before = 1  # the current task's
        self._masses: list[torch.Tensor] = []
        self._root: tuple[torch.Tensor, torch.Tensor] | None = None  # the last shape of H, and its root V
        self._halved = ridge is None  # whether each task has samples in both halves
        self.tokens = 0

    def add(self, inputs: torch.Tensor, residuals: torch.Tensor, samples: torch.Tensor, weights: torch.Tensor) -> None:
        """Add tokens of the current task.

        Args:
            inputs: [n, d_in].
            residuals: [n, d_out].
            samples: the number of each token's sample [n].
            weights: w_x [n], each token's weight.
        """
        task, roots = self._task, weights.to(inputs.device, PRECISION).sqrt()[:, None]
        inputs, residuals, halves = inputs * roots, residuals * roots, samples.to(inputs.device) % len(task.tokens)
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
            predicted.addmm_(combined[rows].T, inputs[rows])

    def finish_task(self, count: float = 1.0) -> None:
        """Weight the current task's tokens, by how much it counts (c_t), and go on to the next task."""
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
        for inputs, residuals, _ in self._rows[self._rows_before :]:
            inputs *= weight.sqrt()
            residuals *= weight.sqrt()
        self._rows_before = len(self._rows)

    def _norm_of_task(self) -> torch.Tensor:
        """|sum_x w_x x x^T|_F of the current task, without the dimensions that would decide it alone."""
        if self._few:
            inputs = torch.cat([rows for rows, *_ in (self._rows[0], *self._rows[self._rows_before :])])
            # Tokens by tokens or dimensions by dimensions, the norm is the same.
            return gram(inputs[:, not_decisive(inputs.square().sum(0))].T).norm()
        moments = mirror(self._task.moments.sum(0))
        decisive = ~not_decisive(moments.diagonal())
        moments[decisive], moments[:, decisive] = 0, 0
        return moments.norm()

    def solve(self) -> Change:
        """Solve for the change."""
        del self._task  # its memory is needed
        ridge = self._ridge
        if ridge is None:
            ridge = self._best_ridge() if self._halved else UNKNOWN_RIDGE
        solver, total, masses = self._solver(), self._all, torch.stack(self._masses)
        mass = masses.sum().clamp_min(torch.finfo(PRECISION).tiny)
        ridge = max(ridge, SMALLEST_RIDGE)
        if (matrix := solver(ridge)) is not None:
            mean = (total.residuals - matrix @ total.inputs) / mass
            return Change(matrix, mean, masses / mass, ridge)
        matrix = torch.zeros(len(total.residuals), len(total.inputs), dtype=PRECISION, device=mass.device)
        return Change(matrix, total.residuals / mass, masses / mass, None)

    def _best_ridge(self) -> float:
        """The ridge that predicts each half of the samples best from the other."""
        solvers, judges = [self._solver(half) for half in (0, 1)], [self._judge(half) for half in (1, 0)]

        def error(ridge: float) -> float:
            changes = [solver(ridge) for solver in solvers]
            pairs = zip(changes, judges, strict=True)
            return sum(torch.inf if change is None else judge(change) for change, judge in pairs)

        return lowest_ridge(error)

    def _solver(self, half: int | None = None) -> Solver:
        """Solve from all samples for every output, or from a half of them for the combinations of the outputs."""
        if self._few:
            return self._solver_by_tokens(*self._tokens_of(half))
        moments = mirror(self._all.moments.sum(0) if half is None else self._all.moments[half])
        cross = self._all.cross if half is None else self._all.predicted[half]
        strength, shape = held(moments.diagonal())

        def solve(ridge: float) -> torch.Tensor | None:
            hold = shaped(shape, self._prior)
            hold = hold.diag() if hold.ndim == 1 else hold
            return times_inverse(cross, torch.add(moments, hold, alpha=ridge * float(strength)))

        return solve

    def _judge(self, half: int) -> Callable[[torch.Tensor], float]:
        """Gives the squared error of a change on a half, but for a summand that is the same for every change.

        The half has had its ``_solver``, which completes its moments.
        """
        if self._few:
            inputs, residuals = self._tokens_of(half)
            return lambda change: float((change @ inputs.T - residuals.T).square().sum())
        moments, predicted = self._all.moments[half], self._all.predicted[half]
        return lambda change: float((change * (change @ moments - 2 * predicted)).sum())

    def _tokens_of(self, half: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs [n, d_in] and the residuals [n, d_out] of all tokens, or their combinations in a half."""
        if len(self._rows) > 1:
            self._rows = [tuple(map(torch.cat, zip(*self._rows, strict=True)))]
        inputs, residuals, halves = self._rows[0]
        if half is None:
            return inputs, residuals
        rows = halves == half
        return inputs[rows], residuals[rows] @ self._combinations

    def _solver_by_tokens(self, inputs: torch.Tensor, residuals: torch.Tensor) -> Solver:
        """With H = V^T V for a diagonal or triangular V, no more than X V^-1 is needed."""
        strength, shape = held(inputs.square().sum(0))
        if self._root is None or not torch.equal(shape, self._root[0]):
            hold = shaped(shape, self._prior)
            self._root = shape, hold.sqrt() if hold.ndim == 1 else torch.linalg.cholesky_ex(hold, upper=True).L
        root = self._root[1]
        whitened = inputs / root if root.ndim == 1 else solve_triangular(root, inputs, upper=True, left=False)
        products = gram(whitened.T)

        def solve(ridge: float) -> torch.Tensor | None:
            system = products.clone()
            system.diagonal().add_(ridge * strength)
            solution = times_inverse(residuals.T, system)
            if solution is None:
                return None
            change = solution @ whitened
            return change / root if root.ndim == 1 else solve_triangular(root, change.T, upper=True).T

        return solve


def held(diagonal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """H without a prior, from the diagonal of A [d_in]: its strength [], and its diagonal [d_in] in units of that."""
    mean, one = diagonal.mean(), torch.ones_like(diagonal)
    if mean > MASSIVE * diagonal.median():
        return one[0], diagonal
    return torch.where(mean > 0, mean, one[0]), one


def shaped(shape: torch.Tensor, prior: torch.Tensor | None) -> torch.Tensor:
    """H [d_in, d_in] in units of its strength, or its diagonal [d_in] where there is no prior.

    A dimension that is always zero is held apart from the others, so that its change is zero.
    """
    if prior is None:
        return torch.where(shape > 0, shape, 1.0)
    if bool((shape == 1).all()):
        return prior
    hold = prior * shape.sqrt() * shape.sqrt()[:, None]
    hold.diagonal()[shape == 0] = 1
    return hold


def not_decisive(diagonal: torch.Tensor) -> torch.Tensor:
    """Which dimensions [d_in] would not decide the norm of moments with this diagonal alone."""
    used = diagonal[diagonal > 0]
    return diagonal <= DECISIVE * used.quantile(0.9) if len(used) else torch.ones_like(diagonal, dtype=torch.bool)


def random_combinations(outputs: int, count: int) -> torch.Tensor:
    """Random combinations [d_out, count] of the outputs, the same ones at every call."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(outputs, count, generator=draw, dtype=torch.float64)


def lowest_ridge(error: Callable[[float], float]) -> float:
    """The ridge whose error is lowest, downhill from the middle one."""
    error = functools.cache(error)
    place, lowest = -1, len(RIDGES) // 2
    while lowest != place:
        place = lowest
        near = (place, place - 1, place + 1)
        lowest = min((at for at in near if 0 <= at < len(RIDGES)), key=lambda at: error(RIDGES[at]))
    return RIDGES[place]
