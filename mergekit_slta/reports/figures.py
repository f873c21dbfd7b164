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

INK, AXIS, GRID, MISSING = "#1a1a1a", "#555555", "#e4e4e4", "#dcdcdc"
# On a dark ground an SVG shows these colours instead. Everything else keeps its colour.
DARK = {INK: "#e6e6e6", AXIS: "#a0a5ac", GRID: "#2e3237", MISSING: "#3a3f46"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
MARKERS = "osD^vPX*"
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "++")
WIDTH = 4.6  # inches
PANEL_HEIGHT = 1.75
LINE_HEIGHT = 0.21
DOTS_PER_INCH = 170
# Lengths of names in characters; longer ones lose their middle, because their ends tell experts apart.
TITLE_LENGTH = 48
LEGEND_LENGTH = 30
CELL_NAME_LENGTH = 14
COLUMN_NAMES_LENGTH = 36  # columns whose names are longer together have them rotated
MOST_NAMES = 16  # along an axis of a heat map; of more rows or columns, every second or third is named
NUMBERED_LENGTH = 56  # cells show their numbers if a row of them and its name have at most this many characters
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


@dataclass(frozen=True)
class Picture:
    """A chart, which is drawn in the form that the place needs; ``empty`` if no value in it is a number."""

    figure: Figure
    empty: bool = False

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
            self.figure.savefig(drawn, format=form, **options)
        return drawn.getvalue()


@dataclass(frozen=True)
class Line:
    """A series: its name in the legend, its points, where NaN leaves a gap, and the ends of a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """Lines that share their axes."""

    title: str
    lines: Sequence[Line]


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
    y_range: tuple[float, float] = (-math.inf, math.inf),
    lines_at: Sequence[float] = (),
) -> Picture:
    """Panels of lines below each other.

    Args:
        panels: the panels; a label means the same series in all of them.
        x_label, y_label: the axes' names with their units.
        y_percent: whether the vertical axis shows shares as percentages.
        y_range: values outside of it are drawn at its ends.
        lines_at: values to mark with a thin horizontal line.
    """
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    looks: list[dict[str, Any]] = [
        {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i in range(len(labels))
    ]
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels([PANEL_HEIGHT] * len(panels), labels)
        for panel, ax in zip(panels, axes, strict=True):
            ax.set_title(_short(panel.title, TITLE_LENGTH))
            ax.set_ylabel(y_label)
            for line in panel.lines:
                _draw_line(ax, line, looks[labels.index(line.label)], y_range)
            for value in lines_at:
                ax.axhline(value, color="#888888", linewidth=0.8, zorder=1)
            ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
            ax.yaxis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{plain_number(100 * value)} %" if y_percent else plain_number(value))
            )
            positions = sorted({x for line in panel.lines for x in line.x})
            if len(positions) == 1:
                ax.set_xlim(positions[0] - 1, positions[0] + 1)
                ax.set_xticks(positions)
            elif all(float(x).is_integer() for x in positions):
                ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes[-1].set_xlabel(x_label)
        _legend(figure, [Line2D([], [], **look) for look in looks], labels)
        return Picture(figure, not any(math.isfinite(y) for panel in panels for line in panel.lines for y in line.y))


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
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "axes.facecolor": MISSING}):
        figure, axes = _panels([0.55 + min(max(0.28 * len(matrix.rows), 0.8), 2.6) for matrix in matrices])
        colours = matplotlib.colormaps["viridis"].with_extremes(bad="none", under="#f4a6d7", over="#d7301f")
        for matrix, ax in zip(matrices, axes, strict=True):
            values = np.ma.masked_invalid(np.asarray(matrix.values, dtype=float))
            image = ax.imshow(values, cmap=colours, norm=Normalize(*limits), aspect="auto", interpolation="none")
            ax.set_title(_short(matrix.title, LEGEND_LENGTH))
            ax.set_ylabel(y_label)
            longest = max(map(len, _name_cells(ax, matrix)))
            if 5 * len(matrix.columns) + longest <= NUMBERED_LENGTH and len(matrix.rows) <= MOST_NAMES:
                _number_cells(ax, image, values, numbers)
        axes[-1].set_xlabel(x_label)
        everything = [value for matrix in matrices for row in matrix.values for value in row]
        under, over = any(value < limits[0] for value in everything), any(value > limits[1] for value in everything)
        bar = figure.colorbar(
            image, ax=list(axes), orientation="horizontal", aspect=30, pad=0.02,
            extend=("neither", "min", "max", "both")[under + 2 * over], ticks=MaxNLocator(5, steps=[1, 2, 5, 10]),
        )  # fmt: skip
        bar.set_label(value_label)
        return Picture(figure, not any(map(math.isfinite, everything)))


def bar_chart(bars: Sequence[Bar], *, x_label: str) -> Picture:
    """Grouped horizontal bars with their deviations and values."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    series = list(dict.fromkeys(bar.series for bar in bars))
    looks: list[dict[str, Any]] = [
        {"fc": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)], "ec": "white"} for i in range(len(series))
    ]
    ends = [bar.value + bar.deviation for bar in bars if math.isfinite(bar.value)]
    places: dict[str, list[float]] = {group: [] for group in groups}
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, (ax,) = _panels([LINE_HEIGHT * (len(bars) + 0.7 * len(groups))], series)
        for number, bar in enumerate(bars):
            place = number + 0.7 * groups.index(bar.group)
            places[bar.group].append(place)
            ax.barh(place, bar.value, height=0.9, **looks[series.index(bar.series)])
            ax.errorbar(bar.value, place, xerr=bar.deviation, color=INK, linewidth=1, capsize=2)
            end = bar.value + bar.deviation if math.isfinite(bar.value) else 0.0
            text = f"{plain_number(bar.value)} ± {plain_number(bar.deviation)}"
            ax.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_xlim(0, 1.45 * max([*ends, 1e-12]))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))  # room for numbers such as 0.0025
        ax.set_yticks([sum(own) / len(own) for own in places.values()], _distinct(groups, CELL_NAME_LENGTH))
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlabel(x_label)
        _legend(figure, [Patch(**look) for look in looks], series)
        return Picture(figure, not ends)


def _panels(heights: Sequence[float], legend: Sequence[str] = ()) -> tuple[Figure, list[Axes]]:
    """A figure with room for panels of these heights in inches, for axis labels and for a legend."""
    rows = math.ceil(len(legend) / _legend_columns(legend)) if legend else 0
    height = sum(heights) + LINE_HEIGHT * (rows + 4)
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _draw_line(ax: Axes, line: Line, look: dict[str, Any], limits: tuple[float, float]) -> None:
    if line.low is not None and line.high is not None:
        low, high = np.clip(line.low, *limits), np.clip(line.high, *limits)
        ax.fill_between(line.x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        for edge in (low, high):
            ax.plot(line.x, edge, color=look["color"], alpha=0.5, linewidth=0.6)
        if len(line.x) == 1:  # a band has no width at a single point
            ax.vlines(line.x, low, high, color=look["color"])
    ax.plot(line.x, np.clip(line.y, *limits), **look)


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    figure.legend(
        handles, _distinct(labels, LEGEND_LENGTH), loc="outside upper left", ncols=_legend_columns(labels),
        handlelength=1.6, columnspacing=1.0,
    )  # fmt: skip


def _legend_columns(labels: Sequence[str]) -> int:
    longest = min(max(map(len, labels)), LEGEND_LENGTH)
    return max(1, min(len(labels), TITLE_LENGTH // (longest + 6)))


def _short(label: str, length: int) -> str:
    """A label cut to a length, with a space before a leading underscore, because matplotlib hides such labels."""
    if len(label) > length:
        label = f"{label[: length // 2 - 1]}…{label[-(length // 2) :]}"
    return f" {label}" if label.startswith("_") else label


def _distinct(names: Sequence[str], length: int) -> list[str]:
    """Short names, with their numbers where some are equal."""
    short = [_short(name, length) for name in names]
    return [f"{index + 1}: {name}" if short.count(name) > 1 else name for index, name in enumerate(short)]


def _name_cells(ax: Axes, matrix: Matrix) -> list[str]:
    """Name rows and columns; returns the names of the rows."""
    shown = []
    for axis, names in ((ax.xaxis, matrix.columns), (ax.yaxis, matrix.rows)):
        step = math.ceil(len(names) / MOST_NAMES)
        shown.append(_distinct(names[::step], CELL_NAME_LENGTH))
        axis.set_ticks(range(0, len(names), step), shown[-1])
    columns, rows = shown
    if sum(map(len, columns)) > COLUMN_NAMES_LENGTH:
        for label in ax.get_xticklabels():
            label.set(rotation=30, ha="right", rotation_mode="anchor")
    ax.tick_params(length=0, labelsize=9)
    ax.spines[:].set_visible(False)
    return rows


def _number_cells(ax: Axes, image: Any, values: Any, numbers: Callable[[float], str]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if value is not np.ma.masked:
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
            ax.text(column, row, numbers(value), ha="center", va="center", fontsize=9, color=colour)
