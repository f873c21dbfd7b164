"""Charts: lines, heat maps and points that are readable on a narrow screen, and without colours.

Every picture fits a phone's width, so a wide screen shows several side by side. Lines differ in marker as well as in
colour. The colours are those of Okabe and Ito, which colour-blind people can tell apart. Axes of lines begin at 0,
unless values are below it.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from mergekit_slta.words import as_score, plain_number

INK, AXIS, GRID, MISSING = "#1a1a1a", "#555555", "#e4e4e4", "#dcdcdc"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
MARKERS = "osD^vPX*"
COLOUR_MAP = "RdBu"  # red below 0, white at 0, blue above
WIDTH = 4.6  # inches
PANEL_HEIGHT = 1.75
LINE_HEIGHT = 0.21
DOTS_PER_INCH = 170
# Lengths of names in characters; longer ones lose their middle, because their ends tell experts apart.
NAME_LENGTH = 30
GROUP_NAME_LENGTH = 14
ROW_NAME_LENGTH = 20
LEGEND_LENGTH = 50  # of a row of the legend
# Of more rows or columns of a heat map than these, not every one is named.
MOST_NAMES, MOST_COLUMN_NAMES = 20, 11
WIDEST = 2.0  # values beyond it, and beyond its negative, have its colour, so that one of 25 does not whiten the others
MOST_NUMBERED = 8  # cells show no numbers where there are more columns
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": AXIS,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 10,
    "grid.color": GRID,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.hashsalt": "mergekit-slta",  # the same picture is the same file
    "text.parse_math": False,  # names may hold dollar signs
}


class Line(NamedTuple):
    """A series: its name in the legend, and its points, where NaN leaves a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """Lines that share their axes."""

    title: str
    lines: Sequence[Line]


class Matrix(NamedTuple):
    """A heat map: values [rows, columns], NaN for missing ones. The names of columns are numbers."""

    title: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]


class Points(NamedTuple):
    """A series: its name in the legend, and in each group a value with its standard deviation."""

    label: str
    values: Sequence[float]
    deviations: Sequence[float]


def drawn(figure: Figure, form: str = "png") -> bytes:
    """A chart on a white ground, as PNG or as SVG, which is sharp at any size."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        figure.savefig(file, format=form, metadata={"Date": None} if form == "svg" else None)
    return file.getvalue()


def line_chart(
    panels: Sequence[Panel], *, x_label: str, y_label: str, lowest: float = -math.inf, top: float = 0.0
) -> Figure:
    """Panels of the same lines below each other, with one scale, so that they can be compared.

    On the x axis are whole numbers; values below ``lowest`` are drawn there. The y axis reaches at least to ``top``.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure([PANEL_HEIGHT] * len(panels), [line.label for line in panels[0].lines], sharey=True)
        for panel, ax in zip(panels, axes, strict=True):
            ax.set_title(_short(panel.title))
            ax.set_ylabel(y_label)
            for i, line in enumerate(panel.lines):
                colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
                y = np.clip(line.y, lowest, math.inf)
                way = "-" if len(line.x) > 1 else ""  # one point has no line, in the legend neither
                ax.plot(line.x, y, color=colour, linestyle=way, marker=marker, label=_short(line.label))
            ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
            ax.margins(x=0.05, y=0.15)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if not any(value < 0 for panel in panels for line in panel.lines for value in line.y):
            axes[0].set_ylim(bottom=0)
        axes[0].set_ylim(top=max(axes[0].get_ylim()[1], top))
        axes[-1].set_xlabel(x_label)
        _legend(figure, axes[0])
        return figure


def heat_map(matrices: Sequence[Matrix], *, x_label: str, y_label: str, value_label: str) -> Figure:
    """Heat maps below each other with one scale of colours, and numbers in the cells if there is room.

    The colours part at 0. Those of the values above reach to the largest, from 1 to ``WIDEST``; those below likewise.
    """
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "axes.facecolor": MISSING}):
        figure, axes = _figure([0.55 + min(max(0.28 * len(matrix.rows), 0.8), 3.2) for matrix in matrices])
        finite = (value for matrix in matrices for row in matrix.values for value in row if math.isfinite(value))
        numbers = [0.0, 1.0, *finite]
        least, most = max(min(numbers), -WIDEST), min(max(numbers), WIDEST)
        norm = TwoSlopeNorm(0, min(-1.0, least), most)
        for matrix, ax in zip(matrices, axes, strict=True):
            values = np.ma.masked_invalid(np.asarray(matrix.values, dtype=float))
            image = ax.imshow(values, cmap=COLOUR_MAP, norm=norm, aspect="auto", interpolation="none")
            ax.set_title(_short(matrix.title))
            ax.set_ylabel(y_label)
            _name_cells(ax, matrix)
            if len(matrix.columns) <= MOST_NUMBERED and len(matrix.rows) <= MOST_NAMES:
                _number_cells(ax, image, values)
        axes[-1].set_xlabel(x_label)
        beyond = ("neither", "max", "min", "both")[(max(numbers) > WIDEST) + 2 * (min(numbers) < -WIDEST)]
        bar = figure.colorbar(image, ax=list(axes), orientation="horizontal", aspect=30, pad=0.02, extend=beyond)
        bar.ax.set_xlim(least, most)
        bar.set_label(value_label)
        return figure


def point_chart(groups: Sequence[str], series: Sequence[Points], *, x_label: str) -> Figure:
    """Points with their values, those of a group of ``groups`` together, on a logarithmic axis.

    A line reaches from one standard deviation above the value down by the same factor, so that it never comes to 0.
    """
    step = len(series) + 0.7
    positive = [value for points in series for value in points.values if value > 0]
    least = 10.0 ** math.floor(math.log10(min(positive, default=0.1) / 2))
    most = 10.0 ** math.ceil(math.log10(max(positive, default=1.0)))
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, (ax,) = _figure([LINE_HEIGHT * step * len(groups)], [points.label for points in series])
        for i, points in enumerate(series):
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            for group, (value, deviation) in enumerate(zip(points.values, points.deviations, strict=True)):
                place, label = i + step * group, _short(points.label) if group == 0 else ""
                ends = [value / (1 + deviation / value), value + deviation] if value > 0 else [math.nan] * 2
                ax.plot(ends, [place] * 2, color=colour, linewidth=1, marker="|", markersize=5)
                ax.plot(value if value > 0 else math.nan, place, color=colour, marker=marker, linestyle="", label=label)
                if math.isfinite(value):
                    end = np.nanmax([least, value, ends[1]]), place
                    said = _with_deviation(value, deviation)
                    ax.annotate(said, end, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_xscale("log")
        ax.margins(x=0.45)  # room for the numbers
        ax.set_xlim(left=least)
        ax.set_xticks([tick for tick in LogLocator(numticks=7).tick_values(least, most) if least <= tick <= 1.5 * most])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        middles = [(len(series) - 1) / 2 + step * group for group in range(len(groups))]
        ax.set_yticks(middles, [_short(group, GROUP_NAME_LENGTH) for group in groups])
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(middles[-1] + step / 2, middles[0] - step / 2)
        ax.set_xlabel(f"{x_label} (log scale)")
        _legend(figure, ax)
        return figure


def _with_deviation(value: float, deviation: float) -> str:
    """A number and its standard deviation, with the decimals that give the number two digits."""
    decimals = max(0, 1 - math.floor(math.log10(abs(value)))) if value else 0
    form = f".{decimals}f" if decimals <= 5 else ".1e"
    return f"{plain_number(value, form)} ± {plain_number(deviation, form)}"


def _figure(heights: Sequence[float], legend: Sequence[str] = (), sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with room for panels of these heights in inches, for axis labels and for a legend."""
    rows = math.ceil(len(legend) / _legend_columns(legend)) if len(legend) > 1 else 0
    height = sum(heights) + LINE_HEIGHT * (rows + 4)
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, sharey=sharey, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _legend(figure: Figure, ax: Axes) -> None:
    """The legend of an axes' series, above the figure's panels; a single series needs none."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        columns = _legend_columns(labels)
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.0)


def _legend_columns(labels: Sequence[str]) -> int:
    lengths = [min(len(label), NAME_LENGTH) + 6 for label in labels]
    return len(labels) if sum(lengths) <= LEGEND_LENGTH else max(1, LEGEND_LENGTH // max(lengths))


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
    for (row, column), value in np.ma.ndenumerate(values):  # without the missing ones
        red, green, blue, _ = image.cmap(image.norm(value))
        colour = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        ax.text(column, row, as_score(value), ha="center", va="center", fontsize=9, color=colour)
