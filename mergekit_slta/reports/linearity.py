"""The report on linearity: ``linearity.json``, and ``linearity.html`` with figures like the paper's 1-4 and 6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mergekit_slta import files
from mergekit_slta.levels import place_of
from mergekit_slta.nonlinearity.scores import STEPS, Linearity, Value, distance_metric, pooled
from mergekit_slta.reports.analysis import kinds_of
from mergekit_slta.reports.figures import Bar, Line, Matrix, Panel, bar_chart, heat_map, line_chart
from mergekit_slta.reports.page import Chart, Page, Section
from mergekit_slta.reports.words import counted, enumerated, kind_name, plain_number
from mergekit_slta.tables import Table, as_json, short_names

LINEAR_MAPS = "linear map"
MAPPED_LEVELS = frozenset({"model", "layer", "attn_mlp"})  # of which Figure 6 shows distances
BARS = "A bar is the mean, and the thin line at its end reaches one standard deviation to both sides, over "
SETTINGS = {2: "25 settings of two weights from 0.2 to 1", 3: "27 settings of three weights from 0.3 to 0.7"}
MEANING = (
    f"The non-linearity score sums {(STEPS + 1) ** 2} squared deviations between points on the way from the base model "
    "to an expert. It is 0 if features change in proportion to the weights; 1.21 means a root mean square deviation of "
    "10 % of the expert's feature change. Linear experts can be merged by adding their task vectors. Whether the "
    "experts disturb each other is shown by the report on calibration statistics."
)


def write_linearity(result: Linearity, folder: Path) -> Path:
    """Write ``linearity.json``, ``linearity.html`` and its charts as PNG files into a folder.

    Returns:
        The path of ``linearity.html``.
    """
    files.write(folder / "linearity.json", as_json(result.metrics).encode())
    return linearity_page(result).write(folder, "linearity.html")


def linearity_page(result: Linearity) -> Page:
    sizes = [size for size in (2, 3) if _merges(result, size)]
    sections = [Section("Single experts", charts=[_score_chart(result), *_score_by_layer(result)])]
    if sizes:
        sections.append(Section("Merges", charts=_merge_charts(result, sizes)))
    mapped = range(len(result.experts)) if result.maps.keys() & MAPPED_LEVELS else ()
    way = [_curve_chart(result), *(_distance_map(result, index) for index in mapped)]
    sections.append(Section("On the way to an expert", charts=way))
    return Page(
        title=f"How linear {enumerated(short_names(result.experts))} are in their weights",
        verdict=[score_sentence(result), *(merge_sentence(result, size) for size in sizes), MEANING],
        facts=_facts(result),
        sections=sections,
    )


def score_table(result: Linearity) -> Table:
    """Mean and standard deviation of the Non-linearity Score over samples and submodules, as in Table 17."""
    rows = [[group, *_cells(result, "non_linearity", group, result.experts)] for group in _groups(result)]
    return Table(["Non-linearity score", *short_names(result.experts)], rows)


def score_sentence(result: Linearity) -> str:
    """A sentence on how linear the submodules are, compared with whole models."""
    experts = enumerated(short_names(result.experts))
    means = _means(result, "non_linearity", result.experts)
    scores = f"the non-linearity score (0 is linear) is {_listed(means)}, on average over experts and samples."
    model = means.pop("model", math.nan)
    if math.isnan(model) or not means:
        return f"For {experts} {scores}"
    if any(mean >= model for mean in means.values()):
        return f"Not all submodules of {experts} are more linear than the whole models: {scores}"
    most = max(means.values())
    by = f"at least {_short(model / most)} times more" if most > 0 else "perfectly"
    return f"The submodules of {experts} are {by} linear{' than the whole models' * (most > 0)}: {scores}"


def merge_sentence(result: Linearity, size: int) -> str:
    """A sentence on how far the feature changes of merges of ``size`` experts are from adding up."""
    means = _means(result, "projection_distance", _merges(result, size))
    number = "two" if size == 2 else "three"
    return (
        f"When {number} of them are merged, the projection distance (0 means that feature changes add up) is "
        f"{_listed(means)}."
    )


def _listed(means: Mapping[str, float]) -> str:
    names = {"model": "the whole model", "MLP": "an MLP branch", "attention": "an attention branch"}
    return enumerated([f"{_short(mean)} for {names.get(group, f'a {group}')}" for group, mean in means.items()])


def _short(number: float) -> str:
    return "undefined" if math.isnan(number) else f"{number:.2g}"


# Groups of submodules


def _groups(result: Linearity) -> dict[str, str]:
    """The kinds of submodules, each with the first level that has such submodules."""
    groups: dict[str, str] = {}
    for level, by_expert in result.metrics["non_linearity"].items():
        for name in next(iter(by_expert.values())):
            groups.setdefault(_group_of(level, name), level)
    return groups


def _group_of(level: str, name: str) -> str:
    return LINEAR_MAPS if level == "linear" else kind_name(place_of(name).kind)


def _pooled(result: Linearity, metric: str, group: str, names: Iterable[str]) -> Value:
    """A metric over all submodules of a group, of experts or merges."""
    level = _groups(result)[group]
    found = result.metrics.get(metric, {}).get(level, {})
    return pooled([value for who in names for name, value in found[who].items() if _group_of(level, name) == group])


def _means(result: Linearity, metric: str, names: Sequence[str]) -> dict[str, float]:
    return {group: _pooled(result, metric, group, names).mean for group in _groups(result)}


def _cells(result: Linearity, metric: str, group: str, names: Iterable[str]) -> list[str]:
    return [_plus_minus(_pooled(result, metric, group, [name])) for name in names]


def _merges(result: Linearity, size: int) -> list[str]:
    """The names of the merges of ``size`` experts."""
    by_level = result.metrics.get("projection_distance", {})
    return [name for name in next(iter(by_level.values()), {}) if len(result.members[name]) == size]


def _plus_minus(value: Value) -> str:
    return f"{plain_number(value.mean)} ± {plain_number(value.std)}" if value.n else "–"


# Charts


def _score_chart(result: Linearity) -> Chart:
    bars = []
    for group in _groups(result):
        for name, short in zip(result.experts, short_names(result.experts), strict=True):
            value = _pooled(result, "non_linearity", group, [name])
            bars.append(Bar(group, short, value.mean, value.std))
    return Chart(
        name="non-linearity",
        title="Non-linearity score",
        caption=f"Like Figures 1a and 2 and Table 17 of the paper. Lower is more linear. {BARS}samples and submodules.",
        alt=_bars_in_words(bars),
        picture=bar_chart(bars, x_label="non-linearity score"),
        table=score_table(result),
    )


def _bars_in_words(bars: Sequence[Bar]) -> str:
    said = [f"{bar.group}, {bar.series}: {plain_number(bar.value)} ± {plain_number(bar.deviation)}" for bar in bars]
    return f"Bars, mean ± standard deviation: {'; '.join(said)}."


def _score_by_layer(result: Linearity) -> list[Chart]:
    """The scores by layer; no chart if only the whole model was measured."""
    experts = short_names(result.experts)
    panels, rows, said = [], [], []
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
        largest = max((y for line in lines for y in line.y if not math.isnan(y)), default=math.nan)
        said.append(f"{group} up to {plain_number(largest)}")
    if not panels:
        return []
    return [
        Chart(
            name="non-linearity-by-layer",
            title="Non-linearity score by layer",
            caption="Mean over samples. Each panel has a scale of its own. Where a layer has several submodules of a "
            "kind, the line is their mean and each dot is one of them.",
            alt=f"Lines over the decoder layers, one per expert: {'; '.join(said)}.",
            picture=line_chart(panels, x_label="decoder layer", y_label="score"),
            table=Table(["Submodule", *experts], rows),
        )
    ]


def _merge_charts(result: Linearity, sizes: Sequence[int]) -> list[Chart]:
    settings = " and ".join(SETTINGS[size] for size in sizes)
    short = dict(zip(result.experts, short_names(result.experts), strict=True))
    merges = [name for size in sizes for name in _merges(result, size)]
    columns = [" + ".join(short[name] for name in result.members[merge]) for merge in merges]
    groups = _groups(result)

    def chart(name: str, title: str, caption: str, quantity: str, metrics: Mapping[str, str], cosine: bool) -> Chart:
        bars, rows = [], []
        for group in groups:
            for size in sizes:
                for metric, what in metrics.items():
                    value = _pooled(result, metric, group, _merges(result, size))
                    bars.append(
                        Bar(group, f"{size} experts{what}", 1 - value.mean if cosine else value.mean, value.std)
                    )
            rows += [[group + what, *_cells(result, metric, group, merges)] for metric, what in metrics.items()]
        picture = bar_chart(bars, x_label=f"1 − {quantity}" if cosine else quantity)
        return Chart(
            name, title, caption, _bars_in_words(bars), picture, Table([quantity.capitalize(), *columns], rows)
        )

    return [
        chart(
            "projection-distance",
            "Projection distance of merges",
            "Like Figures 1b and 3 of the paper (Eq. 8): how far a merge's feature change is from the weighted sum of "
            "the experts' changes, along that sum. At 0 the changes add up. "
            f"{BARS}{settings}.",
            "projection distance",
            {"projection_distance": ""},
            cosine=False,
        ),
        chart(
            "cosine",
            "Direction of merges",
            "Like Figure 4 of the paper: 1 − cosine similarity of a merge's feature change and the weighted sum of the "
            "experts' changes (merged, Eq. 16), and of the experts' changes with each other (baseline, Eq. 17). The "
            f"changes of a merge well below its baseline add up. {BARS}{settings} (merged) or samples (baseline).",
            "cosine similarity",
            {"cosine_merge": ", merged", "cosine_base": ", baseline"},
            cosine=True,
        ),
    ]


def _curve_chart(result: Linearity) -> Chart:
    steps = [step / STEPS for step in range(STEPS + 1)]
    straight = [1 - step for step in steps]
    panels, rows = [], [["linear", *(_decimals(distance) for distance in straight)]]
    for name, short in zip(result.experts, short_names(result.experts), strict=True):
        lines = []
        for group in _groups(result):
            curve = [_pooled(result, distance_metric(step), group, [name]).mean for step in range(STEPS + 1)]
            lines.append(Line(group, steps, curve))
            rows.append([f"{group}, {short}", *map(_decimals, curve)])
        panels.append(Panel(short, [Line("linear", steps, straight), *lines]))
    return Chart(
        name="distance-curve",
        title="Distance to the expert on the way",
        caption="Like Table 18 of the paper: how far the features still are from the expert's features when this share "
        "of the task vector is added to the base model, relative to the whole way. For a linear expert the distance "
        "falls straight from 1 to 0.",
        alt="Lines that fall from 1 to 0, one per kind of submodule, in a panel for each expert.",
        picture=line_chart(panels, x_label="share of the task vector α", y_label="distance"),
        table=Table(["Submodules", *(f"α = {step:g}" for step in steps)], rows),
    )


def _distance_map(result: Linearity, index: int) -> Chart:
    """Figure 6 for one expert: of the levels that were measured, the model, a middle layer and its branches."""
    expert, short = result.experts[index], short_names(result.experts)[index]
    steps = [f"{step / STEPS:.1f}" for step in range(STEPS + 1)]
    matrices, rows, said = [], [], []
    for level in [level for level in result.maps if level in MAPPED_LEVELS]:
        names = list(result.maps[level][expert])
        for layers in kinds_of(names).values():
            name = names[list(layers.values())[len(layers) // 2][0]]
            distances = result.maps[level][expert][name].tolist()
            matrices.append(Matrix(name, distances, steps, steps))
            rows += [[f"{name}, α = {step}", *map(_decimals, row)] for step, row in zip(steps, distances, strict=True)]
            half = plain_number(distances[0][STEPS // 2])
            said.append(f"{name}: 0 along the diagonal, {half} from the base model to halfway")
    return Chart(
        name=f"distances-{index + 1}",
        title=f"Distances on the way to {short}",
        caption="Like Figure 6 of the paper, mean over samples: the distance between the features at two points on the "
        "way from the base model to the expert. For a linear expert the stripes along the diagonal are even. "
        "Distances above 1 are red.",
        alt=f"Heat maps of distances. {'; '.join(said)}.",
        picture=heat_map(
            matrices,
            x_label="share of the task vector α",
            y_label="α",
            value_label="distance of the features, relative to the whole way",
            limits=(0.0, 1.0),
        ),
        table=Table(["From, to", *(f"α = {step}" for step in steps)], rows),
    )


def _decimals(number: float) -> str:
    return plain_number(number, ".3f")


def _facts(result: Linearity) -> dict[str, str]:
    facts = {
        f"Expert {short}": f"{name}, {counted(samples, 'sample')}"
        for short, name, samples in zip(short_names(result.experts), result.experts, result.samples, strict=True)
    }
    facts["Levels"] = ", ".join(result.levels)
    facts["Data"] = "an expert is measured on its own samples, a merge on those of its experts"
    skipped = {level: sum(by_group.values()) for level, by_group in result.skipped.items()}
    left_out = [f"{count} times at {level}" for level, count in skipped.items() if count]
    facts["Left out"] = f"{enumerated(left_out)}, since a sample's feature change is zero" if left_out else "no sample"
    return facts
