"""What a statistics file says about a merge: where it keeps each expert's feature change, where it does not, and why.

Everything here is arithmetic on Gram matrices: neither models nor data are needed. Like the merging weights themselves
it takes features to change linearly with the weights, which holds exactly at level ``linear`` only.

Shapes: ``S`` submodules of a level, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch

from mergekit_slta.figures import PAIR, Line, Matrix, Panel, heat_map, line_chart, percent, plain_number
from mergekit_slta.page import Chart, Page, Section, Table
from mergekit_slta.solver import bootstrap, merging_weights, task_means
from mergekit_slta.statistics import Statistics

DRAWS = 200
INTERVAL = (0.05, 0.95)
SAMPLE_COUNTS = (1, 3, 10, 30)
SEED = 0
# A merging weight is called unreliable beyond these; 100 is what two experts with a cosine similarity of 0.98 have.
MOST_CONDITION = 100.0
WIDEST_INTERVAL = 0.2
PLAUSIBLE_ALPHA = (-0.25, 1.25)
# With fewer samples per task than this the bootstrap's intervals come out too narrow.
FEW_SAMPLES = 5
LOSES_MOST = 0.5

KINDS = {"layer": "layer", "attn": "attention", "mlp": "MLP", "head": "head", "model": "model"}


@dataclass(frozen=True)
class Place:
    """Where a submodule stands: its layer, its kind, and its number where a layer has several of the kind."""

    layer: int | None
    kind: str
    member: int | None


def place_of(name: str) -> Place:
    """The place of a submodule, by its canonical name."""
    match = re.fullmatch(r"layer\.(\d+)(?:\.(.+))?", name)
    if match is None:
        return Place(None, name, None)
    inside = match[2] or "layer"
    number = re.search(r"(?<![^.])\d+(?![^.])", inside)
    kind = inside.replace(f".{number[0]}", "", 1) if number else inside
    return Place(int(match[1]), kind, int(number[0]) if number else None)


@dataclass(frozen=True)
class SampleEffect:
    """What merging weights from fewer samples are worth, each [T].

    Attributes:
        alpha: their mean over submodules and draws.
        spread: their standard deviation over draws, mean over submodules.
        retained: the share of each expert's feature change that they keep, measured on all samples.
    """

    alpha: torch.Tensor
    spread: torch.Tensor
    retained: torch.Tensor


@dataclass(frozen=True)
class LevelAnalysis:
    """A merge at one level.

    Attributes:
        level: the level.
        experts: the experts' names, as short as they can be told apart.
        submodules: their canonical names.
        alpha: [S, T] merging weights.
        low, high: [S, T], the ends of their 90 % bootstrap interval.
        retained: [S, T], the share of each expert's feature change that the merge keeps; NaN where there is none.
        share: [S, T], how much of the feature change on a task's data is its own expert's: 1 where all experts change
            as much, T where only that one does.
        condition: [S], of the scaled A; NaN where A is zero.
        cosine: [S, T, T], cosine similarity of the experts' feature changes over all tasks' data; NaN without change.
        without: [T, T], the share of expert a's feature change that the merge keeps if expert b is left out of it.
        by_samples: what fewer samples per task would give.
        doubts: by submodule, why its merging weights are unreliable.
    """

    level: str
    experts: tuple[str, ...]
    submodules: tuple[str, ...]
    alpha: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    retained: torch.Tensor
    share: torch.Tensor
    condition: torch.Tensor
    cosine: torch.Tensor
    without: torch.Tensor
    by_samples: dict[int, SampleEffect]
    doubts: dict[str, list[str]]

    @property
    def kept(self) -> torch.Tensor:
        """The share of each expert's feature change that the merge keeps in all submodules together, [T]."""
        return pooled(self.retained, self.share)

    def kept_by_layer(self) -> dict[int, torch.Tensor]:
        """The same for each layer, [T]."""
        layers: dict[int, list[int]] = {}
        for index, name in enumerate(self.submodules):
            layer = place_of(name).layer
            if layer is not None:
                layers.setdefault(layer, []).append(index)
        return {layer: pooled(self.retained[rows], self.share[rows]) for layer, rows in layers.items()}


def pooled(retained: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Mean of retained shares over submodules [S, ...], each counting by how much of the change is the expert's own.

    A submodule that an expert hardly changes may have any retained share, and should count for as little.
    """
    weight = torch.where(retained.isnan(), 0.0, share)
    total = weight.sum(0)
    return torch.where(total > 0, (weight * retained.nan_to_num()).sum(0) / total, torch.nan)


# Analysis


def analyse(statistics: Statistics, level: str, *, balance: bool = True, ridge: float = 0.0) -> LevelAnalysis:
    """Analyse the merge that the statistics give at a level.

    Args:
        statistics: what calibration measured, of the experts that are merged.
        level: the level.
        balance, ridge: how the merging weights are solved for, as in ``solver.solve``.

    Raises:
        SltaError: the level was not measured.
    """
    names = statistics.submodules(level)
    solutions = statistics.solve(level, balance=balance, ridge=ridge)
    draws = [
        bootstrap(statistics.grams[name], statistics.task, DRAWS, seed=SEED, balance=balance, ridge=ridge)
        for name in names
    ]
    low, high = (torch.stack([alpha.quantile(q, dim=0) for alpha in draws]) for q in INTERVAL)
    means = [task_means(statistics.grams[name], statistics.task, balance) for name in names]
    alpha = torch.stack([solutions[name].alpha for name in names])
    doubts = {
        name: found
        for index, name in enumerate(names)
        if (found := _doubts(alpha[index], high[index] - low[index], solutions[name].condition, means[index], ridge))
    }
    return LevelAnalysis(
        level=level,
        experts=short_names(statistics.info.models),
        submodules=tuple(names),
        alpha=alpha,
        low=low,
        high=high,
        retained=torch.stack([solutions[name].retained for name in names]),
        share=torch.stack([_own_share(mean) for mean in means]),
        condition=torch.tensor([solutions[name].condition for name in names], dtype=torch.float64),
        cosine=torch.stack([_cosine(mean.sum(0)) for mean in means]),
        without=_kept_without(statistics, level, balance, ridge),
        by_samples=_by_samples(statistics, names, balance, ridge),
        doubts=doubts,
    )


def _doubts(alpha: torch.Tensor, width: torch.Tensor, condition: float, means: torch.Tensor, ridge: float) -> list[str]:
    """Why the merging weights [T] of a submodule are unreliable, in words."""
    if not bool(means.any()):
        return ["no expert changes its features on any sample"]
    found = []
    changing = means.sum(0).diagonal() > 0
    _, kept = merging_weights(means, ridge)
    if int((kept > 0).sum()) < int(changing.sum()):
        found.append("experts are linearly dependent")
    if condition > MOST_CONDITION:
        found.append(f"condition number {plain_number(condition)}")
    if float(width.max()) > WIDEST_INTERVAL:
        found.append(f"interval {plain_number(float(width.max()))} wide")
    outside = [value for value in alpha.tolist() if not PLAUSIBLE_ALPHA[0] <= value <= PLAUSIBLE_ALPHA[1]]
    if outside:
        found.append(f"weight {', '.join(map(plain_number, outside))}")
    return found


def _own_share(means: torch.Tensor) -> torch.Tensor:
    """B_a[a, a] over the mean of B_a's diagonal, [T]; free of the submodule's scale, balanced or not."""
    power = means.diagonal(dim1=-2, dim2=-1)
    own = power.diagonal()
    return torch.where(own > 0, own / power.mean(-1).clamp_min(torch.finfo(own.dtype).tiny), 0.0)


def _cosine(matrix: torch.Tensor) -> torch.Tensor:
    norm = matrix.diagonal().sqrt()
    product = norm[:, None] * norm
    return torch.where(product > 0, matrix / product, torch.nan)


def _kept_without(statistics: Statistics, level: str, balance: bool, ridge: float) -> torch.Tensor:
    """[T, T]: what the merge without expert b keeps of expert a; NaN on the diagonal, and with one expert."""
    experts = len(statistics.info.models)
    kept = torch.full((experts, experts), torch.nan, dtype=torch.float64)
    for left_out in range(experts) if experts > 1 else ():
        others = [expert for expert in range(experts) if expert != left_out]
        part = statistics.select(others)
        solutions = part.solve(level, balance=balance, ridge=ridge)
        retained = torch.stack([solution.retained for solution in solutions.values()])
        share = torch.stack([_own_share(task_means(part.grams[name], part.task, balance)) for name in solutions])
        kept[others, left_out] = pooled(retained, share)
    return kept


def _by_samples(statistics: Statistics, names: Sequence[str], balance: bool, ridge: float) -> dict[int, SampleEffect]:
    """What the merging weights would be with fewer samples per task, drawn with replacement."""
    available = statistics.task.bincount()
    most = int(available.max())
    effects = {}
    for count in sorted({*(count for count in SAMPLE_COUNTS if count < most), most}):
        counts = _draw(statistics.task, count, DRAWS // 2)
        alphas, kept, shares = [], [], []
        for name in names:
            grams = statistics.grams[name]
            alpha, _ = merging_weights(task_means(grams, statistics.task, balance, counts), ridge)
            means = task_means(grams, statistics.task, balance)
            alphas.append(alpha)
            kept.append(_retained(means, alpha))
            shares.append(_own_share(means).expand_as(alpha))
        drawn = torch.stack(alphas)  # [S, draws, T]
        effects[count] = SampleEffect(
            drawn.mean((0, 1)), drawn.std(1).mean(0), pooled(torch.stack(kept), torch.stack(shares)).mean(0)
        )
    return effects


def _draw(task: torch.Tensor, count: int, repeats: int) -> torch.Tensor:
    """How often each sample is drawn when each task draws ``count`` of its own, at most as many as it has."""
    generator = torch.Generator().manual_seed(SEED)
    counts = torch.zeros(repeats, len(task), dtype=torch.float64)
    for index in task.unique().tolist():
        rows = (task == index).nonzero().flatten()
        drawn = torch.randint(len(rows), (repeats, min(count, len(rows))), generator=generator)
        counts[:, rows] = torch.nn.functional.one_hot(drawn, len(rows)).sum(1).double()
    return counts


def _retained(means: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """``solver.retained_share`` for many merging weights [R, T] at once."""
    own = means.diagonal(dim1=-3, dim2=-1)  # [T, T], column a is B_a[:, a]
    power = own.diagonal()
    loss = torch.einsum("rb,abc,rc->ra", alpha, means, alpha) - 2 * alpha @ own + power
    return torch.where(power > 0, 1 - loss / power, torch.nan)


# In words


def short_names(models: Sequence[str]) -> tuple[str, ...]:
    """What tells the models' names apart: no folders, and nothing that all of them begin or end with.

    ``org/llama-math-v1`` and ``org/llama-code-v1`` are ``math`` and ``code``.
    """
    last = [re.split(r"[/\\]", model.rstrip("/\\"))[-1] or model for model in models]
    if len(set(last)) < len(last):
        return tuple(models)
    if len(last) == 1:
        return tuple(last)
    words = [re.split(r"([-_.])", name) for name in last]  # every other one is a separator
    begin, end = _common(words), _common([list(reversed(name)) for name in words])
    kept = ["".join(name[begin : len(name) - end]) for name in words]
    are_words = all(sum(map(str.isalpha, name)) > 1 for name in kept)  # "1" and "7b" are no names
    return tuple(kept if are_words and len(set(kept)) == len(kept) else last)


def _common(names: Sequence[Sequence[str]]) -> int:
    """How many words and separators all names begin with, whole pairs of them."""
    count = 0
    while all(name[count : count + 2] == names[0][count : count + 2] for name in names) and count < len(names[0]) - 2:
        count += 2
    return count


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
    change = f"{name}'s feature change"
    if math.isnan(kept):
        return f"has nothing of {name} to keep, which changes no feature on its own data"
    if kept <= 0:
        return f"keeps nothing of {change} ({percent(kept)})"
    if kept < LOSES_MOST:
        return f"keeps only {percent(kept)} of {change}" + (f" (it loses most in {where})" if where else "")
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
    return f"layer{'s' * (len(layers) > 1)} {_enumerated(words)}"


def _enumerated(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


def reliability(analysis: LevelAnalysis) -> str:
    """One sentence: in how many submodules the merging weights are unreliable."""
    doubtful, count = len(analysis.doubts), len(analysis.submodules)
    if not doubtful:
        return f"The merging weights of all {count} submodules look reliable."
    verb = "are" if doubtful > 1 else "is"
    return f"The merging weights of {doubtful} of {count} submodules {verb} unreliable; the list below says why."


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
        sections += _level_sections(analysis, statistics, suffix)
    return Page(
        title=f"What a merge of {_enumerated(analyses[0].experts)} keeps",
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


def _level_sections(analysis: LevelAnalysis, statistics: Statistics, suffix: str) -> Iterator[Section]:
    whole = analysis.submodules == ("model",)
    several = len(analysis.experts) > 1
    kept = [] if whole else [_retained_chart(analysis)]
    kept += [_cost_map(analysis)] if several else []
    yield Section(f"What the merge keeps{suffix}", [], kept, _model_table(analysis) if whole else None)
    if not whole:
        yield Section(f"Merging weights{suffix}", [], [_alpha_chart(analysis), _alpha_map(analysis)])
    yield _doubts_section(analysis, statistics, suffix)
    between = [] if whole else [_condition_chart(analysis)]
    between += [_cosine_map(analysis)] if several else []
    if between:
        yield Section(f"How the experts interfere{suffix}", [], between)
    yield Section(f"How many samples are enough{suffix}", [], _samples_charts(analysis))


def _doubts_section(analysis: LevelAnalysis, statistics: Statistics, suffix: str) -> Section:
    paragraphs = [
        f"Unreliable means: a condition number over {plain_number(MOST_CONDITION)} (the experts change the features "
        "almost alike, so that the data hardly tells their weights apart), linearly dependent experts, a 90 % "
        f"bootstrap interval wider than {WIDEST_INTERVAL:g}, or a weight outside {PLAUSIBLE_ALPHA[0]:g} to "
        f"{PLAUSIBLE_ALPHA[1]:g}.".replace("-", "−")
    ]
    fewest = int(statistics.task.bincount().min())
    if fewest < FEW_SAMPLES:
        paragraphs.append(
            f"With {fewest} sample{'s' * (fewest > 1)} of a task the intervals are too narrow"
            + (" (none can be had from a single one)" if fewest == 1 else "")
            + ": more samples may show more doubts."
        )
    rows = [[name, "; ".join(reasons)] for name, reasons in analysis.doubts.items()]
    table = Table(["Submodule", "Why"], rows) if rows else None
    if table is None:
        paragraphs.append("None is.")
    return Section(f"Unreliable merging weights{suffix}", paragraphs, table=table)


def _model_table(analysis: LevelAnalysis) -> Table:
    rows = [
        [name, *_alpha_cells(analysis, 0)[index].split(" ", 1), percent(float(analysis.retained[0, index]))]
        for index, name in enumerate(analysis.experts)
    ]
    return Table(["Expert", "merging weight", "90 % interval", "share kept"], rows)


# Charts


def _kinds(analysis: LevelAnalysis) -> dict[str, dict[int, list[int]]]:
    """The kinds of submodules in the order of the forward pass: layer -> the submodules' indices."""
    kinds: dict[str, dict[int, list[int]]] = {}
    for index, name in enumerate(analysis.submodules):
        place = place_of(name)
        if place.layer is not None:
            kinds.setdefault(place.kind, {}).setdefault(place.layer, []).append(index)
    return kinds


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
        _panel(analysis, kind, layers, analysis.retained, analysis.share) for kind, layers in _kinds(analysis).items()
    ]
    png = line_chart(
        panels, x_label="decoder layer", y_label="share kept", y_percent=True, y_range=(-1.0, 1.0),
        lines_at=(0.0, LOSES_MOST),
    )  # fmt: skip
    by_layer = analysis.kept_by_layer()
    said = [f"{name}: {_range([kept[i] for kept in by_layer.values()], percent)}" for i, name in _named(analysis)]
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
    for kind, layers in _kinds(analysis).items():
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
        f"{plain_number(value)} ({plain_number(low)} to {plain_number(high)})"
        for value, low, high in zip(
            analysis.alpha[row].tolist(), analysis.low[row].tolist(), analysis.high[row].tolist(), strict=True
        )
    ]


def _alpha_map(analysis: LevelAnalysis) -> Chart:
    """Figure 5 of the paper: experts by layers for each branch; heads by layers for each expert."""
    matrices = []
    for kind, layers in _kinds(analysis).items():
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
    for kind, layers in _kinds(analysis).items():
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
    layered = _kinds(analysis) or {"model": {0: [0]}}
    matrices = [
        Matrix(
            KINDS.get(kind, kind),
            [[_mean(analysis.cosine[rows, a, b]) for rows in layers.values()] for a, b in pairs],
            names,
            [str(layer) if analysis.submodules != ("model",) else "" for layer in layers],
        )
        for kind, layers in layered.items()
    ]
    png = heat_map(
        matrices,
        x_label="decoder layer" if analysis.submodules != ("model",) else "",
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


def _samples_charts(analysis: LevelAnalysis) -> list[Chart]:
    counts = list(analysis.by_samples)
    effects = list(analysis.by_samples.values())
    alpha_lines, kept_lines = [], []
    for index, name in _named(analysis):
        mean = [float(effect.alpha[index]) for effect in effects]
        spread = [float(effect.spread[index]) for effect in effects]
        low = [m - s for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
        alpha_lines.append(Line(name, counts, mean, low, high))
        kept_lines.append(Line(name, counts, [float(effect.retained[index]) for effect in effects]))
    rows = [
        [
            str(count),
            *(
                f"{plain_number(float(mean))} ± {plain_number(float(spread))}"
                for mean, spread in zip(effect.alpha, effect.spread, strict=True)
            ),
            *map(percent, effect.retained.tolist()),
        ]
        for count, effect in analysis.by_samples.items()
    ]
    header = [
        "Samples per task", *(f"weight of {n}" for n in analysis.experts), *(f"kept of {n}" for n in analysis.experts)
    ]  # fmt: skip
    few, most = effects[0], effects[-1]
    x_label = "samples per task"
    return [
        Chart(
            name=f"samples-alpha-{analysis.level}",
            title="Merging weights by number of samples",
            caption="Mean over the submodules; the band is the standard deviation of one submodule's weight when so "
            "many samples of each task are drawn (with replacement) from those measured.",
            alt=f"Lines with bands. Standard deviation: {float(few.spread.max()):.2g} at most with {counts[0]}, "
            f"{float(most.spread.max()):.2g} with {counts[-1]} samples per task.",
            png=line_chart([Panel("", alpha_lines)], x_label=x_label, y_label="merging weight α", log_x=True),
            table=Table(header, rows),
        ),
        Chart(
            name=f"samples-retained-{analysis.level}",
            title="Share kept by number of samples",
            caption="What weights from so many samples keep of each expert's feature change, measured on all samples.",
            alt="Lines, one per expert: "
            + "; ".join(
                f"{name} {percent(float(few.retained[i]))} with {counts[0]}, {percent(float(most.retained[i]))} with "
                f"{counts[-1]}"
                for i, name in _named(analysis)
            )
            + " samples per task.",
            png=line_chart(
                [Panel("", kept_lines)], x_label=x_label, y_label="share kept", y_percent=True, log_x=True,
                y_range=(-1.0, 1.0),
            ),
            table=Table(header, rows),
        ),
    ]  # fmt: skip


def _named(analysis: LevelAnalysis) -> list[tuple[int, str]]:
    return list(enumerate(analysis.experts))


def _submodule_table(analysis: LevelAnalysis, names: Sequence[str], cells) -> Table:  # type: ignore[no-untyped-def]
    rows = [[name, *cells(row)] for row, name in enumerate(analysis.submodules)]
    return Table(["Submodule", *names], rows)


def _range(values, written) -> str:  # type: ignore[no-untyped-def]
    finite = [float(value) for value in values if not math.isnan(float(value))]
    return f"{written(min(finite))} to {written(max(finite))}" if finite else "none"
