"""Charts are drawn, without a warning, whatever names and numbers they are given."""

import math
import warnings
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from mergekit_slta.figures import Line, Matrix, Panel, Points, drawn, heat_map, line_chart, point_chart

NAMES = ["_private", "cost $\\alpha$ $", "<b>&", "x" * 200, "法律", "math", "word"]


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draw(figure: Figure) -> None:
    ElementTree.fromstring(drawn(figure, "svg"))
    assert drawn(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(("x", "lowest"), [([1.0, 2.0, 3.0], -math.inf), ([4.0], -1.0)])
def test_lines(x: list[float], lowest: float) -> None:
    y = [5.0, math.nan, 1e6][: len(x)]
    panels = [Panel(title, [Line(name, x, y) for name in NAMES]) for title in NAMES[:3]]
    draw(line_chart(panels, x_label="$x", y_label="_y", lowest=lowest))


@pytest.mark.parametrize("columns", [1, 3, 40])
def test_heat_maps(columns: int) -> None:
    values = [[(row + column) / columns - 0.2 for column in range(columns)] for row in range(len(NAMES))]
    values[0][0] = math.nan
    matrix = Matrix("$t", values, NAMES, [*map(str, range(columns))])
    draw(heat_map([matrix, matrix], x_label="$x", y_label="_y", value_label="v"))


def test_values_below_0_differ_in_colour_and_from_those_above() -> None:
    matrix = Matrix("", [[-2.13, -0.03, 0.0, 0.5, 1.0]], ["a"], [*"12345"])
    image: Any = heat_map([matrix], x_label="x", y_label="y", value_label="v").axes[0].images[0]
    colours = [image.cmap(image.norm(value))[:3] for value in matrix.values[0]]
    far, near, _, half, whole = ([*map(float, colour)] for colour in colours)
    assert far[0] > far[2] + 0.2 and whole[2] > whole[0] + 0.2  # red, and blue
    assert min(np.abs(np.subtract(*pair)).max() for pair in ((far, near), (half, whole))) > 0.3


def test_one_extreme_value_does_not_whiten_the_others() -> None:
    matrix = Matrix("", [[-24.0, 25.0, 0.5]], ["a"], [*"123"])
    image: Any = heat_map([matrix], x_label="x", y_label="y", value_label="v").axes[0].images[0]
    assert image.norm(2.0) == 1.0 and image.norm(-2.0) == 0.0 and image.colorbar.extend == "both"


def test_axes_begin_at_0_and_a_single_series_has_no_legend() -> None:
    for lowest, values in ((0.0, [0.8, 0.9]), (-0.2, [-0.2, 0.9])):
        figure = line_chart([Panel("", [Line("a", [0, 1], values)])], x_label="", y_label="")
        assert figure.axes[0].get_ylim()[0] == 0 if lowest == 0 else figure.axes[0].get_ylim()[0] < lowest
        assert not figure.legends


def test_points() -> None:
    groups = ["model", "_layer", "$a", "none"]
    series = [Points(name, [0.5, 0.4, 0.0, math.nan], [0.1, 0.0, 0.0, math.nan]) for name in NAMES]
    draw(point_chart(groups, series, x_label="$score"))
    draw(point_chart(["a"], [Points("b", [0.0], [0.0])], x_label="x"))
