"""Solutions and evaluations as people read them (aligned tables) and as programs do (JSON)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mergekit_slta.reports.page import Table
from mergekit_slta.slta.solver import Solution

if TYPE_CHECKING:
    from mergekit_slta.evaluate import TaskEvaluation


def solution_json(
    level: str,
    models: Sequence[str],
    solutions: Mapping[str, Solution],
    deviations: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """A solution as JSON; what is undefined is null.

    Args:
        level: the submodules' level.
        models: the experts' names, ``T`` in all.
        solutions: by submodule, in the order of the layers.
        deviations: the standard errors [T] of each submodule's weights.
    """
    content: dict[str, Any] = {
        "level": level,
        "models": list(models),
        "alpha": {name: _numbers(solution.alpha) for name, solution in solutions.items()},
        "retained": {name: _numbers(solution.retained) for name, solution in solutions.items()},
        "condition": {name: _number(solution.condition) for name, solution in solutions.items()},
    }
    if deviations is not None:
        content["alpha_std"] = {name: _numbers(deviation) for name, deviation in deviations.items()}
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def solution_table(
    level: str,
    models: Sequence[str],
    solutions: Mapping[str, Solution],
    deviations: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """A solution as an aligned table, one submodule per line; the arguments are those of ``solution_json``."""
    header = ["submodule", *(f"alpha {name}" for name in models), *(f"keeps {name}" for name in models), "condition"]
    rows = []
    for name, solution in solutions.items():
        alpha = [f"{weight:.3f}" for weight in solution.alpha.tolist()]
        if deviations is not None and not deviations[name].isnan().any():
            errors = deviations[name].tolist()
            alpha = [f"{weight} ±{error:.3f}" for weight, error in zip(alpha, errors, strict=True)]
        retained = [_percent(share) for share in solution.retained.tolist()]
        rows.append([name, *alpha, *retained, _short(solution.condition)])
    table = str(Table(header, rows))
    return "\n\n".join([table, *solution_notes(level, solutions)])


def solution_notes(level: str, solutions: Mapping[str, Solution]) -> list[str]:
    """Where the samples do not decide every expert's weight, and what it is there."""
    idle = [name for name, solution in solutions.items() if level == "linear" and solution.rank == 0]
    singular = [name for name, solution in solutions.items() if solution.rank < len(solution.alpha)]
    dependent = [name for name in singular if name not in idle]
    notes = []
    if idle:
        notes.append(
            f"{len(idle)} of {len(solutions)} linear maps ({idle[0]} ...) are reached by no sample or changed by no "
            "expert: they take the mean weights of their branch."
        )
    if dependent:
        notes.append(
            f"In {len(dependent)} of {len(solutions)} submodules ({dependent[0]} ...) experts are linearly dependent "
            "or change nothing: their weights are the minimum-norm solution."
        )
    return notes


def evaluation_json(results: Sequence[TaskEvaluation]) -> str:
    """An evaluation as JSON; what is not finite is null, and so is the share that is kept where there is no gain."""
    fields = ("model", "records", "tokens", "base", "expert", "merged", "kept")
    given = [{field: getattr(result, field) for field in fields} for result in results]
    content = {
        "tasks": [{name: _number(v) if isinstance(v, float) else v for name, v in task.items()} for task in given]
    }
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def evaluation_table(results: Sequence[TaskEvaluation]) -> str:
    """An evaluation as an aligned table, one task per line."""
    header = ["task of", "records", "tokens", "base", "expert", "merged", "gain kept"]
    rows = []
    for result in results:
        losses = [f"{loss:.4f}" for loss in (result.base, result.expert, result.merged)]
        rows.append([result.model, str(result.records), str(result.tokens), *losses, _percent(result.kept)])
    lines = ["Negative log-likelihood per token, lower is better", "", str(Table(header, rows))]
    idle = [result.model for result in results if result.kept is None]
    if idle:
        lines += ["", f"No better than the base model on their own task, so no gain to keep: {', '.join(idle)}."]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{share:.1%}"


def _short(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.3g}"


def _number(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _numbers(vector: torch.Tensor) -> list[float | None]:
    return [_number(number) for number in vector.tolist()]
