"""The report on a feature merge: its sentence, both lines' numbers, and that it needs nothing from outside."""

from __future__ import annotations

import pytest
import torch

from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.featcal import ANCHORS, ERRORS_MEANING, drift_page
from mergekit_slta.reports.page import Page
from mergekit_slta.words import percent

MODELS = ["org/llama-math", "org/llama-code"]
MERGED = torch.tensor([[0.11, 0.12], [0.14, 0.13], [0.41, 0.32], [0.42, 0.35]], dtype=torch.float64)
ANCHOR = 2 * MERGED + 0.011


def page(**settings: object) -> Page:
    return drift_page(
        MERGED, ANCHOR, MODELS, FeatcalSettings.model_validate({"samples": 7, "anchor": "base", **settings})
    )


def test_it_opens_with_how_far_the_last_layers_features_are() -> None:
    assert page().verdict == [
        "After the last layer the merged model's features are 42 % away from math's (the base model: 85 %) and "
        "35 % away from code's (the base model: 71 %); the distance grows most in layer 2.",
        ERRORS_MEANING,
    ]


@pytest.mark.parametrize(("anchor", "words"), ANCHORS.items())
def test_the_anchor_is_named(anchor: str, words: str) -> None:
    found = page(anchor=anchor)
    assert f"({words}: 85 %)" in found.verdict[0]
    assert f"towards {words}," in found.facts["Solved with"]


def test_the_table_has_both_lines_of_every_task() -> None:
    (section,) = page().sections
    (chart,) = section.charts
    assert list(chart.table.header) == ["layer", "math, before", "math, after", "code, before", "code, after"]
    for layer, row in enumerate(chart.table.rows):
        pairs = zip(ANCHOR[layer].tolist(), MERGED[layer].tolist(), strict=True)
        assert list(row) == [str(layer), *(percent(error) for pair in pairs for error in pair)]
    assert len(chart.table.rows) == len(MERGED)
