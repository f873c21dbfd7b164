"""The report on a feature merge: how far its features are from those of each task's own model, layer by layer.

Shapes: ``L`` layers, ``T`` tasks, each named after its model: an expert, or the base model if it has a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from mergekit_slta.figures import Line, Panel, line_chart
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.page import Chart, Page
from mergekit_slta.tables import Table, short_names
from mergekit_slta.words import as_score, counted, enumerated

ERRORS_MEANING = (
    "A distance of 0 means that a layer's output equals the output of the task's own model; 1, that the difference "
    "is as large as that output, on average over the tokens of the task's prompts. The merge was fitted to these "
    "prompts: on others the distance is larger. It says little about accuracy: only scores do, those of mergekit-slta "
    "evaluate."
)


def drift_page(errors: torch.Tensor, tasks: Sequence[tuple[str, int]], settings: FeatcalSettings) -> Page:
    """The report on a feature merge: its errors [L, T]; each task's model by name, and its number of prompts."""
    names = short_names([model for model, _ in tasks])
    digits = partial(as_score, decimals=3)
    last = [f"{digits(error)} from {name}" for name, error in zip(names, errors[-1].tolist(), strict=True)]
    curves = [Line(name, range(len(errors)), curve) for name, curve in zip(names, errors.T.tolist(), strict=True)]
    distances = "After the last layer, the merge's features are at a relative distance of"
    ridge = f"ridge {settings.ridge}" if settings.ridge != "auto" else "a ridge chosen by cross-validation"
    return Page(
        title=f"How far the merge is from {enumerated(names)}",
        verdict=[f"{distances} {enumerated(last)}.", ERRORS_MEANING],
        facts={
            "Models": ", ".join(f"{model} ({counted(number, 'prompt')})" for model, number in tasks),
            "Prompts": f"chosen with seed {settings.seed}, at most {settings.max_tokens} tokens each",
            "Solved with": f"{ridge}, towards a merge without prompts",
        },
        charts=[
            Chart(
                name="drift",
                title="Distance of the features by layer",
                caption="How far each layer's output is from the output of the task's own model, on the task's "
                "prompts; lower is better.",
                picture=line_chart([Panel("", curves)], x_label="decoder layer", y_label="relative distance"),
                table=Table(["layer", *names], [[str(n), *map(digits, row)] for n, row in enumerate(errors.tolist())]),
            )
        ],
    )
