"""What ``linearity`` writes: ``linearity.json``, and ``report.html`` with figures after the paper's 1-4 and 6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from mergekit_slta import files
from mergekit_slta.linearity.scores import STEPS, Linearity, Value, distance_metric, pooled
from mergekit_slta.reports.analysis import kinds_of, place_of, short_names
from mergekit_slta.reports.figures import Bar, Line, Matrix, Panel, bar_chart, heat_map, line_chart
from mergekit_slta.reports.page import Chart, Page, Section, Table
from mergekit_slta.reports.tables import as_json
from mergekit_slta.reports.words import enumerated, plain_number

# What a group of submodules is called, by the level and then by the kind.
GROUPS = {"model": "model", "layer": "layer", "attn": "attention", "mlp": "MLP", "head": "head"}
LINEAR_MAPS = "linear map"
COSINES = {"cosine_merge": "merged", "cosine_base": "baseline"}
SETTINGS = {2: "25 settings of two weights from 0.2 to 1", 3: "27 settings of three weights from 0.3 to 0.7"}
MEANING = (
    f"The score sums {(STEPS + 1) ** 2} squared deviations between points on the way from the base model to an expert: "
    "where features move straight and evenly it is 0, and 1.21 means that they are off by 10 % of the expert's feature "
    "change (root mean square). What is linear can be merged by adding up; whether experts get in each other's way is "
    "another question, which the report on calibration statistics answers."
)


def write_linearity(result: Linearity, folder: Path) -> Path:
    """Write ``linearity.json``, ``report.html`` and its charts as PNG files into a folder.

    Returns:
        The path of ``report.html``.
    """
    files.write(folder / "linearity.json", as_json(result.metrics).encode())
    return linearity_page(result).write(folder, "report.html")


def linearity_page(result: Linearity) -> Page:
    """The report on how linear experts are."""
    merges = [size for size in (2, 3) if _merges(result, size)]
    sections = [Section("Single experts", [], [_score_chart(result), *_score_by_layer(result)])]
    if merges:
        sections.append(Section("Merges", [], [_projection_chart(result, merges), _cosine_chart(result, merges)]))
    way = [_curve_chart(result), *(_distance_map(result, index) for index in range(len(result.experts)))]
    sections.append(Section("On the way to an expert", [], way))
    experts = short_names(result.experts)
    return Page(
        title=f"How linear {enumerated(experts)} are in their weights",
        verdict=[score_sentence(result), *(merge_sentence(result, size) for size in merges), MEANING],
        facts=_facts(result),
        sections=sections,
    )


def score_table(result: Linearity) -> Table:
    """Mean and standard deviation of the Non-linearity Score over samples and submodules, as in Table 17."""
    experts = short_names(result.experts)
    groups = _groups(result)
    rows = [
        [group, *(_plus_minus(_pooled(result, "non_linearity", group, [name])) for name in result.experts)]
        for group in groups
    ]
    return Table(["Non-linearity score", *experts], rows)


def score_sentence(result: Linearity) -> str:
    """How linear submodules are beside whole models, in words."""
    experts = enumerated(short_names(result.experts))
    means = {group: _pooled(result, "non_linearity", group, result.experts).mean for group in _groups(result)}
    said = enumerated([f"{_short(mean)} for {_one(group)}" for group, mean in means.items()])
    scores = f"the non-linearity score (0 is linear) is {said}, on average over experts and samples."
    model = means.pop("model", math.nan)
    if math.isnan(model) or not means:
        return f"Of {experts} {scores}"
    worse = [_one(group) for group, mean in means.items() if mean >= model]
    if worse:
        return f"Not all submodules of {experts} are more linear than the whole models: {scores}"
    most = max(means.values())
    by = f"at least {_short(model / most)} times more" if most > 0 else "perfectly"
    return f"The submodules of {experts} are {by} linear{' than the whole models' * (most > 0)}: {scores}"


def merge_sentence(result: Linearity, size: int) -> str:
    """How far merges of so many experts are from adding up, in words."""
    means = {
        group: _pooled(result, "projection_distance", group, _merges(result, size)).mean for group in _groups(result)
    }
    said = enumerated([f"{_short(mean)} for {_one(group)}" for group, mean in means.items()])
    number = "two" if size == 2 else "three"
    return f"When {number} of them are merged, the projection distance (0 is adding up) is {said}."


def _one(group: str) -> str:
    return {"model": "the whole model", "MLP": "an MLP branch", "attention": "an attention branch"}.get(
        group, f"a {group}"
    )


def _short(number: float) -> str:
    return "undefined" if math.isnan(number) else f"{number:.2g}"


# Groups of submodules


def _groups(result: Linearity) -> dict[str, str]:
    """Kinds of submodules, each with a level that has it; what two levels share is taken once."""
    groups: dict[str, str] = {}
    for level, by_expert in result.metrics["non_linearity"].items():
        for name in next(iter(by_expert.values())):
            groups.setdefault(_group_of(level, name), level)
    return groups


def _group_of(level: str, name: str) -> str:
    kind = place_of(name).kind
    return LINEAR_MAPS if level == "linear" else GROUPS.get(kind, kind)


def _values(result: Linearity, metric: str, group: str, names: Iterable[str]) -> list[Value]:
    """A metric's values for all submodules of a group, of experts or merges."""
    level = _groups(result)[group]
    found = result.metrics.get(metric, {}).get(level, {})
    return [value for who in names for name, value in found[who].items() if _group_of(level, name) == group]


def _pooled(result: Linearity, metric: str, group: str, names: Iterable[str]) -> Value:
    return pooled(_values(result, metric, group, names))


def _merges(result: Linearity, size: int) -> list[str]:
    """The names of the merges of so many experts."""
    by_level = result.metrics.get("projection_distance", {})
    return [name for name in next(iter(by_level.values()), {}) if len(result.members[name]) == size]


def _plus_minus(value: Value) -> str:
    return f"{plain_number(value.mean)} ± {plain_number(value.std)}" if value.n else "–"


# Charts


def _score_chart(result: Linearity) -> Chart:
    experts = dict(zip(result.experts, short_names(result.experts), strict=True))
    bars = []
    for group in _groups(result):
        for name, short in experts.items():
            value = _pooled(result, "non_linearity", group, [name])
            bars.append(Bar(group, short, value.mean, value.std))
    table = score_table(result)
    return Chart(
        name="non-linearity",
        title="Non-linearity score",
        caption="As Figures 1a and 2 and Table 17 of the paper; lower is more linear. Lines are standard deviations "
        "over samples and submodules.",
        alt=f"Bars: {'; '.join(f'{bar.group} of {bar.series} {plain_number(bar.value)}' for bar in bars)}.",
        png=bar_chart(bars, x_label="non-linearity score"),
        table=table,
    )


def _score_by_layer(result: Linearity) -> list[Chart]:
    """Where in the depth of the model the experts are linear; none where only the model was measured."""
    experts = short_names(result.experts)
    panels, rows = [], []
    for group, level in _groups(result).items():
        by_expert = result.metrics["non_linearity"][level]
        names = [name for name in by_expert[result.experts[0]] if _group_of(level, name) == group]
        if names == ["model"]:
            continue
        layers: dict[int, list[str]] = {}
        for name in names:
            layers.setdefault(place_of(name).layer or 0, []).append(name)
        lines = []
        for expert, short in zip(result.experts, experts, strict=True):
            found = by_expert[expert]
            cloud = [(layer, found[name].mean) for layer, own in layers.items() for name in own]
            means = [pooled([found[name] for name in own]).mean for own in layers.values()]
            lines.append(Line(short, list(layers), means, cloud=cloud if len(cloud) > len(layers) else ()))
        panels.append(Panel(group, lines))
        rows += [[name, *(_plus_minus(by_expert[expert][name]) for expert in result.experts)] for name in names]
    if not panels:
        return []
    said = [f"{panel.title} up to {plain_number(_largest(panel))}" for panel in panels]
    return [
        Chart(
            name="non-linearity-by-layer",
            title="Non-linearity score by layer",
            caption="Mean over samples. The scales differ. Where a layer has several submodules of a kind, the line is "
            "their mean and the dots are each one.",
            alt=f"Lines over the decoder layers, one per expert: {'; '.join(said)}.",
            png=line_chart(panels, x_label="decoder layer", y_label="score"),
            table=Table(["Submodule", *experts], rows),
        )
    ]


def _largest(panel: Panel) -> float:
    return max((y for line in panel.lines for y in line.y if not math.isnan(y)), default=math.nan)


def _projection_chart(result: Linearity, sizes: Sequence[int]) -> Chart:
    bars = []
    for group in _groups(result):
        for size in sizes:
            value = _pooled(result, "projection_distance", group, _merges(result, size))
            bars.append(Bar(group, f"{size} experts", value.mean, value.std))
    merges = [name for size in sizes for name in _merges(result, size)]
    rows = [
        [group, *(_plus_minus(_pooled(result, "projection_distance", group, [name])) for name in merges)]
        for group in _groups(result)
    ]
    return Chart(
        name="projection-distance",
        title="Projection distance of merges",
        caption="As Figures 1b and 3 of the paper (Eq. 8): how far a merge's feature change is from the weighted sum "
        f"of the experts', along that sum; 0 is adding up. Mean and standard deviation over {_settings(sizes)}.",
        alt=f"Bars: {'; '.join(f'{bar.group}, {bar.series}: {plain_number(bar.value)}' for bar in bars)}.",
        png=bar_chart(bars, x_label="projection distance"),
        table=Table(["Projection distance", *_short_merges(result, merges)], rows),
    )


def _cosine_chart(result: Linearity, sizes: Sequence[int]) -> Chart:
    bars = []
    merges = [name for size in sizes for name in _merges(result, size)]
    rows = []
    for group in _groups(result):
        for size in sizes:
            for metric, what in COSINES.items():
                value = _pooled(result, metric, group, _merges(result, size))
                bars.append(Bar(group, f"{size} experts, {what}", 1 - value.mean, value.std))
        for metric, what in COSINES.items():
            cells = [_plus_minus(_pooled(result, metric, group, [name])) for name in merges]
            rows.append([f"{group}, {what}", *cells])
    return Chart(
        name="cosine",
        title="Direction of merges",
        caption="As Figure 4 of the paper: 1 − cosine similarity of a merge's feature change and the weighted sum of "
        "the experts' (Eq. 16), and of the experts' changes with each other (the baseline, Eq. 17). A merge well below "
        f"its baseline adds up. Mean and deviation over {_settings(sizes)} (merged) and over samples (baseline).",
        alt=f"Bars: {'; '.join(f'{bar.group}, {bar.series}: {plain_number(bar.value)}' for bar in bars)}.",
        png=bar_chart(bars, x_label="1 − cosine similarity"),
        table=Table(["Cosine similarity", *_short_merges(result, merges)], rows),
    )


def _settings(sizes: Sequence[int]) -> str:
    return " and ".join(SETTINGS[size] for size in sizes)


def _short_merges(result: Linearity, merges: Sequence[str]) -> list[str]:
    short = dict(zip(result.experts, short_names(result.experts), strict=True))
    return [" + ".join(short[name] for name in result.members[merge]) for merge in merges]


def _curve_chart(result: Linearity) -> Chart:
    steps = [step / STEPS for step in range(STEPS + 1)]
    panels, rows = [], [["linear", *(f"{1 - step:.3f}" for step in steps)]]
    for name, short in zip(result.experts, short_names(result.experts), strict=True):
        lines = []
        for group in _groups(result):
            curve = [_pooled(result, distance_metric(step), group, [name]).mean for step in range(STEPS + 1)]
            lines.append(Line(group, steps, curve))
            rows.append([f"{group}, {short}", *map(_three_decimals, curve)])
        panels.append(Panel(short, [*lines, Line("linear", steps, [1 - step for step in steps])]))
    return Chart(
        name="distance-curve",
        title="Distance to the expert on the way",
        caption="As Table 18 of the paper: how far the features still are from the expert's when so much of the task "
        "vector is added to the base model, relative to the whole way. Linear is a straight fall from 1 to 0.",
        alt="Lines that fall from 1 to 0, one per kind of submodule, in a panel for each expert.",
        png=line_chart(panels, x_label="share of the task vector α", y_label="distance"),
        table=Table(["Submodules", *(f"α = {step:g}" for step in steps)], rows),
    )


def _distance_map(result: Linearity, index: int) -> Chart:
    """Figure 6 for one expert: the model, and one layer and its branches, whatever was measured."""
    expert, short = result.experts[index], short_names(result.experts)[index]
    shown: dict[str, torch.Tensor] = {}
    for level, by_expert in result.maps.items():
        if level in ("model", "layer", "attn_mlp"):
            kinds = kinds_of(list(by_expert[expert]))
            names = list(by_expert[expert])
            for layers in kinds.values():
                name = names[list(layers.values())[len(layers) // 2][0]]
                shown[name] = by_expert[expert][name]
    return _map_chart(f"distances-{index + 1}", short, shown)


def _map_chart(file: str, expert: str, shown: dict[str, torch.Tensor]) -> Chart:
    steps = [f"{step / STEPS:.1f}" for step in range(STEPS + 1)]
    rows = [
        [f"{name}, α = {step}", *map(_three_decimals, row)]
        for name, distances in shown.items()
        for step, row in zip(steps, distances.tolist(), strict=True)
    ]
    png = heat_map(
        [Matrix(name, distances.tolist(), steps, steps) for name, distances in shown.items()],
        x_label="share of the task vector α",
        y_label="α",
        value_label="distance of the features, relative to the whole way",
        limits=(0.0, 1.0),
    )
    return Chart(
        name=file,
        title=f"Distances on the way to {expert}",
        caption="As Figure 6 of the paper, mean over samples: the distance between the features at two points on the "
        "way from the base model to the expert. Linear is even stripes along the diagonal. Above 1 it is red.",
        alt=f"Heat maps of {enumerated(list(shown))}, dark along the diagonal.",
        png=png,
        table=Table(["From, to", *(f"α = {step}" for step in steps)], rows),
    )


def _three_decimals(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.3f}"


def _facts(result: Linearity) -> dict[str, str]:
    facts = {
        f"Expert {short}": f"{name}, {samples} samples"
        for short, name, samples in zip(short_names(result.experts), result.experts, result.samples, strict=True)
    }
    facts["Levels"] = ", ".join(result.levels)
    facts["Data"] = "an expert is measured on its own samples, a merge on those of its experts"
    skipped = {level: sum(by_group.values()) for level, by_group in result.skipped.items() if any(by_group.values())}
    left_out = [f"{count} times at {level}" for level, count in skipped.items()]
    facts["Left out"] = f"{enumerated(left_out)}, since a sample's feature change is zero" if left_out else "no sample"
    return facts
