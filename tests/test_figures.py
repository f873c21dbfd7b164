"""Charts are drawn, without a warning, whatever names and numbers they are given."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest

from mergekit_slta.figures import (
    COLOURS,
    DOTS_PER_INCH,
    WIDTH,
    Bars,
    Line,
    Matrix,
    Panel,
    Picture,
    bar_chart,
    heat_map,
    line_chart,
)

NAMES = ["_private", "cost $\\alpha$ $", "<b>&", "x" * 200, "法律", "math", "word"]


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pixels(drawn: Picture) -> np.ndarray:
    ElementTree.fromstring(drawn.svg())
    picture = np.asarray(matplotlib.image.imread(io.BytesIO(drawn.png()), format="png"))[..., :3]
    width = WIDTH * DOTS_PER_INCH  # which matplotlib rounds, until 3.11.0 down
    assert picture.shape[1] in (int(width), round(width))
    return picture


def count_of(picture: np.ndarray, colour: str) -> int:
    """How many pixels have a colour."""
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(picture - wanted).max(-1) < 0.01).sum())


def lines(x: list[float], y: list[float]) -> list[Line]:
    return [Line(name, x, y) for name in NAMES]


@pytest.mark.parametrize(("x", "options"), [([1.0, 2.0, 3.0], {}), ([4.0], {"x_shares": True, "lowest": -1.0})])
def test_lines(x: list[float], options: dict[str, object]) -> None:
    y = [5.0, math.nan, 1e6][: len(x)]
    panels = [Panel(name, lines(x, y)) for name in NAMES[:3]]
    picture = pixels(line_chart(panels, x_label="$x", y_label="_y", lines_at=(0.5,), **options))  # type: ignore[arg-type]
    assert all(count_of(picture, colour) for colour in COLOURS)


@pytest.mark.parametrize("columns", [1, 3, 40])
def test_heat_maps(columns: int) -> None:
    values = [[(row + column) / columns - 0.2 for column in range(columns)] for row in range(len(NAMES))]
    values[0][0] = math.nan
    matrix = Matrix("$t", values, NAMES, [*map(str, range(columns))])
    pixels(heat_map([matrix, matrix], x_label="$x", y_label="_y", value_label="v"))


def test_values_below_0_differ_in_colour_and_from_those_above() -> None:
    matrix = Matrix("", [[-2.13, -0.03, 0.0, 0.5, 1.0]], ["a"], [*"12345"])
    drawn: Any = heat_map([matrix], x_label="x", y_label="y", value_label="v").figure.axes[0].images[0]
    colours = [drawn.cmap(drawn.norm(value))[:3] for value in matrix.values[0]]
    far, near, _, half, whole = ([*map(float, colour)] for colour in colours)
    assert far[0] > far[2] + 0.2 and whole[2] > whole[0] + 0.2  # red, and blue
    assert min(np.abs(np.subtract(*pair)).max() for pair in ((far, near), (half, whole))) > 0.3


def test_axes_begin_at_0_and_a_single_series_has_no_legend() -> None:
    for lowest, values in ((0.0, [0.8, 0.9]), (-0.2, [-0.2, 0.9])):
        drawn = line_chart([Panel("", [Line("a", [0.5, 0.9], values)])], x_label="", y_label="", x_shares=True).figure
        assert drawn.axes[0].get_xlim()[0] == 0
        assert drawn.axes[0].get_ylim()[0] == 0 if lowest == 0 else drawn.axes[0].get_ylim()[0] < lowest
        assert not drawn.legends


@pytest.mark.parametrize(("smallest", "scale"), [(0.1, "linear"), (0.0, "linear"), (0.001, "log")])
def test_the_axis_is_logarithmic_where_values_differ_by_magnitudes(smallest: float, scale: str) -> None:
    drawn = bar_chart(["a", "b"], [Bars("c", [smallest, 1.0], [0.0, 0.1])], x_label="x").figure.axes[0]
    assert drawn.get_xscale() == scale
    assert (drawn.get_xlim()[0] == 0) == (scale == "linear") and drawn.get_xlim()[0] < max(smallest, 0.01)


def test_bars() -> None:
    groups = ["model", "_layer", "$a", "none"]
    series = [Bars(name, [0.5, 0.4, 0.0, math.nan], [0.1, 0.0, 0.0, math.nan]) for name in NAMES]
    picture = pixels(bar_chart(groups, series, x_label="$score"))
    assert all(count_of(picture, colour) for colour in COLOURS)
    pixels(bar_chart(["a"], [Bars("b", [0.0], [0.0])], x_label="x"))


def test_a_picture_as_svg_is_the_same_each_time_and_has_its_own_ground() -> None:
    drawn, again = (line_chart([Panel("", lines([0.0, 1.0], [0.0, 1.0]))], x_label="x", y_label="y") for _ in range(2))
    assert drawn.svg() == again.svg()
    ground = next(ElementTree.fromstring(drawn.svg()).iter("{http://www.w3.org/2000/svg}path"))
    assert "fill: #ffffff" in ground.attrib["style"]
