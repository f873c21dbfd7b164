"""The report on a merge: ``report.html`` with its charts, from a statistics file.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch

from mergekit_slta.reports.analysis import (
    DRAWS,
    FEW_SAMPLES,
    INTERVAL,
    MOST_CONDITION,
    PLAUSIBLE_ALPHA,
    WIDEST_INTERVAL,
    LevelAnalysis,
    analyse,
    kinds_of,
    place_of,
    pooled,
    short_names,
)
from mergekit_slta.reports.figures import PAIR, Line, Matrix, Panel, heat_map, line_chart
from mergekit_slta.reports.page import Chart, Page, Section, Table
from mergekit_slta.reports.words import enumerated, percent, plain_number
from mergekit_slta.slta.statistics import Statistics

LOSES_MOST = 0.5
KINDS = {"layer": "layer", "attn": "attention", "mlp": "MLP", "head": "head"}


# In words


def verdict(analysis: LevelAnalysis) -> str:
    """One sentence: how much of each expert's feature change the merge keeps, and in which layers it loses most."""
    by_layer = analysis.kept_by_layer()
    clauses = []
    for index, name in enumerate(analysis.experts):
        losing = [layer for layer, kept in by_layer.items() if float(kept[index]) < LOSES_MOST]
        worst = min(losing, key=lambda layer: float(by_layer[layer][index]), default=0)
        clauses.append(_clause(name, float(analysis.kept[index]), _where(losing, len(by_layer), worst)))
    said = "; ".join([*clauses[:-1], f"and {clauses[-1]}"] if len(clauses) > 1 else clauses)
    return f"Merged at level {analysis.level}, the result {said}."


def _clause(name: str, kept: float, where: str) -> str:
    change = f"{name}'{'s' * (not name.endswith('s'))} feature change"
    if math.isnan(kept):
        return f"has nothing of {name} to keep, which changes no feature on its own data"
    if kept <= 0:
        return f"keeps nothing of {change} ({percent(kept)})"
    if kept < LOSES_MOST:
        return f"keeps only {percent(kept)} of {change}" + (f" (less than half of it in {where})" if where else "")
    return f"keeps {percent(kept)} of {change}" + (f" but loses most of it in {where}" if where else "")


def _where(layers: Sequence[int], depth: int, worst: int) -> str:
    """Layers in words: every one, runs of them, or how many where there are too many runs."""
    if not layers:
        return ""
    if len(layers) == depth:
        return "every layer" if depth > 1 else f"layer {layers[0]}"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
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
        sentence += f", as far as {_samples(analysis.samples)} of a task can tell"
    return f"{sentence}."


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count > 1)}"


MEANING = (
    "This is a share of feature change, not accuracy. 100 % would mean that on the expert's own data every submodule "
    "changes the base model's features just as the expert does; at 0 % the merge is as far from the expert as the base "
    "model is, and below 0 % it is farther. It takes features to change linearly with the weights."
)


# The page


def report_page(
    statistics: Statistics, *, levels: Sequence[str] = (), balance: bool = True, ridge: float = 0.0
) -> Page:
    """The report on a merge.

    Args:
        statistics: what calibration measured, of the experts that are merged.
        levels: what to report on, the most important first; all that was measured by default.
        balance, ridge: how the merging weights are solved for, as in ``solver.solve``.

    Raises:
        SltaError: a level was not measured.
    """
    chosen = levels or sorted(statistics.info.levels, key=lambda level: level != "attn_mlp")
    analyses = [analyse(statistics, level, balance=balance, ridge=ridge) for level in chosen]
    sections = [_levels_section(analyses)] if len(analyses) > 1 else []
    for analysis in analyses:
        suffix = f" (level {analysis.level})" if len(analyses) > 1 else ""
        sections += _level_sections(analysis, suffix)
    return Page(
        title=f"What a merge of {enumerated(analyses[0].experts)} keeps",
        verdict=[verdict(analyses[0]), MEANING, reliability(analyses[0])],
        facts=_facts(statistics, balance, ridge),
        sections=sections,
    )


def write_report(
    statistics: Statistics, folder: Path, *, levels: Sequence[str] = (), balance: bool = True, ridge: float = 0.0
) -> Path:
    """Write ``report.html`` and its charts as PNG files into a folder; the arguments are those of ``report_page``.

    Returns:
        The path of ``report.html``.
    """
    return report_page(statistics, levels=levels, balance=balance, ridge=ridge).write(folder, "report.html")


def _facts(statistics: Statistics, balance: bool, ridge: float) -> dict[str, str]:
    info = statistics.info
    facts = {"Base model": f"{info.base_model} ({info.architecture}, {info.num_layers} layers)"}
    for index, name in enumerate(short_names(info.models)):
        rows = statistics.task == index
        tokens = int(statistics.tokens[rows].sum())
        facts[f"Expert {name}"] = (
            f"{info.models[index]}, measured on {int(rows.sum())} samples ({tokens} tokens) of "
            f"{info.calibration[index].source}"
        )
    balanced = "every sample has the same influence" if balance else "samples are not balanced"
    facts["Solved with"] = f"{balanced}, ridge {plain_number(ridge)}"
    facts["Intervals"] = (
        f"from the {INTERVAL[0]:.0%} to the {INTERVAL[1]:.0%} quantile of {DRAWS} bootstrap draws of the samples"
    )
    facts["Versions"] = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    return facts


def _levels_section(analyses: Sequence[LevelAnalysis]) -> Section:
    experts = analyses[0].experts
    rows = [
        [a.level, str(len(a.submodules)), *map(percent, a.kept.tolist()), f"{len(a.doubts)} of {len(a.submodules)}"]
        for a in analyses
    ]
    header = ["Level", "Submodules", *(f"keeps of {name}" for name in experts), "unreliable"]
    text = "How much of each expert's feature change the merge keeps, by the level that it is solved at."
    return Section("The levels compared", [text], table=Table(header, rows))


def _level_sections(analysis: LevelAnalysis, suffix: str) -> Iterator[Section]:
    whole = analysis.level == "model"
    several = len(analysis.experts) > 1
    kept = [] if whole else [_retained_chart(analysis)]
    kept += [_cost_map(analysis)] if several else []
    yield Section(f"What the merge keeps{suffix}", [], kept, _model_table(analysis) if whole else None)
    if not whole:
        yield Section(f"Merging weights{suffix}", [], [_alpha_chart(analysis), _alpha_map(analysis)])
    yield _doubts_section(analysis, suffix)
    between = [] if whole else [_condition_chart(analysis)]
    between += [_cosine_map(analysis)] if several else []
    if between:
        yield Section(f"How the experts interfere{suffix}", [], between)
    if len(analysis.by_samples) > 1:
        charts = [_samples_alpha_chart(analysis), _samples_retained_chart(analysis)]
        yield Section(f"How many samples are enough{suffix}", [], charts)


def _doubts_section(analysis: LevelAnalysis, suffix: str) -> Section:
    paragraphs = [
        f"Unreliable means: a condition number over {plain_number(MOST_CONDITION)} (the experts change the features "
        "almost alike, so that the data hardly tells their weights apart), linearly dependent experts, a 90 % "
        f"bootstrap interval wider than {plain_number(WIDEST_INTERVAL)}, or a weight outside "
        f"{' to '.join(map(plain_number, PLAUSIBLE_ALPHA))}."
    ]
    if analysis.samples < FEW_SAMPLES:
        none = " (from a single one there are none)" if analysis.samples == 1 else ""
        paragraphs.append(f"With {_samples(analysis.samples)} of a task the intervals come out too narrow{none}.")
    rows = [[name, "; ".join(reasons)] for name, reasons in analysis.doubts.items()]
    table = Table(["Submodule", "Why"], rows) if rows else None
    if table is None:
        paragraphs.append("No submodule is unreliable.")
    return Section(f"Unreliable merging weights{suffix}", paragraphs, table=table)


def _model_table(analysis: LevelAnalysis) -> Table:
    rows = [
        [name, *_alpha_cells(analysis, 0)[index].split(" ", 1), percent(float(analysis.retained[0, index]))]
        for index, name in enumerate(analysis.experts)
    ]
    return Table(["Expert", "merging weight", "90 % interval", "share kept"], rows)


# Charts


def _several(layers: dict[int, list[int]]) -> bool:
    return any(len(rows) > 1 for rows in layers.values())


def _kind_title(kind: str, layers: dict[int, list[int]]) -> str:
    name = KINDS.get(kind, kind)
    most = max(map(len, layers.values()))
    return f"{name}: mean of {most}, and each one" if most > 1 else name


def _panel(
    analysis: LevelAnalysis, kind: str, layers: dict[int, list[int]], values: torch.Tensor, weights: torch.Tensor
) -> Panel:
    """One line per expert over the layers, of values [S, T]; where a layer has several, their weighted mean."""
    means = torch.stack([pooled(values[rows], weights[rows]) for rows in layers.values()])
    lines = []
    for index, expert in enumerate(analysis.experts):
        cloud = [(layer, float(values[row, index])) for layer, rows in layers.items() for row in rows]
        lines.append(Line(expert, list(layers), means[:, index].tolist(), cloud=cloud if _several(layers) else ()))
    return Panel(_kind_title(kind, layers), lines)


def _with_intervals(analysis: LevelAnalysis, layers: dict[int, list[int]], panel: Panel) -> Panel:
    """A panel of merging weights with their intervals, and with shades where they are unreliable."""
    rows = [rows[0] for rows in layers.values()]
    lines = [
        replace(line, low=analysis.low[rows, index].tolist(), high=analysis.high[rows, index].tolist())
        for index, line in enumerate(panel.lines)
    ]
    doubtful = [layer for layer, row in zip(layers, rows, strict=True) if analysis.submodules[row] in analysis.doubts]
    return Panel(panel.title, lines, doubtful)


def _mean(values: torch.Tensor) -> float:
    return float(values.nanmean())


def _retained_chart(analysis: LevelAnalysis) -> Chart:
    panels = [
        _panel(analysis, kind, layers, analysis.retained, analysis.share)
        for kind, layers in kinds_of(analysis.submodules).items()
    ]
    png = line_chart(
        panels, x_label="decoder layer", y_label="share kept", y_percent=True, y_range=(-1.0, 1.0),
        lines_at=(0.0, LOSES_MOST),
    )  # fmt: skip
    by_layer = analysis.kept_by_layer()
    said = [f"{name}: {_range((kept[i] for kept in by_layer.values()), percent)}" for i, name in _named(analysis)]
    return Chart(
        name=f"retained-{analysis.level}",
        title="Share of each expert's feature change that the merge keeps",
        caption="On each expert's own data, layer by layer, from layer 0 on. The lines are at 0 % and 50 %; what is "
        "below −100 % is drawn there.",
        alt=f"Lines over the decoder layers, one per expert. By layer, {'; '.join(said)}.",
        png=png,
        table=_submodule_table(analysis, analysis.experts, lambda row: map(percent, analysis.retained[row].tolist())),
    )


def _alpha_chart(analysis: LevelAnalysis) -> Chart:
    panels = []
    for kind, layers in kinds_of(analysis.submodules).items():
        panel = _panel(analysis, kind, layers, analysis.alpha, torch.ones_like(analysis.alpha))
        panels.append(panel if _several(layers) else _with_intervals(analysis, layers, panel))
    png = line_chart(
        panels, x_label="decoder layer", y_label="merging weight α", lines_at=(0.0, 1.0), y_range=(-2.0, 3.0),
        shaded_label="unreliable",
    )  # fmt: skip
    said = [f"{name}: {_range(analysis.alpha[:, i], plain_number)}" for i, name in _named(analysis)]
    return Chart(
        name=f"alpha-{analysis.level}",
        title="Merging weights by layer",
        caption="1 takes an expert whole, 0 leaves it out; the bands are 90 % bootstrap intervals over the samples. "
        "What is below −2 or above 3 is drawn there.",
        alt=f"Lines over the decoder layers with bands, one per expert. {'; '.join(said)}.",
        png=png,
        table=_submodule_table(analysis, analysis.experts, lambda row: _alpha_cells(analysis, row)),
    )


def _alpha_cells(analysis: LevelAnalysis, row: int) -> list[str]:
    return [
        plain_number(value) + ("" if math.isnan(low) else f" ({plain_number(low)} to {plain_number(high)})")
        for value, low, high in zip(
            analysis.alpha[row].tolist(), analysis.low[row].tolist(), analysis.high[row].tolist(), strict=True
        )
    ]


def _alpha_map(analysis: LevelAnalysis) -> Chart:
    """Figure 5 of the paper: experts by layers for each branch; heads by layers for each expert."""
    matrices = []
    for kind, layers in kinds_of(analysis.submodules).items():
        columns = [str(layer) for layer in layers]
        if not _several(layers):
            values = [[float(analysis.alpha[rows[0], i]) for rows in layers.values()] for i, _ in _named(analysis)]
            matrices.append(Matrix(KINDS.get(kind, kind), values, analysis.experts, columns))
            continue
        members = sorted({place_of(analysis.submodules[row]).member or 0 for rows in layers.values() for row in rows})
        at = {(place_of(analysis.submodules[row]).member, layer): row for layer, rows in layers.items() for row in rows}
        for i, name in _named(analysis):
            values = [
                [float(analysis.alpha[at[m, layer], i]) if (m, layer) in at else math.nan for layer in layers]
                for m in members
            ]
            matrices.append(Matrix(f"{KINDS.get(kind, kind)}, {name}", values, list(map(str, members)), columns))
    png = heat_map(matrices, x_label="decoder layer", y_label="", value_label="merging weight α", limits=(0.0, 1.0))
    return Chart(
        name=f"alpha-map-{analysis.level}",
        title="Merging weights at a glance",
        caption="As Figure 5 of the paper. Weights below 0 are pink, weights above 1 red.",
        alt="Heat maps of the merging weights, layers from left to right; the numbers are those of the chart by layer.",
        png=png,
        table=_submodule_table(analysis, analysis.experts, lambda row: map(plain_number, analysis.alpha[row].tolist())),
    )


def _condition_chart(analysis: LevelAnalysis) -> Chart:
    lines = []
    for kind, layers in kinds_of(analysis.submodules).items():
        worst = [float(analysis.condition[rows].nan_to_num(0.0).max()) or math.nan for rows in layers.values()]
        label = f"{KINDS.get(kind, kind)} (largest)" if _several(layers) else KINDS.get(kind, kind)
        lines.append(Line(label, list(layers), worst))
    png = line_chart(
        [Panel("", lines)], x_label="decoder layer", y_label="condition number", log_y=True, lines_at=(MOST_CONDITION,)
    )
    return Chart(
        name=f"condition-{analysis.level}",
        title="Condition number of the system solved",
        caption=f"How hard the experts are to tell apart: 1 is ideal, beyond {plain_number(MOST_CONDITION)} (the line) "
        "the weights are hardly determined.",
        alt=f"Lines over the decoder layers: {_range(analysis.condition, plain_number)}.",
        png=png,
        table=_submodule_table(analysis, ["condition"], lambda row: [plain_number(float(analysis.condition[row]))]),
    )


def _cosine_map(analysis: LevelAnalysis) -> Chart:
    pairs = list(combinations(range(len(analysis.experts)), 2))
    names = [f"{analysis.experts[a]}{PAIR}{analysis.experts[b]}" for a, b in pairs]
    by_layer = analysis.level != "model"
    matrices = [
        Matrix(
            KINDS.get(kind, kind),
            [[_mean(analysis.cosine[rows, a, b]) for rows in layers.values()] for a, b in pairs],
            names,
            [str(layer) if by_layer else "" for layer in layers],
        )
        for kind, layers in kinds_of(analysis.submodules).items()
    ]
    png = heat_map(
        matrices,
        x_label="decoder layer" if by_layer else "",
        y_label="",
        value_label="cosine similarity",
        limits=(-1.0, 1.0),
        colours="RdBu_r",
    )
    said = [
        f"{name}: {_range(analysis.cosine[:, a, b], plain_number)}" for name, (a, b) in zip(names, pairs, strict=True)
    ]
    return Chart(
        name=f"cosine-{analysis.level}",
        title="How alike the experts change the features",
        caption="Cosine similarity of two experts' feature changes, from the Gram matrices over all tasks' data. Near "
        "0 they do not touch each other; near 1 the merge cannot serve one without the other; below 0 they pull apart.",
        alt=f"Heat maps, pairs of experts by layers. {'; '.join(said)}.",
        png=png,
        table=_submodule_table(
            analysis, names, lambda row: [plain_number(float(analysis.cosine[row, a, b])) for a, b in pairs]
        ),
    )


def _cost_map(analysis: LevelAnalysis) -> Chart:
    gain = 100 * (analysis.without - analysis.kept[:, None])
    experts = analysis.experts
    rows = [
        [name, percent(float(analysis.kept[a])), *(percent(share) for share in analysis.without[a].tolist())]
        for a, name in _named(analysis)
    ]
    said = [
        f"without {experts[b]}, {percent(float(analysis.without[a, b]))} of {experts[a]} instead of "
        f"{percent(float(analysis.kept[a]))}"
        for a in range(len(experts))
        for b in range(len(experts))
        if a != b
    ]
    return Chart(
        name=f"cost-{analysis.level}",
        title="What each expert costs the others",
        caption="The share that the merge would keep of the expert of the row, beyond what it keeps now, if the expert "
        "of the column were left out.",
        alt=f"Heat map, experts by experts: {'; '.join(said)}.",
        png=heat_map(
            [Matrix("", gain.tolist(), experts, experts)],
            x_label="without",
            y_label="kept of",
            value_label="percentage points more",
            limits=(0.0, max(10.0, float(gain.nan_to_num().max()))),
            colours="Blues",
            numbers=lambda points: f"{points:+.0f}".replace("-", "−"),
        ),
        table=Table(["Kept of", "now", *(f"without {name}" for name in experts)], rows),
    )


def _samples_alpha_chart(analysis: LevelAnalysis) -> Chart:
    counts, effects = list(analysis.by_samples), list(analysis.by_samples.values())
    alpha = torch.stack([effect.alpha for effect in effects])  # [counts, T]
    spread = torch.stack([effect.spread for effect in effects])
    low, high = alpha - spread, alpha + spread
    lines = [
        Line(name, counts, alpha[:, i].tolist(), low[:, i].tolist(), high[:, i].tolist())
        for i, name in _named(analysis)
    ]
    return Chart(
        name=f"samples-alpha-{analysis.level}",
        title="Merging weights by number of samples",
        caption="Mean over the submodules; the band is the standard deviation of one submodule's weight when so "
        "many samples of each task are drawn (with replacement) from those measured.",
        alt=f"Lines with bands. Standard deviation: {plain_number(float(spread[0].max()))} at most with {counts[0]}, "
        f"{plain_number(float(spread[-1].max()))} with {counts[-1]} samples per task.",
        png=line_chart([Panel("", lines)], x_label="samples per task", y_label="merging weight α", log_x=True),
        table=_samples_table(analysis),
    )


def _samples_retained_chart(analysis: LevelAnalysis) -> Chart:
    counts = list(analysis.by_samples)
    retained = torch.stack([effect.retained for effect in analysis.by_samples.values()])  # [counts, T]
    lines = [Line(name, counts, retained[:, i].tolist()) for i, name in _named(analysis)]
    said = [
        f"{name} {percent(float(retained[0, i]))} with {counts[0]}, {percent(float(retained[-1, i]))} with {counts[-1]}"
        for i, name in _named(analysis)
    ]
    return Chart(
        name=f"samples-retained-{analysis.level}",
        title="Share kept by number of samples",
        caption="What weights from so many samples keep of each expert's feature change, measured on all samples.",
        alt=f"Lines, one per expert: {'; '.join(said)} samples per task.",
        png=line_chart(
            [Panel("", lines)],
            x_label="samples per task",
            y_label="share kept",
            y_percent=True,
            y_range=(-1.0, 1.0),
            log_x=True,
        ),
        table=_samples_table(analysis),
    )


def _samples_table(analysis: LevelAnalysis) -> Table:
    experts = analysis.experts
    header = ["Samples per task", *(f"weight of {n}" for n in experts), *(f"kept of {n}" for n in experts)]
    rows = []
    for count, effect in analysis.by_samples.items():
        pairs = zip(effect.alpha.tolist(), effect.spread.tolist(), strict=True)
        alpha = [f"{plain_number(mean)} ± {plain_number(spread)}" for mean, spread in pairs]
        rows.append([str(count), *alpha, *map(percent, effect.retained.tolist())])
    return Table(header, rows)


def _named(analysis: LevelAnalysis) -> list[tuple[int, str]]:
    return list(enumerate(analysis.experts))


def _submodule_table(analysis: LevelAnalysis, names: Sequence[str], cells: Callable[[int], Iterable[str]]) -> Table:
    rows = [[name, *cells(row)] for row, name in enumerate(analysis.submodules)]
    return Table(["Submodule", *names], rows)


def _range(values: Iterable[float | torch.Tensor], written: Callable[[float], str]) -> str:
    finite = [float(value) for value in values if not math.isnan(float(value))]
    return f"{written(min(finite))} to {written(max(finite))}" if finite else "none"
