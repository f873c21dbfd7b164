"""Charts: lines, heat maps and bars that are readable on a narrow screen, on a dark one, and without colours.

Every picture fits a phone's width, so a wide screen shows several side by side. Lines differ in marker as well as in
colour. The colours are those of Okabe and Ito, which colour-blind people can tell apart.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mergekit_slta.reports.words import plain_number

INK, AXIS, GRID, SHADE = "#1a1a1a", "#555555", "#e4e4e4", "#dcdcdc"
# What an SVG shows instead on a dark ground. Everything else keeps its colour.
DARK = {INK: "#e6e6e6", AXIS: "#a0a5ac", GRID: "#2e3237", SHADE: "#3a3f46"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
MARKERS = "osD^vPX*"
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "++")
WIDTH = 4.6  # inches
PANEL_HEIGHT = 1.75
DOTS_PER_INCH = 170
LEGEND_LENGTH = 30  # characters
LEGEND_WIDTH = 48
CELL_NAME_LENGTH = 14
LINE_HEIGHT = 0.21  # inches
CELL_NUMBER_LENGTH = 5
# Cells show their numbers if there are no more rows than names beside them, and a row of numbers and its name have at
# most this many characters.
NUMBERED_LENGTH = 56
MOST_NAMES = 16
# Column names with more characters than this in all are rotated.
COLUMN_NAMES_LENGTH = 36
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": AXIS,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": GRID,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.hashsalt": "mergekit-slta",  # the same picture is the same file
    "text.color": INK,
    "text.parse_math": False,  # names may hold dollar signs
    "xtick.color": INK,
    "ytick.color": INK,
}


class Picture:
    """A chart that is drawn as often as it is asked for, in the form that the place needs.

    Args:
        figure: the chart.
    """

    def __init__(self, figure: Figure) -> None:
        self._figure = figure

    def png(self) -> bytes:
        """The chart on a white ground."""
        return self._drawn("png", pil_kwargs={"optimize": True})

    def svg(self) -> bytes:
        """The chart without a ground, sharp at any size; it turns dark with the page that shows it."""
        rules = "".join(
            f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
            for light, dark in DARK.items()
            for what in ("fill", "stroke")
        )
        drawn = self._drawn("svg", facecolor="none", metadata={"Date": None})
        style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n </defs>"
        return drawn.replace(b"</defs>", style.encode(), 1)

    def _drawn(self, form: str, **options: Any) -> bytes:
        drawn = io.BytesIO()
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
            self._figure.savefig(drawn, format=form, **options)
        return drawn.getvalue()


@dataclass(frozen=True)
class Line:
    """One series of a chart.

    Attributes:
        label: its name in the legend.
        x, y: its points; NaN leaves a gap.
        low, high: a band around it.
        cloud: further points in its colour, such as the values whose mean is ``y``.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    cloud: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Panel:
    """Lines that share their axes; the background is grey at the ``shaded`` places of the horizontal axis."""

    title: str
    lines: Sequence[Line]
    shaded: Sequence[float] = ()


@dataclass(frozen=True)
class Matrix:
    """A heat map: values [rows, columns], NaN for missing ones."""

    title: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]


@dataclass(frozen=True)
class Bar:
    """A bar: the value of one series in one group, and its standard deviation."""

    group: str
    series: str
    value: float
    deviation: float


def line_chart(
    panels: Sequence[Panel],
    *,
    x_label: str,
    y_label: str,
    y_percent: bool = False,
    y_range: tuple[float, float] | None = None,
    lines_at: Sequence[float] = (),
    shaded_label: str = "",
) -> Picture:
    """Panels of lines below each other.

    Args:
        panels: the panels; a label means the same series in all of them.
        x_label, y_label: the axes' names with their units.
        y_percent: whether the vertical axis shows shares as percentages.
        y_range: limits of the vertical axis; values outside are drawn at the limits.
        lines_at: values to mark with a thin horizontal line.
        shaded_label: the meaning of the shading, for the legend.
    """

    def written(value: float, _: int) -> str:
        return plain_number(100 * value, "g") + " %" if y_percent else plain_number(value, "g")

    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    with matplotlib.rc_context(STYLE):
        shaded = any(panel.shaded for panel in panels)
        entries = [*labels, shaded_label] if shaded else labels
        figure, axes = _panels([PANEL_HEIGHT] * len(panels), entries)
        for panel, ax in zip(panels, axes, strict=True):
            ax.set_title(_short(panel.title, LEGEND_WIDTH))
            ax.set_ylabel(y_label)
            for line in panel.lines:
                _draw_line(ax, line, labels.index(line.label), y_range)
            for x in panel.shaded:
                ax.axvspan(x - 0.5, x + 0.5, color=SHADE, linewidth=0, zorder=0)
            for value in lines_at:
                ax.axhline(value, color="#888888", linewidth=0.8, zorder=1)
            _scale(ax, panel)
            ax.yaxis.set_major_formatter(FuncFormatter(written))
        axes[-1].set_xlabel(x_label)
        handles: list[Artist] = [
            Line2D([], [], color=_colour(index), marker=MARKERS[index % len(MARKERS)]) for index in range(len(labels))
        ]
        _legend(figure, [*handles, Patch(color=SHADE)] if shaded else handles, entries)
        return Picture(figure)


def heat_map(
    matrices: Sequence[Matrix],
    *,
    x_label: str,
    y_label: str,
    value_label: str,
    limits: tuple[float, float],
    numbers: Callable[[float], str] = lambda value: plain_number(value, ".2f"),
) -> Picture:
    """Heat maps below each other with one scale of colours.

    Args:
        matrices: the heat maps.
        x_label, y_label, value_label: the names of columns, rows and values.
        limits: the values of the first and the last colour; values outside have separate colours.
        numbers: formats the values that are written into the cells if there is room.
    """
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "axes.facecolor": SHADE}):
        rows = [len(matrix.rows) for matrix in matrices]
        heights = [0.55 + min(max(0.28 * n, 0.8), 2.6) for n in rows]
        figure, axes = _panels(heights, [])
        colour_map = matplotlib.colormaps["viridis"].with_extremes(bad="none", under="#f4a6d7", over="#d7301f")
        for matrix, ax in zip(matrices, axes, strict=True):
            values = np.ma.masked_invalid(np.asarray(matrix.values, dtype=float))
            image = ax.imshow(values, cmap=colour_map, norm=Normalize(*limits), aspect="auto", interpolation="none")
            ax.set_title(_short(matrix.title, LEGEND_LENGTH))
            _name_cells(ax, matrix)
            longest = max(map(len, _cell_names(matrix.rows)))
            if CELL_NUMBER_LENGTH * len(matrix.columns) + longest <= NUMBERED_LENGTH and len(matrix.rows) <= MOST_NAMES:
                _number_cells(ax, image, values, numbers)
            ax.set_ylabel(y_label)
        axes[-1].set_xlabel(x_label)
        everything = [value for matrix in matrices for row in matrix.values for value in row]
        under, over = (any(value < limits[0] for value in everything), any(value > limits[1] for value in everything))
        bar = figure.colorbar(
            image, ax=list(axes), orientation="horizontal", aspect=30, pad=0.02,
            extend=("neither", "min", "max", "both")[under + 2 * over], ticks=MaxNLocator(5, steps=[1, 2, 5, 10]),
        )  # fmt: skip
        bar.set_label(value_label)
        return Picture(figure)


def bar_chart(bars: Sequence[Bar], *, x_label: str) -> Picture:
    """Grouped horizontal bars with their deviations and values."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    series = list(dict.fromkeys(bar.series for bar in bars))
    places: dict[tuple[str, str], float] = {}
    for bar in bars:
        places[bar.group, bar.series] = len(places) + 0.7 * groups.index(bar.group)
    finite = [bar.value + bar.deviation for bar in bars if math.isfinite(bar.value)]
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, (ax,) = _panels([LINE_HEIGHT * (len(bars) + 0.7 * len(groups))], series)
        looks: list[dict[str, Any]] = [
            {"fc": _colour(i), "hatch": HATCHES[i % len(HATCHES)], "ec": "white"} for i in range(len(series))
        ]
        for bar in bars:
            place = places[bar.group, bar.series]
            ax.barh(place, bar.value, height=0.9, **looks[series.index(bar.series)])
            ax.errorbar(bar.value, place, xerr=bar.deviation, color=INK, linewidth=1, capsize=2)
            end = bar.value + bar.deviation if math.isfinite(bar.value) else 0.0
            text = f"{plain_number(bar.value)} ± {plain_number(bar.deviation)}"
            ax.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_xlim(0, 1.45 * max([*finite, 1e-12]))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))  # room for numbers such as 0.0025
        own = [[place for (name, _), place in places.items() if name == group] for group in groups]
        ax.set_yticks([sum(rows) / len(rows) for rows in own], [_short(group, CELL_NAME_LENGTH) for group in groups])
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlabel(x_label)
        _legend(figure, [Patch(**look) for look in looks], series)
        return Picture(figure)


def _panels(heights: Sequence[float], legend: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with room for panels of these heights in inches, for axis labels and for a legend."""
    rows = math.ceil(len(legend) / _legend_columns(legend)) if legend else 0
    height = sum(heights) + LINE_HEIGHT * (rows + 4)
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _draw_line(ax: Axes, line: Line, index: int, y_range: tuple[float, float] | None) -> None:
    colour = _colour(index)
    limits = y_range or (-math.inf, math.inf)
    if line.low is not None and line.high is not None:
        low, high = np.clip(line.low, *limits), np.clip(line.high, *limits)
        ax.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0)
        for edge in (low, high):
            ax.plot(line.x, edge, color=colour, alpha=0.5, linewidth=0.6)
        if len(line.x) == 1:  # a band has no width at a single point
            ax.vlines(line.x, low, high, color=colour)
    for x, value in line.cloud:
        ax.plot(x, np.clip(value, *limits), ".", color=colour, alpha=0.35, markersize=3)
    ax.plot(line.x, np.clip(line.y, *limits), color=colour, marker=MARKERS[index % len(MARKERS)])


def _scale(ax: Axes, panel: Panel) -> None:
    positions = sorted({x for line in panel.lines for x in line.x})
    if all(float(x).is_integer() for x in positions):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    if len(positions) == 1:
        ax.set_xlim(positions[0] - 1, positions[0] + 1)
        ax.set_xticks(positions)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    short = _distinct([_short(label, LEGEND_LENGTH) for label in labels])
    columns = _legend_columns(labels)
    figure.legend(handles, short, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.0)


def _legend_columns(labels: Sequence[str]) -> int:
    longest = min(max(map(len, labels)), LEGEND_LENGTH)
    return max(1, min(len(labels), LEGEND_WIDTH // (longest + 6)))


def _short(label: str, length: int) -> str:
    """A label cut to a length, with a space before a leading underscore, because matplotlib hides such labels."""
    if len(label) > length:
        label = f"{label[: length // 2 - 1]}…{label[-(length // 2) :]}"
    return f" {label}" if label.startswith("_") else label


def _distinct(labels: Sequence[str]) -> list[str]:
    return [f"{index + 1}: {label}" if labels.count(label) > 1 else label for index, label in enumerate(labels)]


def _name_cells(ax: Axes, matrix: Matrix) -> None:
    for axis, names in ((ax.xaxis, matrix.columns), (ax.yaxis, matrix.rows)):
        step = math.ceil(len(names) / MOST_NAMES)
        axis.set_ticks(range(0, len(names), step), _cell_names(names[::step]))
    if sum(map(len, _cell_names(matrix.columns[:MOST_NAMES]))) > COLUMN_NAMES_LENGTH:
        for label in ax.get_xticklabels():
            label.set(rotation=30, ha="right", rotation_mode="anchor")
    ax.tick_params(length=0, labelsize=9)
    ax.spines[:].set_visible(False)


def _cell_names(names: Sequence[str]) -> list[str]:
    return _distinct([_short(name, CELL_NAME_LENGTH) for name in names])


def _number_cells(ax: Axes, image: Any, values: Any, numbers: Callable[[float], str]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if value is np.ma.masked or not math.isfinite(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        text_colour = "white" if dark else "black"
        ax.text(column, row, numbers(value), ha="center", va="center", fontsize=9, color=text_colour)
