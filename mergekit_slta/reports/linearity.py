"""The report on linearity: ``linearity.json``, and ``linearity.html`` with figures like the paper's 1-4 and 6."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from mergekit_slta import files
from mergekit_slta.figures import Matrix, Points, heat_map, point_chart
from mergekit_slta.nonlinearity.result import METRIC, SCORE, Linearity
from mergekit_slta.nonlinearity.studies import STEPS
from mergekit_slta.reports.page import Chart, Page
from mergekit_slta.tables import Table, as_json, short_names
from mergekit_slta.words import counted, enumerated, plain_number

STEP_NAMES = [f"{step / STEPS:.1f}" for step in range(STEPS + 1)]
POINTS = "Mean, and one standard deviation upwards and by the same factor downwards, over "
SETTINGS_OF = {2: "25 settings of two weights from 0.2 to 1", 3: "27 settings of three weights from 0.3 to 0.7"}
SCORES_MEANING = (
    f"The non-linearity score sums {(STEPS + 1) ** 2} squared deviations between points on the way from the base model "
    "to an expert. It is 0 if features change in proportion to the weights; 1.21 means a root mean square deviation of "
    "0.1 of the expert's feature change. Merging weights rely on this proportion."
)


def write_linearity(result: Linearity, folder: Path) -> Path:
    """Write ``linearity.json``, ``linearity.html`` and its charts into a folder; return the page's path."""
    files.write(folder / "linearity.json", as_json(result.metrics).encode())
    return linearity_page(result).write(folder, "linearity.html")


def linearity_page(result: Linearity) -> Page:
    experts = short_names(result.experts)
    single = {short: [name] for short, name in zip(experts, result.experts, strict=True)}
    sizes = [size for size in SETTINGS_OF if _merges(result, size)]
    score = f"As in Figures 1a and 2 and Table 17 of the paper. Lower is more linear. {POINTS}prompts and submodules."
    return Page(
        title=f"Linearity of {enumerated(experts)} in their weights",
        verdict=[SCORES_MEANING],
        facts=_facts(result),
        charts=[
            _points(result, "non-linearity", SCORE, score, {METRIC: ""}, single),
            *(_merge_charts(result, sizes) if sizes else []),
            _distance_map(result),
        ],
    )


def _merges(result: Linearity, size: int) -> list[str]:
    return [name for name, members in result.members.items() if len(members) == size]


# Charts


def _merge_charts(result: Linearity, sizes: Sequence[int]) -> list[Chart]:
    settings = f"{POINTS}merges, submodules, and {' and '.join(SETTINGS_OF[size] for size in sizes)}"
    distance = (
        "As in Figures 1b and 3 of the paper (Eq. 8): by what share a merge's feature change is longer or shorter than "
        f"the weighted sum of the experts' changes, in the direction of that sum. At 0 the changes add up. {settings}."
    )
    cosine = (
        "As in Figure 4 of the paper: 1 − cosine similarity of a merge's feature change and the weighted sum of the "
        "experts' changes (Eq. 16), and of the experts' changes with each other (Eq. 17). Where the merge's value is "
        f"far below the experts', the changes add up. {settings}, or over prompts."
    )
    merges = {f"{size} experts": _merges(result, size) for size in sizes}
    cosines = {"cosine_merge": ": merge and sum", "cosine_base": ": with each other"}
    return [
        _points(result, "projection-distance", "Projection distance", distance, {"projection_distance": ""}, merges),
        _points(result, "cosine", "1 − cosine similarity", cosine, cosines, merges),
    ]


def _points(
    result: Linearity, name: str, quantity: str, caption: str, metrics: dict[str, str], series: dict[str, list[str]]
) -> Chart:
    """Points for every group of submodules: the means of metrics over each series' experts or merges."""
    drawn = []
    for label, names in series.items():
        for metric, words in metrics.items():
            values = list(result.pooled(metric, names).values())
            drawn.append(Points(label + words, [value.mean for value in values], [value.std for value in values]))
    return Chart(
        name=name,
        title=quantity,
        caption=caption,
        picture=point_chart(list(result.groups()), drawn, x_label=quantity.lower()),
        table=result.table(quantity, metrics, [*chain(*series.values())]),
    )


def _distance_map(result: Linearity) -> Chart:
    """Figure 6 for the least linear expert, and its least linear submodule of the first level."""
    scores = {
        (expert, name): value.mean
        for expert, values in result.metrics[METRIC][result.levels[0]].items()
        for name, value in values.items()
    }
    expert, name = max(scores, key=lambda place: (not math.isnan(scores[place]), scores[place]))
    short = short_names(result.experts)[result.experts.index(expert)]
    distances = result.maps[result.levels[0]][expert][name].tolist()
    steps = [f"α = {step}" for step in STEP_NAMES]
    rows = [[step, *(plain_number(part, ".3f") for part in row)] for step, row in zip(steps, distances, strict=True)]
    return Chart(
        name="distances",
        title=f"Distances on the way to {short}",
        caption="As in Figure 6 of the paper, for the least linear expert, mean over prompts: the distance between the "
        "features at two points on the way from the base model to the expert. If features change linearly, the stripes "
        "along the diagonal are even.",
        picture=heat_map(
            [Matrix("whole model" if name == "model" else name, distances, STEP_NAMES, STEP_NAMES)],
            x_label="weight α of the expert's change",
            y_label="weight α",
            value_label="distance of the features, relative to the whole way",
        ),
        table=Table(["From, to", *steps], rows),
    )


def _facts(result: Linearity) -> dict[str, str]:
    facts = {
        f"Expert {short}": f"{name}, {counted(samples, 'prompt')}"
        for short, name, samples in zip(short_names(result.experts), result.experts, result.samples, strict=True)
    }
    facts["Levels"] = ", ".join(result.levels)
    facts["Data"] = "an expert is measured on its own prompts, a merge on the prompts of its experts"
    skipped = {level: sum(by_group.values()) for level, by_group in result.skipped.items()}
    left_out = [f"{counted(count, 'time')} at {level}" for level, count in skipped.items() if count]
    facts["Left out"] = f"{enumerated(left_out)}, since a prompt's feature change is zero" if left_out else "no prompt"
    return facts
