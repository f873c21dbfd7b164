"""The report on a merge, ``report.html`` with its charts, from a solution or from all levels of statistics.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from mergekit_slta.levels import place_of
from mergekit_slta.reports.analysis import (
    DRAWS,
    FEW_SAMPLES,
    INTERVAL,
    PLAUSIBLE_ALPHA,
    WIDEST_INTERVAL,
    LevelAnalysis,
    kinds_of,
)
from mergekit_slta.reports.figures import Line, Matrix, Panel, heat_map, line_chart
from mergekit_slta.reports.page import Chart, Page, Section
from mergekit_slta.reports.words import counted, enumerated, extent, kind_name, percent, plain_number, possessive
from mergekit_slta.slta.solution import MOST_CONDITION, Solution
from mergekit_slta.slta.solver import pooled
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.tables import Table, short_names

LOSES_MOST = 0.5
MEANING = (
    "This is a share of feature change, not accuracy. Features are the outputs of the model's parts (submodules). At "
    "100 % every submodule changes the base model's features on the expert's own data exactly as the expert does; at "
    "0 % the merge is as far from the expert as the base model is, and below 0 % it is farther. The calculation "
    "assumes that features change linearly with the weights."
)


# In words


def verdict(analysis: LevelAnalysis) -> str:
    """One sentence: how much of each expert's feature change the merge keeps, and in which layers it loses most."""
    by_layer = analysis.kept_by_layer()
    clauses = []
    for index, name in enumerate(analysis.experts):
        losing = [layer for layer, kept in by_layer.items() if float(kept[index]) < LOSES_MOST]
        worst = min(losing, key=lambda layer: float(by_layer[layer][index]), default=0)
        clauses.append(_clause(name, float(analysis.solution.kept[index]), _where(losing, len(by_layer), worst)))
    said = "; ".join([*clauses[:-1], f"and {clauses[-1]}"] if len(clauses) > 1 else clauses)
    return f"Merged at level {analysis.solution.level}, the result {said}."


def _clause(name: str, kept: float, where: str) -> str:
    change = f"{possessive(name)} feature change"
    if math.isnan(kept):
        return f"has nothing of {name} to keep, because {name} changes no feature on its own data"
    if kept <= 0:
        return f"keeps nothing of {change} ({percent(kept)})"
    if kept < LOSES_MOST:
        return f"keeps only {percent(kept)} of {change}" + (f" (less than half of it in {where})" if where else "")
    return f"keeps {percent(kept)} of {change}" + (f" but loses most of it in {where}" if where else "")


def _where(layers: Sequence[int], depth: int, worst: int) -> str:
    """Layers in words: "every layer", up to three runs of layers, or their number."""
    if not layers:
        return ""
    if len(layers) == depth > 1:
        return "every layer"
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    if len(runs) > 3:
        return f"{len(layers)} of {depth} layers, above all in layer {worst}"
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {enumerated(words)}"


def reliability(analysis: LevelAnalysis) -> str:
    """One sentence: in how many submodules the merging weights are unreliable."""
    doubtful, count = len(analysis.doubts), len(analysis.submodules)
    if doubtful:
        where = f" of {doubtful} of {count} submodules" if count > 1 else ""
        return f"The merging weights{where} are unreliable; the list below says why."
    sentence = f"The merging weights{f' of all {count} submodules' if count > 1 else ''} look reliable"
    if analysis.samples < FEW_SAMPLES:
        sentence += f", as far as {counted(analysis.samples, 'sample')} per task can tell"
    return f"{sentence}."


# The page


def report(
    found: Solution | Statistics,
    folder: str | os.PathLike[str],
    *,
    levels: str | Sequence[str] = (),
    balance: bool = True,
    ridge: float = 0.0,
) -> Path:
    """Write ``report.html`` and its charts as PNG files into a folder: what a merge keeps of each expert, and why.

    Args:
        found: a solution, or the statistics of the merged experts.
        folder: the folder to write to; it is created.
        levels: the levels, or the one, of the statistics to report on, the most important first; by default all.
        balance, ridge: how to solve statistics; see ``Statistics.solve``.

    Returns:
        The path of ``report.html``.

    Raises:
        SltaError: a level was not measured.
        OSError: a file cannot be written.
    """
    page = report_page(found, levels=levels, balance=balance, ridge=ridge)
    return page.write(Path(folder).expanduser(), "report.html")


def report_page(
    found: Solution | Statistics, *, levels: str | Sequence[str] = (), balance: bool = True, ridge: float = 0.0
) -> Page:
    """The report on a merge; the arguments are those of ``report``."""
    if isinstance(found, Solution):
        solutions = [found]
    else:
        default = sorted(found.info.levels, key=lambda level: level != "attn_mlp")
        chosen = [levels] if isinstance(levels, str) else levels or default
        solutions = [found.solve(level, balance=balance, ridge=ridge) for level in chosen]
    analyses = [LevelAnalysis(solution) for solution in solutions]
    first = analyses[0]
    sections = []
    if len(analyses) > 1:
        text = "The share of each expert's feature change that the merge keeps if it is solved at a level."
        header = ["Level", "Submodules", *(f"keeps of {name}" for name in first.experts), "unreliable"]
        rows = [
            [
                own.solution.level,
                str(len(own.submodules)),
                *map(percent, own.solution.kept.tolist()),
                f"{len(own.doubts)} of {len(own.submodules)}",
            ]
            for own in analyses
        ]
        sections.append(Section("Levels compared", [text], table=Table(header, rows)))
    for analysis in analyses:
        suffix = f" (level {analysis.solution.level})" if len(analyses) > 1 else ""
        sections += [replace(section, title=section.title + suffix) for section in _level_sections(analysis)]
    return Page(
        title=f"Report on a merge of {enumerated(first.experts)}",
        verdict=[verdict(first), MEANING, reliability(first)],
        facts=_facts(solutions[0], [solution.level for solution in solutions]),
        sections=sections,
    )


def _facts(solution: Solution, levels: Collection[str]) -> dict[str, str]:
    """Facts about the measurement of some levels, by name."""
    statistics, info = solution.statistics, solution.statistics.info
    facts = {"Base model": f"{info.base_model} ({info.architecture}, {counted(info.num_layers, 'layer')})"}
    for index, name in enumerate(short_names(info.models)):
        rows = statistics.task == index
        samples, tokens = int(rows.sum()), int(statistics.tokens[rows].sum())
        facts[f"Expert {name}"] = (
            f"{info.models[index]}, measured on {counted(samples, 'sample')} ({counted(tokens, 'token')}) of "
            f"{info.calibration[index].source}"
        )
    balanced = "every sample has the same influence" if solution.balance else "samples are not balanced"
    facts["Solved with"] = f"{balanced}, ridge {plain_number(solution.ridge)}"
    if solution.task_weights:
        facts["Solved with"] += f", task weights {', '.join(map(plain_number, solution.task_weights))}"
    facts["Intervals"] = (
        f"from the {INTERVAL[0]:.0%} to the {INTERVAL[1]:.0%} quantile of {DRAWS} bootstrap draws of the samples"
    )
    if coarser := [str(own) for own in info.fallbacks if own.level in levels]:
        facts["Coarser levels"] = " ".join(coarser)
    facts["Versions"] = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    return facts


def _level_sections(analysis: LevelAnalysis) -> Iterator[Section]:
    if analysis.solution.level == "model":
        header = ["Expert", "merging weight", "90 % interval", "share kept"]
        weights, shares = analysis.alpha[0].tolist(), analysis.retained[0].tolist()
        rows = [
            [name, plain_number(weights[i]), _interval(analysis, 0, i) or "–", percent(shares[i])]
            for i, name in enumerate(analysis.experts)
        ]
        yield Section("Share kept", table=Table(header, rows))
    else:
        yield Section("Share kept", charts=[_retained_chart(analysis)])
        yield Section("Merging weights", charts=[_alpha_chart(analysis), alpha_map(analysis)])
    yield _doubts_section(analysis)


def _doubts_section(analysis: LevelAnalysis) -> Section:
    paragraphs = [
        "The weights of a submodule count as unreliable if its condition number is over "
        f"{plain_number(MOST_CONDITION)} (the experts change the features almost alike, so that the data hardly tells "
        "their weights apart), if experts are linearly dependent, if a 90 % bootstrap interval is wider than "
        f"{plain_number(WIDEST_INTERVAL)}, or if a weight lies outside "
        f"{' to '.join(map(plain_number, PLAUSIBLE_ALPHA))}."
    ]
    if analysis.samples < FEW_SAMPLES:
        lack = "there are no intervals" if analysis.samples == 1 else "the intervals come out too narrow"
        paragraphs.append(f"With {counted(analysis.samples, 'sample')} per task {lack}.")
    rows = [[name, "; ".join(reasons)] for name, reasons in analysis.doubts.items()]
    if not rows:
        paragraphs.append("No submodule is unreliable.")
    return Section("Unreliable merging weights", paragraphs, table=Table(["Submodule", "Why"], rows) if rows else None)


# Charts


def _retained_chart(analysis: LevelAnalysis) -> Chart:
    by_layer = torch.stack(list(analysis.kept_by_layer().values()))
    return Chart(
        name=f"retained-{analysis.solution.level}",
        title="Share of each expert's feature change that the merge keeps",
        caption="Measured on each expert's own data, for every layer from layer 0 on. Thin lines mark 0 % and 50 %. "
        "Values below −100 % are drawn at −100 %.",
        alt=f"Lines over the decoder layers, one per expert. By layer, {_extents(analysis, by_layer, percent)}.",
        picture=line_chart(
            _panels(analysis, analysis.retained, analysis.share),
            x_label="decoder layer",
            y_label="share kept",
            y_percent=True,
            y_range=(-1.0, 1.0),
            lines_at=(0.0, LOSES_MOST),
        ),
        table=_submodule_table(analysis, analysis.retained, percent),
    )


def _alpha_chart(analysis: LevelAnalysis) -> Chart:
    ends = None if analysis.samples == 1 else analysis.intervals
    bands = (
        "The band around a line is a 90 % bootstrap interval: it leaves out the lowest and the highest 5 % of the "
        f"weights that {DRAWS} draws of the samples, with replacement, give. "
    )
    rows = []
    for row, name in enumerate(analysis.submodules):
        intervals = [_interval(analysis, row, i) for i in range(len(analysis.experts))]
        weights = map(plain_number, analysis.alpha[row].tolist())
        rows.append([name, *(f"{w} ({i})" if i else w for w, i in zip(weights, intervals, strict=True))])
    return Chart(
        name=f"alpha-{analysis.solution.level}",
        title="Merging weights by layer",
        caption=f"At 1 the merge takes all of an expert's change, at 0 none of it. {bands if ends else ''}"
        "Values below −2 or above 3 are drawn at these limits.",
        alt=f"Lines over the decoder layers, one per expert{', in bands of 90 % bootstrap intervals' if ends else ''}. "
        f"{_extents(analysis, analysis.alpha)}.",
        picture=line_chart(
            _panels(analysis, analysis.alpha, torch.ones_like(analysis.alpha), ends),
            x_label="decoder layer",
            y_label="merging weight α",
            lines_at=(0.0, 1.0),
            y_range=(-2.0, 3.0),
        ),
        table=Table(["Submodule", *analysis.experts], rows),
    )


def alpha_map(analysis: LevelAnalysis) -> Chart:
    """Figure 5 of the paper: experts by layers for each branch; heads by layers for each expert."""
    matrices = []
    for kind, layers in kinds_of(analysis.submodules).items():
        rows = [row for rows in layers.values() for row in rows]
        places = [place_of(analysis.submodules[row]) for row in rows]
        members = sorted({place.member or 0 for place in places})
        grid = torch.full((len(analysis.experts), len(members), len(layers)), torch.nan, dtype=torch.float64)
        for row, place in zip(rows, places, strict=True):
            grid[:, members.index(place.member or 0), list(layers).index(place.layer or 0)] = analysis.alpha[row]
        columns = [str(layer) for layer in layers]
        if len(members) == 1:
            matrices.append(Matrix(kind_name(kind), grid[:, 0].tolist(), analysis.experts, columns))
        else:
            matrices += [
                Matrix(f"{kind_name(kind)}, {name}", grid[i].tolist(), list(map(str, members)), columns)
                for i, name in enumerate(analysis.experts)
            ]
    return Chart(
        name=f"alpha-map-{analysis.solution.level}",
        title="Merging weights at a glance",
        caption="Drawn like Figure 5 of the paper. Weights below 0 are pink, weights above 1 are red.",
        alt=f"Heat maps, layers from left to right. Merging weights of {_extents(analysis, analysis.alpha)}.",
        picture=heat_map(
            matrices, x_label="decoder layer", y_label="", value_label="merging weight α", limits=(0.0, 1.0)
        ),
        table=_submodule_table(analysis, analysis.alpha),
    )


def _panels(
    analysis: LevelAnalysis, values: torch.Tensor, weights: torch.Tensor, ends: Sequence[torch.Tensor] | None = None
) -> list[Panel]:
    """A panel for each kind of submodule, with a line for each expert over the layers.

    Args:
        analysis: the merge.
        values: [S, T]. If a layer has several submodules of a kind, the line is their mean, with ``weights`` [S, T].
        weights: the weights of such a mean.
        ends: the ends of the values' bands, two [S, T], which are drawn where a layer has one submodule of the kind.
    """
    panels = []
    for kind, layers in kinds_of(analysis.submodules).items():
        most = max(map(len, layers.values()))
        drawn = [torch.stack([pooled(values[rows], weights[rows]) for rows in layers.values()])]
        if ends is not None and most == 1:
            drawn += [end[[row for (row,) in layers.values()]] for end in ends]
        columns = zip(analysis.experts, *(own.T.tolist() for own in drawn), strict=True)
        title = kind_name(kind) + (f": mean of {most}" if most > 1 else "")
        panels.append(Panel(title, [Line(name, list(layers), *rest) for name, *rest in columns]))
    return panels


def _interval(analysis: LevelAnalysis, row: int, expert: int) -> str:
    low, high = (float(end[row, expert]) for end in analysis.intervals)
    return "" if math.isnan(low) else f"{plain_number(low)} to {plain_number(high)}"


def _extents(analysis: LevelAnalysis, values: torch.Tensor, written: Callable[[float], str] = plain_number) -> str:
    """The smallest and the largest value [..., T] of each expert in words."""
    columns = zip(analysis.experts, values.T.tolist(), strict=True)
    return "; ".join(f"{name}: {extent(column, written)}" for name, column in columns)


def _submodule_table(
    analysis: LevelAnalysis, values: torch.Tensor, written: Callable[[float], str] = plain_number
) -> Table:
    """A table with one row per submodule of values [S, T]."""
    rows = zip(analysis.submodules, values.tolist(), strict=True)
    return Table(["Submodule", *analysis.experts], [[name, *map(written, row)] for name, row in rows])
