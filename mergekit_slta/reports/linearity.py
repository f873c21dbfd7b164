"""The report on linearity: ``linearity.json``, and ``linearity.html`` with figures like the paper's 1-4 and 6."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mergekit_slta import files
from mergekit_slta.levels import place_of
from mergekit_slta.nonlinearity.scores import STEPS, Linearity, Value, distance_metric, pool_values
from mergekit_slta.reports.analysis import kinds_of
from mergekit_slta.reports.figures import Bar, Matrix, bar_chart, heat_map
from mergekit_slta.reports.page import Chart, Page, Section
from mergekit_slta.reports.words import counted, enumerated, kind_name, plain_number
from mergekit_slta.tables import Table, as_json, short_names

LINEAR_MAPS = "linear map"
MAPPED_LEVELS = ("model", "layer", "attn_mlp")  # the levels in Figure 6
STEP_NAMES = [f"{step / STEPS:.1f}" for step in range(STEPS + 1)]
BARS = "A bar is the mean, and the thin line at its end reaches one standard deviation to both sides, over "
SETTINGS_OF = {2: "25 settings of two weights from 0.2 to 1", 3: "27 settings of three weights from 0.3 to 0.7"}
SCORES_MEANING = (
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
    """The report on linearity."""
    experts = short_names(result.experts)
    sizes = {size: found for size in SETTINGS_OF if (found := _merges(result, size))}
    own = {short: ("non_linearity", [name]) for short, name in zip(experts, result.experts, strict=True)}
    score = _bars(
        result,
        "non-linearity",
        "Non-linearity score",
        f"Like Figures 1a and 2 and Table 17 of the paper. Lower is more linear. {BARS}samples and submodules.",
        own,
        score_table(result),
    )
    sections = [Section("Single experts", charts=[score])]
    if sizes:
        sections.append(Section("Merges", charts=_merge_charts(result, sizes)))
    mapped = enumerate(result.experts) if {*result.maps} & {*MAPPED_LEVELS} else ()
    maps = [_distance_map(result, index, expert, experts[index]) for index, expert in mapped]
    way = "Like Table 18 of the paper: how far the features still are from the expert's when this share α of the task "
    way += "vector is added to the base model, relative to the whole way. Of a linear expert it is 1 − α."
    sections.append(Section("On the way to an expert", [way], maps, _distance_table(result)))
    sentences = [_merge_sentence(result, size, merges) for size, merges in sizes.items()]
    return Page(
        title=f"Linearity of {enumerated(experts)} in their weights",
        verdict=[score_sentence(result), *sentences, SCORES_MEANING],
        facts=_facts(result),
        sections=sections,
    )


def score_table(result: Linearity) -> Table:
    """Mean and standard deviation of the Non-linearity Score over samples and submodules, as in Table 17."""
    return _table(result, "Non-linearity score", {"non_linearity": ""}, result.experts, short_names(result.experts))


def score_sentence(result: Linearity) -> str:
    """A sentence on how linear the submodules are, compared with whole models."""
    experts = enumerated(short_names(result.experts))
    means = {group: _pooled(result, "non_linearity", group, result.experts).mean for group in _groups(result)}
    scores = f"the non-linearity score (0 is linear) is {_listed(means)}, on average over experts and samples."
    model = means.pop("model", math.nan)
    if math.isnan(model) or not means:
        return f"For {experts} {scores}"
    if any(mean >= model for mean in means.values()):
        return f"Not all submodules of {experts} are more linear than the whole models: {scores}"
    return f"The submodules of {experts} are more linear than the whole models: {scores}"


def _merge_sentence(result: Linearity, size: int, merges: Sequence[str]) -> str:
    means = {group: _pooled(result, "projection_distance", group, merges).mean for group in _groups(result)}
    return (
        f"When {'two' if size == 2 else 'three'} of them are merged, the projection distance (0 means that feature "
        f"changes add up) is {_listed(means)}."
    )


def _listed(means: Mapping[str, float]) -> str:
    names = {"model": "the whole model", "MLP": "an MLP branch", "attention": "an attention branch"}
    return enumerated([f"{plain_number(mean, '.2g')} for {names.get(own, f'a {own}')}" for own, mean in means.items()])


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


def _pooled(result: Linearity, metric: str, group: str, names: Sequence[str]) -> Value:
    """A metric over all submodules of a group, of experts or merges."""
    level = _groups(result)[group]
    found = result.metrics[metric][level]
    return pool_values(
        [value for who in names for name, value in found[who].items() if _group_of(level, name) == group]
    )


def _merges(result: Linearity, size: int) -> list[str]:
    """The names of the merges of ``size`` experts."""
    by_level = result.metrics.get("projection_distance", {})
    return [name for name in next(iter(by_level.values()), {}) if len(result.members[name]) == size]


def _table(
    result: Linearity, quantity: str, metrics: Mapping[str, str], names: Sequence[str], columns: Sequence[str]
) -> Table:
    """Mean and standard deviation of metrics, each with words for its rows, by groups and by experts or merges."""
    rows = []
    for group in _groups(result):
        for metric, words in metrics.items():
            values = [_pooled(result, metric, group, [name]) for name in names]
            rows.append([group + words, *(f"{plain_number(v.mean)} ± {plain_number(v.std)}" for v in values)])
    return Table([quantity, *columns], rows)


# Charts


def _merge_charts(result: Linearity, sizes: Mapping[int, Sequence[str]]) -> list[Chart]:
    settings = f"{BARS}{' and '.join(SETTINGS_OF[size] for size in sizes)}"
    short = dict(zip(result.experts, short_names(result.experts), strict=True))
    merges = [merge for found in sizes.values() for merge in found]
    columns = [" + ".join(short[name] for name in result.members[merge]) for merge in merges]
    distance, cosine = {"projection_distance": ""}, {"cosine_merge": ", merged", "cosine_base": ", baseline"}
    return [
        _bars(
            result,
            "projection-distance",
            "Projection distance",
            "Like Figures 1b and 3 of the paper (Eq. 8): how far a merge's feature change is from the weighted sum of "
            f"the experts' changes, along that sum. At 0 the changes add up. {settings}.",
            {f"{size} experts{words}": (metric, sizes[size]) for size in sizes for metric, words in distance.items()},
            _table(result, "Projection distance", distance, merges, columns),
        ),
        _bars(
            result,
            "cosine",
            "1 − cosine similarity",
            "Like Figure 4 of the paper: 1 − cosine similarity of a merge's feature change and the weighted sum of the "
            "experts' changes (merged, Eq. 16), and of the experts' changes with each other (baseline, Eq. 17). The "
            f"changes of a merge well below its baseline add up. {settings} (merged) or samples (baseline).",
            {f"{size} experts{words}": (metric, sizes[size]) for size in sizes for metric, words in cosine.items()},
            _table(result, "Cosine similarity", cosine, merges, columns),
        ),
    ]


def _bars(
    result: Linearity,
    name: str,
    quantity: str,
    caption: str,
    series: Mapping[str, tuple[str, Sequence[str]]],
    table: Table,
) -> Chart:
    """Bars of series, each the mean of a metric over some experts or merges, for every group of submodules."""
    bars = []
    for group in _groups(result):
        for label, (metric, names) in series.items():
            value = _pooled(result, metric, group, names)
            mean = 1 - value.mean if metric.startswith("cosine") else value.mean
            bars.append(Bar(group, label, mean, value.std))
    said = [f"{bar.group}, {bar.series}: {plain_number(bar.value)} ± {plain_number(bar.deviation)}" for bar in bars]
    alt = f"Bars, mean ± standard deviation: {'; '.join(said)}."
    return Chart(name, quantity, caption, alt, bar_chart(bars, x_label=quantity.lower()), table)


def _distance_table(result: Linearity) -> Table:
    """Table 18: the mean distance to each expert after every step."""
    rows = []
    for expert, short in zip(result.experts, short_names(result.experts), strict=True):
        for group in _groups(result):
            curve = [_pooled(result, distance_metric(step), group, [expert]).mean for step in range(STEPS + 1)]
            rows.append([f"{group}, {short}", *(plain_number(distance, ".3f") for distance in curve)])
    return Table(["Distance", *(f"α = {step}" for step in STEP_NAMES)], rows)


def _distance_map(result: Linearity, index: int, expert: str, short: str) -> Chart:
    """Figure 6 for one expert: of the levels that were measured, the model, a middle layer and its branches."""
    matrices, rows = [], []
    for level in [level for level in MAPPED_LEVELS if level in result.maps]:
        names = list(result.maps[level][expert])
        for layers in kinds_of(names).values():
            name = names[list(layers.values())[len(layers) // 2][0]]
            distances = result.maps[level][expert][name].tolist()
            matrices.append(Matrix(name, distances, STEP_NAMES, STEP_NAMES))
            for step, row in zip(STEP_NAMES, distances, strict=True):
                rows.append([f"{name}, α = {step}", *(plain_number(distance, ".3f") for distance in row)])
    return Chart(
        name=f"distances-{index + 1}",
        title=f"Distances on the way to {short}",
        caption="Like Figure 6 of the paper, mean over samples: the distance between the features at two points on the "
        "way from the base model to the expert. For a linear expert the stripes along the diagonal are even. "
        "Distances above 1 are red.",
        alt=f"Heat maps of distances, 0 along the diagonal, of {', '.join(matrix.title for matrix in matrices)}.",
        picture=heat_map(
            matrices,
            x_label="share of the task vector α",
            y_label="α",
            value_label="distance of the features, relative to the whole way",
            limits=(0.0, 1.0),
        ),
        table=Table(["From, to", *(f"α = {step}" for step in STEP_NAMES)], rows),
    )


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
