"""Charts: lines, heat maps and bars that are readable on a narrow screen, and without colours.

Every picture fits a phone's width, so a wide screen shows several side by side. Lines differ in marker as well as in
colour. The colours are those of Okabe and Ito, which colour-blind people can tell apart.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mergekit_slta.words import plain_number

INK, AXIS, GRID, MISSING = "#1a1a1a", "#555555", "#e4e4e4", "#dcdcdc"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
MARKERS = "osD^vPX*"
WIDTH = 4.6  # inches
PANEL_HEIGHT = 1.75
LINE_HEIGHT = 0.21
DOTS_PER_INCH = 170
# Lengths of names in characters; longer ones lose their middle, because their ends tell experts apart.
NAME_LENGTH = 30
GROUP_NAME_LENGTH = 14
ROW_NAME_LENGTH = 20
LEGEND_LENGTH = 48  # of a row of the legend
# Of more rows or columns of a heat map than these, every second or third is named.
MOST_NAMES, MOST_COLUMN_NAMES = 20, 11
MOST_NUMBERED = 8  # cells show their numbers if there are at most so many columns
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
    """A chart on a white ground, which is drawn in the form that the place needs."""

    figure: Figure

    def png(self) -> bytes:
        """The chart as PNG."""
        return self._drawn("png")

    def svg(self) -> bytes:
        """The chart as SVG, sharp at any size."""
        return self._drawn("svg", metadata={"Date": None})

    def _drawn(self, form: str, **options: Any) -> bytes:
        drawn = io.BytesIO()
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
            self.figure.savefig(drawn, format=form, **options)
        return drawn.getvalue()


@dataclass(frozen=True)
class Line:
    """A series: its name in the legend, and its points, where NaN leaves a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Lines that share their axes."""

    title: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Matrix:
    """A heat map: values [rows, columns], NaN for missing ones. The names of columns are numbers."""

    title: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]


@dataclass(frozen=True)
class Bars:
    """A series: its name in the legend, and in each group a value with its standard deviation."""

    label: str
    values: Sequence[float]
    deviations: Sequence[float]


def line_chart(
    panels: Sequence[Panel],
    *,
    x_label: str,
    y_label: str,
    x_percent: bool = False,
    y_percent: bool = False,
    y_range: tuple[float, float] = (-math.inf, math.inf),
    lines_at: Sequence[float] = (),
) -> Picture:
    """Panels of lines below each other, with one scale, so that they can be compared.

    Args:
        panels: the panels, each with the same series in the same order.
        x_label, y_label: the axes' names with their units.
        x_percent, y_percent: whether an axis shows shares as percentages.
        y_range: values outside of it are drawn at its ends.
        lines_at: values to mark with a thin horizontal line.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure([PANEL_HEIGHT] * len(panels), [line.label for line in panels[0].lines], sharey=True)
        percentages = FuncFormatter(lambda value, _: f"{plain_number(round(100 * value, 3), 'g')} %")
        for panel, ax in zip(panels, axes, strict=True):
            ax.set_title(_short(panel.title))
            ax.set_ylabel(y_label)
            for i, line in enumerate(panel.lines):
                colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
                ax.plot(line.x, np.clip(line.y, *y_range), color=colour, marker=marker, label=_short(line.label))
            for value in lines_at:
                ax.axhline(value, color="#888888", linewidth=0.8, zorder=1)
            ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
            if y_percent:
                ax.yaxis.set_major_formatter(percentages)
            if x_percent:
                ax.xaxis.set_major_formatter(percentages)
            else:
                ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes[-1].set_xlabel(x_label)
        _legend(figure, axes[0])
        return Picture(figure)


def heat_map(
    matrices: Sequence[Matrix],
    *,
    x_label: str,
    y_label: str,
    value_label: str,
    limits: tuple[float, float],
) -> Picture:
    """Heat maps below each other with one scale of colours, and numbers in the cells if there is room.

    Args:
        matrices: the heat maps.
        x_label, y_label, value_label: the names of columns, rows and values.
        limits: the values of the first and the last colour; values outside have separate colours.
    """
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "axes.facecolor": MISSING}):
        figure, axes = _figure([0.55 + min(max(0.28 * len(matrix.rows), 0.8), 3.2) for matrix in matrices])
        colours = matplotlib.colormaps["viridis"].with_extremes(bad="none", under="#f4a6d7", over="#d7301f")
        for matrix, ax in zip(matrices, axes, strict=True):
            values = np.ma.masked_invalid(np.asarray(matrix.values, dtype=float))
            image = ax.imshow(values, cmap=colours, norm=Normalize(*limits), aspect="auto", interpolation="none")
            ax.set_title(_short(matrix.title))
            ax.set_ylabel(y_label)
            _name_cells(ax, matrix)
            if len(matrix.columns) <= MOST_NUMBERED and len(matrix.rows) <= MOST_NAMES:
                _number_cells(ax, image, values)
        axes[-1].set_xlabel(x_label)
        bar = figure.colorbar(image, ax=list(axes), orientation="horizontal", aspect=30, pad=0.02, extend="both")
        bar.set_label(value_label)
        return Picture(figure)


def bar_chart(groups: Sequence[str], series: Sequence[Bars], *, x_label: str) -> Picture:
    """Horizontal bars with their deviations and values, those of a group of ``groups`` together."""
    step = len(series) + 0.7
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, (ax,) = _figure([LINE_HEIGHT * step * len(groups)], [bars.label for bars in series])
        for i, bars in enumerate(series):
            drawn = ax.barh(
                [i + step * group for group in range(len(groups))],
                bars.values,
                height=0.9,
                color=COLOURS[i % len(COLOURS)],
                label=_short(bars.label),
                xerr=bars.deviations,
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
            )
            pairs = zip(bars.values, bars.deviations, strict=True)
            said = [f"{plain_number(value)} ± {plain_number(deviation)}" for value, deviation in pairs]
            ax.bar_label(drawn, said, padding=3, fontsize=8)
        ax.margins(x=0.45)  # room for the numbers
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))  # room for ticks such as 0.0025
        middles = [(len(series) - 1) / 2 + step * group for group in range(len(groups))]
        ax.set_yticks(middles, [_short(group, GROUP_NAME_LENGTH) for group in groups])
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlabel(x_label)
        _legend(figure, ax)
        return Picture(figure)


def _figure(heights: Sequence[float], legend: Sequence[str] = (), sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with room for panels of these heights in inches, for axis labels and for a legend."""
    rows = math.ceil(len(legend) / _legend_columns(legend)) if legend else 0
    height = sum(heights) + LINE_HEIGHT * (rows + 4)
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, sharey=sharey, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _legend(figure: Figure, ax: Axes) -> None:
    """The legend of an axes' series, above the figure's panels."""
    handles, labels = ax.get_legend_handles_labels()
    columns = _legend_columns(labels)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.0)


def _legend_columns(labels: Sequence[str]) -> int:
    longest = min(max(map(len, labels)), NAME_LENGTH)
    return max(1, min(len(labels), LEGEND_LENGTH // (longest + 6)))


def _short(label: str, length: int = NAME_LENGTH) -> str:
    """A label cut to a length, with a space before a leading underscore, because matplotlib hides such labels."""
    if len(label) > length:
        label = f"{label[: length // 2 - 1]}…{label[-(length // 2) :]}"
    return f" {label}" if label.startswith("_") else label


def _name_cells(ax: Axes, matrix: Matrix) -> None:
    for axis, names, most in ((ax.xaxis, matrix.columns, MOST_COLUMN_NAMES), (ax.yaxis, matrix.rows, MOST_NAMES)):
        step = math.ceil(len(names) / most)
        axis.set_ticks(range(0, len(names), step), [_short(name, ROW_NAME_LENGTH) for name in names[::step]])
    ax.tick_params(length=0, labelsize=9)
    ax.spines[:].set_visible(False)


def _number_cells(ax: Axes, image: Any, values: Any) -> None:
    for (row, column), value in np.ndenumerate(values):
        if value is not np.ma.masked:
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
            ax.text(column, row, plain_number(value, ".2f"), ha="center", va="center", fontsize=9, color=colour)
