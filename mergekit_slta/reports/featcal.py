"""The report on a feature merge: how far its features are from those of each task's own model, layer by layer.

Shapes: ``L`` layers, ``T`` tasks, each named after its model: an expert, or the base model if it has a task.
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
    "The error of a layer is the distance between the merged model's output and the output of the task's own model, "
    "relative to the size of the latter, on average over the tokens of the task's prompts. The merge was fitted to "
    "these prompts, so the distance is larger on others. It is a distance of features, not accuracy."
)


def drift_page(
    errors: torch.Tensor, ridges: Sequence[Sequence[float]], models: Sequence[str], settings: FeatcalSettings
) -> Page:
    """The report on a feature merge.

    Args:
        errors: the merged model's relative errors [L, T].
        ridges: for each layer, those that its matrices were solved with.
        models: the names of the tasks' own models.
        settings: the settings of the merge.
    """
    names = short_names(models)
    chosen = settings.ridge == "auto"
    ridge = "a ridge chosen by left-out samples" if chosen else f"ridge {plain_number(float(settings.ridge))}"
    return Page(
        title=f"How close a merge of {enumerated(names)} comes to each",
        verdict=[_verdict(errors, names), ERRORS_MEANING],
        facts={
            "Tasks of": ", ".join(models),
            "Samples": f"{settings.samples} of each task, seed {settings.seed}, at most {settings.max_tokens} tokens",
            "Solved with": f"{ridge}, towards the merge of actmat and half as far again",
        },
        sections=[Section("Where the drift is", charts=[_chart(errors, ridges, names)])],
    )


def error_percent(error: float) -> str:
    """A relative error in percent; below 1 % with three digits, and a dash where the expert's features are all zero."""
    if not math.isfinite(error):
        return "–"
    return f"{round(100 * error)} %" if error >= 0.01 else f"{plain_number(100 * error)} %"


def _verdict(errors: torch.Tensor, names: Sequence[str]) -> str:
    last = zip(names, errors[-1].tolist(), strict=True)
    clauses = [f"{error_percent(error)} away from {possessive(name)}" for name, error in last]
    worst = int(errors.diff(dim=0, prepend=torch.zeros_like(errors[:1])).nan_to_num().mean(1).argmax())
    return (
        f"After the last layer the merged model's features are {enumerated(clauses)}; "
        f"the distance grows most in layer {worst}."
    )


def _ridges(ridges: Sequence[float]) -> str:
    """The smallest and the largest ridge of a layer; a dash where nothing was solved."""
    return " to ".join(map(plain_number, sorted({min(ridges), max(ridges)}))) if ridges else "–"


def _chart(errors: torch.Tensor, ridges: Sequence[Sequence[float]], names: Sequence[str]) -> Chart:
    layers = list(range(len(errors)))
    lines = [
        Line(f"on {possessive(name)} samples", layers, curve)
        for name, curve in zip(names, errors.T.tolist(), strict=True)
    ]
    rows = zip(errors.tolist(), ridges, strict=True)
    return Chart(
        name="drift",
        title="Relative error of the features by layer",
        caption="How far the output of each layer is from that of the expert. Lower is better. The table has "
        "each layer's ridges too, the smallest and the largest.",
        picture=line_chart(
            [Panel("The merged model", lines)],
            x_label="decoder layer",
            y_label="relative error",
            y_percent=True,
            lines_at=(0.0,),
        ),
        table=Table(
            ["layer", *names, "ridges"],
            [[str(layer), *map(error_percent, row), _ridges(own)] for layer, (row, own) in enumerate(rows)],
        ),
    )
