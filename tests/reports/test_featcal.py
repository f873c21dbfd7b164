"""The report on a feature merge: its sentences, and its numbers by layer and task."""

from collections.abc import Sequence
from typing import Literal

import torch

from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.featcal import ERRORS_MEANING, drift_page
from mergekit_slta.reports.page import Page

MODELS = ["org/llama-math", "org/llama-code"]
ERRORS = torch.tensor([[0.11, 0.12], [0.14, 0.0013], [0.41, 0.324], [0.42, 0.35]], dtype=torch.float64)
RIDGES = [[0.1, 0.003, 3.0], [0.03, 3.0], [3.0], []]


def page(ridges: Sequence[Sequence[float]] = RIDGES, ridge: float | Literal["auto"] = "auto") -> Page:
    return drift_page(ERRORS, ridges, [(model, 7) for model in MODELS], FeatcalSettings(ridge=ridge))


def test_it_opens_with_how_far_the_last_layers_features_are() -> None:
    distance = (
        "After the last layer, the merge's features are at a relative distance of 0.420 from math and 0.350 from code."
    )
    assert page().verdict == [distance, ERRORS_MEANING]


def test_it_says_that_most_ridges_are_the_largest_of_the_search() -> None:
    ridges = [*RIDGES, [3.0]]
    said = "Of 7 ridges, 4 are the largest of the search, 3, which stays nearest to the merge without prompts."
    assert page(ridges).verdict[2].startswith(said)
    assert len(page(ridges, ridge=3.0).verdict) == 2


def test_two_models_may_have_one_name() -> None:
    tasks = [("model", 7), ("model", 9)]
    page = drift_page(ERRORS, RIDGES, tasks, FeatcalSettings())
    assert page.facts["Models"] == "model (7 prompts), model (9 prompts)"


def test_the_table_has_every_layers_distances() -> None:
    (chart,) = page().charts
    assert list(chart.table.header) == ["layer", "math", "code"]
    numbers = [["0.110", "0.120"], ["0.140", "0.001"], ["0.410", "0.324"], ["0.420", "0.350"]]
    assert [list(row) for row in chart.table.rows] == [[str(i), *errors] for i, errors in enumerate(numbers)]
