"""The report on a feature merge: how far its features are from each expert's own, layer by layer.

Shapes: ``L`` layers, ``T`` experts, and as many tasks, each named after its expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mergekit_slta.figures import Line, Panel, line_chart
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.page import Chart, Page, Section
from mergekit_slta.tables import Table, short_names
from mergekit_slta.words import enumerated, plain_number, possessive

ERRORS_MEANING = (
    "The error of a layer is the distance between the merged model's output and the expert's output, relative to the "
    "size of the expert's output, on average over the tokens of the expert's calibration samples. The merge was fitted "
    "to these samples, so the distance is larger on others. It is a distance of features, not accuracy."
)
ANCHORS = {"base": "the base model", "actmat": "the actmat merge"}


def drift_page(
    merged: torch.Tensor,
    anchor: torch.Tensor,
    models: Sequence[str],
    settings: FeatcalSettings,
) -> Page:
    """The report on a feature merge.

    Args:
        merged: the merged model's relative errors [L, T].
        anchor: the relative errors [L, T] of the anchor, the model that the ridge pulls the merge towards.
        models: the experts' names.
        settings: the settings of the merge.
    """
    names, anchor_name = short_names(models), ANCHORS[settings.anchor]
    chosen = settings.ridge == "auto"
    ridge = "a ridge chosen by left-out samples" if chosen else f"ridge {plain_number(float(settings.ridge))}"
    return Page(
        title=f"How close a merge of {enumerated(names)} comes to each",
        verdict=[_verdict(merged, anchor, names, anchor_name), ERRORS_MEANING],
        facts={
            "Experts": ", ".join(models),
            "Samples": f"{settings.samples} of each task, seed {settings.seed}, at most {settings.max_tokens} tokens",
            "Solved with": f"{ridge} towards {anchor_name}, output head {'solved' if settings.head else 'kept'}",
        },
        sections=[Section("Where the drift is", charts=[_chart(merged, anchor, names, anchor_name)])],
    )


def error_percent(error: float) -> str:
    """A relative error in percent; below 1 % with three digits, and a dash where the expert's features are all zero."""
    if not math.isfinite(error):
        return "–"
    return f"{round(100 * error)} %" if error >= 0.01 else f"{plain_number(100 * error)} %"


def _verdict(merged: torch.Tensor, anchor: torch.Tensor, names: Sequence[str], anchor_name: str) -> str:
    after, before = (list(map(error_percent, errors[-1].tolist())) for errors in (merged, anchor))
    clauses = [
        f"{after[index]} away from {possessive(name)} ({anchor_name}: {before[index]})"
        for index, name in enumerate(names)
    ]
    worst = int(merged.diff(dim=0, prepend=torch.zeros_like(merged[:1])).nan_to_num().mean(1).argmax())
    return (
        f"After the last layer the merged model's features are {enumerated(clauses)}; "
        f"the distance grows most in layer {worst}."
    )


def _chart(merged: torch.Tensor, anchor: torch.Tensor, names: Sequence[str], anchor_name: str) -> Chart:
    layers, panels = list(range(len(merged))), []
    for name, before, after in zip(names, anchor.T.tolist(), merged.T.tolist(), strict=True):
        lines = [Line(f"before: {anchor_name}", layers, before), Line("after: the merged model", layers, after)]
        panels.append(Panel(f"On {possessive(name)} samples", lines))
    columns = [f"{name}, {when}" for name in names for when in ("before", "after")]
    pairs = torch.stack([anchor, merged], 2).flatten(1).tolist()
    return Chart(
        name="drift",
        title="Relative error of the features by layer",
        caption="How far the output of each layer is from that of the expert, before (the model that the merge started "
        "from) and after. Lower is better.",
        picture=line_chart(panels, x_label="decoder layer", y_label="relative error", y_percent=True, lines_at=(0.0,)),
        table=Table(["layer", *columns], [[str(layer), *map(error_percent, row)] for layer, row in enumerate(pairs)]),
    )
