"""The report on a merge, ``report.html`` with its charts, from a solution or from statistics.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import torch

from mergekit_slta.figures import Line, Panel, line_chart
from mergekit_slta.levels import kinds_of, place_of
from mergekit_slta.reports.page import Chart, Page
from mergekit_slta.slta.solver import SubmoduleSolution, bootstrap, pooled
from mergekit_slta.slta.statistics import Solution, Statistics
from mergekit_slta.tables import Table, short_names
from mergekit_slta.words import as_score, counted, enumerated, kind_name, plain_number, possessive

# Of the quickstart's experts, those that keep less than 0.5 of the feature change keep less than a third of their gain
# in exact answers; those that keep 0.6 to 0.75, in merges of two, keep between a third and nearly all.
LOSES_MOST, KEEPS_ENOUGH = 0.5, 0.75
HARDLY_INTERFERES = 0.9  # what two experts, merged without others, keep on average
KEEP_WEIGHTS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)  # the weights κ of the base model's task in the picture of the trade
DRAWS = 200  # of the samples, for the intervals of the merging weights
ENDS = (0.05, 0.95)
SEED = 0
MEANING = (
    "A feature is the output of a block of the model. On the expert's own prompts, 1 means that the merge's blocks "
    "give the expert's outputs, 0 that they are as far from the expert's as the base model's are. The "
    "calculation assumes that features change in proportion to the merging weights. The share of the feature change "
    "says little about accuracy: score the merge with mergekit-slta evaluate."
)


# In words


def verdict(solution: Solution) -> str:
    """Whether to merge these experts, which of them loses most of its change, and which two interfere most, where."""
    pairs = [*zip(short_names(solution.models), solution.kept.tolist(), strict=True)]
    if idle := [name for name, share in pairs if math.isnan(share)]:
        change = "changes" if len(idle) == 1 else "change"
        return f"{enumerated(idle)} {change} nothing, as a copy of the base model would: check the models' folders."
    alone, losing = len(pairs) == 1, [name for name, share in pairs if share < LOSES_MOST]
    weak = losing or [name for name, share in pairs if share < KEEPS_ENOUGH]
    every = "Both" if len(pairs) == 2 else "All of them"
    who = every if 1 < len(weak) == len(pairs) else enumerated(weak or [pairs[0][0]])
    loses = "lose" if len(weak) > 1 else "loses"
    if losing:
        fix = "lower the weight κ of the base model's prompts" if alone else "leave it out"
        fix = "leave one of them out" if len(losing) > 1 else fix
        advice = f"{who} {loses} most of the feature change: {fix}, or merge with featcal, which solves each matrix."
    elif weak:
        advice = f"{who} {loses} more than 0.25 of the feature change: score the merge with mergekit-slta "
        advice += "evaluate, or merge with featcal, which solves each matrix."
    else:
        whose = "the" if alone else "each"
        advice = (
            f"Weighted sums keep most of {whose} expert's feature change: score the merge with mergekit-slta evaluate."
        )
    return " ".join([advice, *_interference(solution)])


def kept_sentence(solution: Solution) -> str:
    """How much of each expert's feature change the merge keeps, and how much of the base model on its own task."""
    pairs = zip(short_names(solution.models), solution.kept.tolist(), strict=True)
    first, *others = [f"{as_score(share)} of {possessive(name)}" for name, share in pairs]
    others += [f"{as_score(solution.base_kept)} of the base model on its own task"] * solution.keeps_base
    return f"At level {solution.level}, the merge keeps {enumerated([f'{first} feature change', *others])}."


def _interference(solution: Solution) -> Iterator[str]:
    """A sentence on the two experts of which a merge of these two alone keeps least, and on the layers."""
    measured = solution.statistics.at_levels([solution.level])
    members = combinations(range(len(solution.models)), 2)
    pairs = [measured.take(pair, keep=False).solve(solution.level, balance=solution.balance) for pair in members]
    worst = min(pairs, key=lambda pair: _mean(pair.kept), default=None)
    if worst is None or _mean(worst.kept) >= HARDLY_INTERFERES:
        return
    where = _where_most({layer: -_mean(kept) for layer, kept in kept_by_layer(worst).items()})
    names = dict(zip(solution.models, short_names(solution.models), strict=True))
    if len(names) > 2:
        shares = enumerated(list(map(as_score, worst.kept.tolist())))
        pair = enumerated([names[model] for model in worst.models])
        yield f"{pair} interfere most{where}: a merge of these two alone keeps {shares} of their feature change."
    elif where:
        yield f"They interfere most{where}."


def _where_most(by_layer: Mapping[int, float]) -> str:
    """The layers with the largest values, a quarter, at most three, as in " in layers 0 and 3-4"; "" without any."""
    most = sorted(by_layer, key=by_layer.__getitem__, reverse=True)[: math.ceil(min(len(by_layer), 12) / 4)]
    pairs = enumerate(sorted(most))
    runs = [[layer for _, layer in run] for _, run in groupby(pairs, lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f" in layer{'s' * (len(most) > 1)} {enumerated(words)}" if words else ""


def _mean(kept: torch.Tensor) -> float:
    return float(kept.nan_to_num(1.0).mean())  # an expert that changes nothing loses nothing


# In numbers, from the Gram matrices alone


def kept_by_layer(solution: Solution) -> dict[int, torch.Tensor]:
    """The share of each expert's feature change that the merge keeps in each layer, [T]."""
    layers: dict[int, list[SubmoduleSolution]] = {}
    for name, solved in solution.submodules.items():
        layer = place_of(name).layer
        if layer is not None:
            layers.setdefault(layer, []).append(solved)
    return {
        layer: pooled(torch.stack([part.retained for part in parts]), torch.stack([part.share for part in parts]))
        for layer, parts in layers.items()
    }


def intervals(solution: Solution) -> torch.Tensor:
    """The ends of the merging weights' 90 % bootstrap intervals, [2, S, T]; NaN if a task has one sample."""
    statistics, ends = solution.statistics, torch.tensor(ENDS, dtype=torch.float64)
    draws = (
        bootstrap(statistics.grams[name], statistics.task, DRAWS, seed=SEED, **solution.settings)
        for name in solution.alpha
    )
    return torch.stack([drawn.quantile(ends, dim=0) for drawn in draws], 1)


# The page


def report(found: Solution | Statistics, folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and its charts as PNG files into a folder: what a merge keeps of each expert, and why.

    Args:
        found: a solution, or the statistics of the merged experts, which are solved at level ``attn_mlp``, or at the
            first that was measured.
        folder: the folder to write to; it is created.

    Returns:
        The path of ``report.html``.

    Raises:
        OSError: a file cannot be written.
    """
    return report_page(found).write(Path(folder).expanduser(), "report.html")


def report_page(found: Solution | Statistics) -> Page:
    """The report on a merge; statistics are solved at the default level."""
    solution = found if isinstance(found, Solution) else found.solve()
    charts, table, weights = [], None, _weights(solution)
    if solution.level == "model":
        shares = map(as_score, solution.retained["model"].tolist())
        rows = list(zip(short_names(solution.models), weights[0], shares, strict=True))
        table = Table(["Expert", "merging weight (90 % interval)", "share kept"], rows)
    else:
        charts = [_retained_chart(solution), _alpha_chart(solution, weights)]
    return Page(
        title=f"Report on a merge of {enumerated(short_names(solution.models))}",
        verdict=[verdict(solution), kept_sentence(solution), MEANING, *solution.notes()],
        facts=_facts(solution),
        charts=[*charts, *([_trade_chart(solution)] if solution.keeps_base else [])],
        table=table,
    )


def _facts(solution: Solution) -> dict[str, str]:
    """Facts about the measurement, by name."""
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
    balanced = "every prompt counts the same" if solution.balance else "long prompts and large changes count more"
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
        title = kind_name(kind) + (f": mean of {most}" if most > 1 else "")
        panels.append(Panel(title, [Line(name, list(layers), kept) for name, kept in columns]))
    return Chart(
        name=f"retained-{solution.level}",
        title="Share kept of each expert's feature change",
        caption="On each expert's own prompts. A thin line marks 0.5. Shares below −1 are drawn at −1.",
        picture=line_chart(
            panels, x_label="decoder layer", y_label="share of the change", lowest=-1.0, lines_at=[LOSES_MOST]
        ),
        table=_table(solution, [map(as_score, row) for row in retained.tolist()]),
    )


def _trade_chart(solution: Solution) -> Chart:
    """What a merge keeps of the experts against what it keeps of the base model, by the weight of the base's task."""
    same: dict[str, Any] = {"balance": solution.balance, "ridge": solution.ridge, "task_weights": solution.task_weights}
    merges = [solution.statistics.solve(solution.level, keep_weight=weight, **same) for weight in KEEP_WEIGHTS]
    base, weights = [merge.base_kept for merge in merges], list(map(plain_number, KEEP_WEIGHTS))
    names, curves = short_names(solution.models), torch.stack([merge.kept for merge in merges]).T.tolist()
    lines = [Line(name, base, curve) for name, curve in zip(names, curves, strict=True)]
    # The points of one κ are above each other.
    lines[0] = replace(lines[0], notes=[f"κ {weight}" for weight in weights])
    return Chart(
        name=f"trade-{solution.level}",
        title="The experts' shares against the base model's",
        caption="Each point is a merge with another weight κ of the base model's prompts. The base model's share is 1 "
        "if the merge changes nothing on these prompts, and 0 if it changes as much as one whole expert.",
        picture=line_chart(
            [Panel("", lines)],
            x_label="the base model's share",
            y_label="the expert's share",
            x_shares=True,
            lowest=-1.0,
        ),
        table=Table(
            ["κ", "the base model", *names],
            [[weight, *map(as_score, shares)] for weight, *shares in zip(weights, base, *curves, strict=True)],
        ),
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
        caption="At 1 the merge takes all of an expert's change, at 0 none of it." + drawn * ("(" in weights[0][0]),
        picture=solution.plot(),
        table=_table(solution, weights),
    )


def _weights(solution: Solution) -> list[list[str]]:
    """The merging weights [S, T] in words, with their intervals where they are known."""
    return [
        [
            plain_number(weight) + ("" if math.isnan(low) else f" ({plain_number(low)} to {plain_number(high)})")
            for weight, low, high in zip(alpha.tolist(), *interval.tolist(), strict=True)
        ]
        for alpha, interval in zip(solution.alpha.values(), intervals(solution).unbind(1), strict=True)
    ]


def _table(solution: Solution, cells: Iterable[Iterable[str]]) -> Table:
    """A table with a row for each submodule and a column for each expert."""
    rows = [[name, *row] for name, row in zip(solution.alpha, cells, strict=True)]
    return Table(["Submodule", *short_names(solution.models)], rows)
