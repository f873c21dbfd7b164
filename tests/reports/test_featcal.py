"""The report on a feature merge: its sentence, its numbers by layer and task, and the ridges."""

from __future__ import annotations

import torch

from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.featcal import ERRORS_MEANING, drift_page
from mergekit_slta.reports.page import Page

MODELS = ["org/llama-math", "org/llama-code"]
ERRORS = torch.tensor([[0.11, 0.12], [0.14, 0.0013], [0.41, 0.324], [0.42, 0.35]], dtype=torch.float64)
RIDGES = {(0.1, 0.003, 3.0): "0.003 to 3", (0.03, 0.03): "0.03", (1.0,): "1", (): "–"}


def page() -> Page:
    return drift_page(ERRORS, list(RIDGES), [(model, 7) for model in MODELS], FeatcalSettings())


def test_it_opens_with_how_far_the_last_layers_features_are() -> None:
    assert page().verdict == [
        "After the last layer, the merge's features are at a relative distance of 0.42 from math and 0.35 from code. "
        "The distance grows most in layer 2.",
        ERRORS_MEANING,
    ]


def test_two_models_may_have_one_name() -> None:
    tasks = [("model", 7), ("model", 9)]
    page = drift_page(ERRORS, list(RIDGES), tasks, FeatcalSettings())
    assert page.facts["Models"] == "model (7 prompts), model (9 prompts)"


def test_the_table_has_every_layers_distances_and_ridges() -> None:
    (chart,) = page().charts
    assert list(chart.table.header) == ["layer", "math", "code", "ridges"]
    numbers = [["0.11", "0.12"], ["0.14", "0.0013"], ["0.41", "0.32"], ["0.42", "0.35"]]
    rows = zip(numbers, RIDGES.values(), strict=True)
    assert [list(row) for row in chart.table.rows] == [[str(i), *errors, own] for i, (errors, own) in enumerate(rows)]
