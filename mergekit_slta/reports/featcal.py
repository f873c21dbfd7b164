"""The report on a feature merge: how far its features are from those of each task's own model, layer by layer.

Shapes: ``L`` layers, ``T`` tasks, each named after its model: an expert, or the base model if it has a task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mergekit_slta.figures import Line, Panel, line_chart
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.page import Chart, Page
from mergekit_slta.tables import Table, short_names
from mergekit_slta.words import counted, enumerated, plain_number

ERRORS_MEANING = (
    "A distance of 0 means that a layer's output equals the output of the task's own model; 1, that the difference "
    "is as large as that output, on average over the tokens of the task's prompts. The merge was fitted to these "
    "prompts: on others the distance is larger. It says little about accuracy: score the merge with mergekit-slta "
    "evaluate."
)


def drift_page(
    errors: torch.Tensor, ridges: Sequence[Sequence[float]], tasks: Sequence[tuple[str, int]], settings: FeatcalSettings
) -> Page:
    """The report on a feature merge.

    Args:
        errors: the merged model's relative errors [L, T].
        ridges: for each layer, those that its matrices were solved with.
        tasks: the name of each task's own model, and how many prompts it has; two models may have one name.
        settings: the settings of the merge.
    """
    names = short_names([model for model, _ in tasks])
    chosen = settings.ridge == "auto"
    ridge = "a ridge chosen on held-out prompts" if chosen else f"ridge {plain_number(float(settings.ridge))}"
    return Page(
        title=f"How close the merge is to {enumerated(names)}",
        verdict=[_verdict(errors, names), ERRORS_MEANING],
        facts={
            "Models": ", ".join(f"{model} ({counted(number, 'prompt')})" for model, number in tasks),
            "Prompts": f"chosen with seed {settings.seed}, at most {settings.max_tokens} tokens each",
            "Solved with": f"{ridge}, towards W₀ plus 1.5 times actmat's change",
        },
        charts=[_chart(errors, ridges, names)],
    )


def _number(error: float) -> str:
    """A relative error with two digits; a dash where the expert's features are all zero."""
    return plain_number(error, ".2g") if math.isfinite(error) else "–"


def _verdict(errors: torch.Tensor, names: Sequence[str]) -> str:
    last = zip(names, errors[-1].tolist(), strict=True)
    clauses = [f"{_number(error)} from {name}" for name, error in last]
    worst = int(errors.diff(dim=0, prepend=torch.zeros_like(errors[:1])).nan_to_num().mean(1).argmax())
    return (
        f"After the last layer, the merge's features are at a relative distance of {enumerated(clauses)}. "
        f"The distance grows most in layer {worst}."
    )


def _ridges(ridges: Sequence[float]) -> str:
    """The smallest and the largest ridge of a layer; a dash where nothing was solved."""
    return " to ".join(map(plain_number, sorted({min(ridges), max(ridges)}))) if ridges else "–"


def _chart(errors: torch.Tensor, ridges: Sequence[Sequence[float]], names: Sequence[str]) -> Chart:
    layers = list(range(len(errors)))
    lines = [Line(name, layers, curve) for name, curve in zip(names, errors.T.tolist(), strict=True)]
    rows = zip(errors.tolist(), ridges, strict=True)
    return Chart(
        name="drift",
        title="Distance of the features by layer",
        caption="How far each layer's output is from the output of the task's own model, on the task's prompts. Lower "
        "is better. The table also has each layer's smallest and largest ridge.",
        picture=line_chart([Panel("", lines)], x_label="decoder layer", y_label="relative distance"),
        table=Table(
            ["layer", *names, "ridges"],
            [[str(layer), *map(_number, row), _ridges(used)] for layer, (row, used) in enumerate(rows)],
        ),
    )
