"""The report on a feature merge: its sentences, and its numbers by layer and task."""

import torch

from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.featcal import ERRORS_MEANING, drift_page
from mergekit_slta.reports.page import Page

MODELS = ["org/llama-math", "org/llama-code"]
ERRORS = torch.tensor([[0.11, 0.12], [0.14, 0.0013], [0.41, 0.324], [0.42, 0.35]], dtype=torch.float64)


def page() -> Page:
    return drift_page(ERRORS, [(model, 7) for model in MODELS], FeatcalSettings())


def test_it_opens_with_how_far_the_last_layers_features_are() -> None:
    distances = "After the last layer, the merge's features are at a relative distance of"
    assert page().verdict == [f"{distances} 0.420 from math and 0.350 from code.", ERRORS_MEANING]


def test_the_table_has_every_layers_distances() -> None:
    (chart,) = page().charts
    assert list(chart.table.header) == ["layer", "math", "code"]
    numbers = [["0.110", "0.120"], ["0.140", "0.001"], ["0.410", "0.324"], ["0.420", "0.350"]]
    assert [list(row) for row in chart.table.rows] == [[str(i), *errors] for i, errors in enumerate(numbers)]
