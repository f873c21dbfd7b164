"""Solutions and evaluations as aligned tables for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ConfigDict, TypeAdapter

from mergekit_slta.reports.page import Table
from mergekit_slta.slta.solver import Solution

if TYPE_CHECKING:
    from mergekit_slta.evaluate import TaskEvaluation


def as_json(content: object) -> str:
    """Content as indented JSON; numbers that are not finite become null, because JSON has no word for them."""
    return TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="null")).dump_json(content, indent=1).decode() + "\n"


def solution_json(
    level: str,
    models: Sequence[str],
    solutions: Mapping[str, Solution],
    deviations: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """A solution as JSON, in which undefined numbers are null.

    Args:
        level: the submodules' level.
        models: the experts' names, ``T`` in all.
        solutions: by submodule, in the order of the layers.
        deviations: the standard errors [T] of each submodule's weights.
    """
    content: dict[str, Any] = {
        "level": level,
        "models": list(models),
        "alpha": {name: solution.alpha.tolist() for name, solution in solutions.items()},
        "retained": {name: solution.retained.tolist() for name, solution in solutions.items()},
        "condition": {name: solution.condition for name, solution in solutions.items()},
    }
    if deviations is not None:
        content["alpha_std"] = {name: deviation.tolist() for name, deviation in deviations.items()}
    return as_json(content)


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
        condition = "-" if math.isnan(solution.condition) else f"{solution.condition:.3g}"
        rows.append([name, *alpha, *retained, condition])
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
            "or change nothing: their weights are the minimum-norm solution"
            + (
                "; an expert that changes nothing there takes its mean weight in the branch."
                if level == "linear"
                else "."
            )
        )
    return notes


def evaluation_json(results: Sequence[TaskEvaluation]) -> str:
    """An evaluation as JSON; the share that is kept is null if the expert gains nothing over the base model."""
    return as_json({"tasks": [{**asdict(result), "kept": result.kept} for result in results]})


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
        lines += [
            "",
            f"Experts no better than the base model on their own task, with no gain to keep: {', '.join(idle)}.",
        ]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{share:.1%}"
