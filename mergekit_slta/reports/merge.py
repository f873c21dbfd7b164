"""The report on a merge, ``report.html`` with its charts, from a solution or from statistics.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from mergekit_slta.figures import Line, Panel, line_chart
from mergekit_slta.levels import kinds_of
from mergekit_slta.reports.page import Chart, Page
from mergekit_slta.slta.solver import pooled
from mergekit_slta.slta.statistics import Solution, Statistics
from mergekit_slta.tables import Table, short_names
from mergekit_slta.words import as_score, counted, enumerated, kind_name, plain_number

DRAWS = 200  # of the samples, for the intervals of the merging weights
SCALE = "A share of 0 means that the merge retains nothing of an expert's change; 1, all of it."
MEANING = (
    "A feature is the output of a submodule. On the expert's own prompts, 1 means that the merge's submodules give the "
    "expert's outputs, 0 that they are as far from the expert's as the base model's are. The "
    "calculation assumes that features change in proportion to the merging weights. The share of the feature change "
    "says little about accuracy: score the merge with mergekit-slta evaluate."
)


def report(merge: Solution | Statistics, folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and its charts as PNG files into a folder: what a merge retains of each expert, and why.

    Statistics are solved at level ``attn_mlp``, or at the first that was measured. The folder is created.

    Returns:
        The path of ``report.html``.
    """
    return report_page(merge).write(Path(folder).expanduser(), "report.html")


def report_page(merge: Solution | Statistics) -> Page:
    """The report on a merge; statistics are solved at the default level."""
    solution = merge if isinstance(merge, Solution) else merge.solve()
    charts, table, weights = [], None, _weights(solution)
    if solution.level == "model":
        shares = map(as_score, solution.retained["model"].tolist())
        rows = list(zip(short_names(solution.models), weights[0], shares, strict=True))
        table = Table(["Expert", "merging weight (90 % interval)", "share retained"], rows)
    else:
        charts = [_retained_chart(solution), _alpha_chart(solution, weights)]
    return Page(
        title=f"Report on a merge of {enumerated(short_names(solution.models))}",
        verdict=[f"{SCALE} {solution.verdict()}", MEANING, *solution.notes()],
        facts=_facts(solution),
        charts=charts,
        table=table,
    )


def _facts(solution: Solution) -> dict[str, str]:
    statistics, info = solution.statistics, solution.statistics.info
    facts = {"Base model": f"{info.base_model} ({info.architecture}, {counted(info.num_layers, 'layer')})"}
    for index, name in enumerate(short_names(info.models)):
        rows = statistics.task == index
        prompts, tokens = int(rows.sum()), int(statistics.tokens[rows].sum())
        facts[f"Expert {name}"] = (
            f"{info.models[index]}, measured on {counted(prompts, 'prompt')} ({counted(tokens, 'token')}) of "
            f"{info.calibration[index].source}"
        )
    if info.keep is not None:
        facts["Base model's task"] = f"{info.keep.source}, weight {plain_number(solution.keep_weight)}"
    balanced = "an expert's prompts count the same" if solution.balance else "long prompts and large changes count more"
    facts["Solved with"] = f"{balanced}, ridge {plain_number(solution.ridge)}"
    if solution.task_weights:
        facts["Solved with"] += f", task weights {', '.join(map(plain_number, solution.task_weights))}"
    if coarser := [str(fallback) for fallback in info.fallbacks if fallback.level == solution.level]:
        facts["Coarser levels"] = " ".join(coarser)
    return facts


# Charts


def _retained_chart(solution: Solution) -> Chart:
    """A panel for each kind of submodule, with a line for each expert over the layers."""
    retained = torch.stack(list(solution.retained.values()))
    shares = torch.stack([submodule.share for submodule in solution.submodules.values()])
    panels = []
    for kind, layers in kinds_of(solution.alpha).items():
        most = max(map(len, layers.values()))
        means = torch.stack([pooled(retained[rows], shares[rows]) for rows in layers.values()])
        columns = zip(short_names(solution.models), means.T.tolist(), strict=True)
        title = kind_name(kind) + (f": weighted mean of {most}" if most > 1 else "")
        panels.append(Panel(title, [Line(name, list(layers), curve) for name, curve in columns]))
    return Chart(
        name=f"retained-{solution.level}",
        title="Share retained of each expert's feature change",
        caption="On each expert's own prompts. Shares below −1 are drawn at −1.",
        picture=line_chart(panels, x_label="decoder layer", y_label="share retained", lowest=-1.0, top=1.0),
        table=_table(solution, [map(as_score, row) for row in retained.tolist()]),
    )


def _alpha_chart(solution: Solution, weights: list[list[str]]) -> Chart:
    """Figure 5 of the paper, ``Solution.plot``, with the weights and their intervals in its table."""
    drawn = (
        f" The table has 90 % intervals: of {DRAWS} bootstrap draws of the prompts, the lowest and the highest 5 % of "
        "the weights are left out."
    )
    return Chart(
        name=f"alpha-{solution.level}",
        title="Merging weights by layer",
        caption="At 1 the merge takes all of an expert's change, at 0 none of it. Beyond ±2, colours stay the same."
        + drawn * ("(" in weights[0][0]),
        picture=solution.plot(),
        table=_table(solution, weights),
    )


def _weights(solution: Solution) -> list[list[str]]:
    """The merging weights [S, T] in words, with their intervals where they are known."""
    drawn = solution.bootstrap(DRAWS).intervals()
    return [[*map(_with_interval, alpha.tolist(), *drawn[name].tolist())] for name, alpha in solution.alpha.items()]


def _with_interval(weight: float, low: float, high: float) -> str:
    if math.isnan(low):
        return as_score(weight)
    return f"{as_score(weight)} ({as_score(low)}{'–' if low >= 0 else ' to '}{as_score(high)})"


def _table(solution: Solution, cells: Iterable[Iterable[str]]) -> Table:
    """A table with a row for each submodule and a column for each expert."""
    rows = [[name, *row] for name, row in zip(solution.alpha, cells, strict=True)]
    return Table(["Submodule", *short_names(solution.models)], rows)
