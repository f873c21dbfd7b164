"""Charts as PNG pictures: lines, heat maps and bars that can be read on a narrow screen and without colours.

Every picture is one narrow column, so that a page may show it at the width of a phone or several side by side. Lines
differ in marker as well as in colour; the colours are those of Okabe and Ito, which colour-blind people tell apart.
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
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mergekit_slta.reports.words import plain_number

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"
SHADE = "#dcdcdc"
WIDTH = 4.6  # inches
PANEL_HEIGHT = 1.75
DOTS_PER_INCH = 170
LEGEND_LENGTH = 30  # characters
LEGEND_WIDTH = 48
CELL_NAME_LENGTH = 14
LINE_HEIGHT = 0.21  # inches
CELL_NUMBER_LENGTH = 5
# Cells are numbered where the numbers of a row and its name have no more characters than this.
NUMBERED_LENGTH = 56
MOST_NAMES = 16
# Longer names of columns stand aslant.
COLUMN_NAMES_LENGTH = 36
PAIR = " | "  # between the names of two experts
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "text.parse_math": False,  # names may hold dollar signs
}


@dataclass(frozen=True)
class Line:
    """One series of a chart.

    Attributes:
        label: its name in the legend.
        x, y: its points; NaN leaves a gap.
        low, high: a band around it.
        cloud: further points in its colour, such as those that ``y`` is the mean of.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    cloud: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Panel:
    """Lines that share their axes; ``shaded`` are places on the horizontal axis to be marked."""

    title: str
    lines: Sequence[Line]
    shaded: Sequence[float] = ()


@dataclass(frozen=True)
class Matrix:
    """A heat map: values [rows, columns], NaN where there is none."""

    title: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]


@dataclass(frozen=True)
class Bar:
    """A bar with its deviation: one series' value in one group."""

    group: str
    series: str
    value: float
    deviation: float


def two_decimals(number: float) -> str:
    """A number of the order of one, short enough for a cell."""
    return f"{number:.2f}".replace("-", "−")


def line_chart(
    panels: Sequence[Panel],
    *,
    x_label: str,
    y_label: str,
    y_percent: bool = False,
    y_range: tuple[float, float] | None = None,
    lines_at: Sequence[float] = (),
    log_x: bool = False,
    log_y: bool = False,
    shaded_label: str = "",
) -> bytes:
    """Panels of lines below each other, as PNG.

    Args:
        panels: what to draw; a label stands for the same series in all of them.
        x_label, y_label: the axes' names with their units.
        y_percent: whether the vertical axis shows shares as percentages.
        y_range: the values between which the vertical axis ends at the latest; what lies outside is drawn at the edge.
        lines_at: values at which a thin horizontal line helps.
        log_x, log_y: logarithmic axes.
        shaded_label: what shading means.
    """
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    with matplotlib.rc_context(STYLE):
        shaded = any(panel.shaded for panel in panels)
        entries = [*labels, shaded_label] if shaded else labels
        figure, axes = _panels([PANEL_HEIGHT] * len(panels), entries)
        for panel, ax in zip(panels, axes, strict=True):
            ax.set_title(panel.title)
            ax.set_ylabel(y_label)
            for line in panel.lines:
                _draw_line(ax, line, labels.index(line.label), y_range)
            for x in panel.shaded:
                ax.axvspan(x - 0.5, x + 0.5, color=SHADE, linewidth=0, zorder=0)
            for value in lines_at:
                ax.axhline(value, color="#888888", linewidth=0.8, zorder=1)
            _scale(ax, panel, log_x, log_y)
            ax.yaxis.set_major_formatter(FuncFormatter(_percent_tick if y_percent else _tick))
        axes[-1].set_xlabel(x_label)
        handles: list[Artist] = [_handle(index) for index in range(len(labels))]
        _legend(figure, [*handles, Patch(color=SHADE)] if shaded else handles, entries)
        return _png(figure)


def heat_map(
    matrices: Sequence[Matrix],
    *,
    x_label: str,
    y_label: str,
    value_label: str,
    limits: tuple[float, float],
    colours: str = "viridis",
    numbers: Callable[[float], str] = two_decimals,
) -> bytes:
    """Heat maps below each other with one scale of colours, as PNG.

    Args:
        matrices: what to draw.
        x_label, y_label, value_label: the names of columns, rows and values.
        limits: where the colours end; what lies outside gets a colour of its own.
        colours: the name of a map of colours in matplotlib.
        numbers: how values are written into the cells, where there is room.
    """
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        rows = [len(matrix.rows) for matrix in matrices]
        heights = [0.55 + min(max(0.28 * n, 0.8), 2.6) for n in rows]
        figure, axes = _panels(heights, [])
        colour_map = matplotlib.colormaps[colours].with_extremes(bad="#eeeeee", under="#f4a6d7", over="#d7301f")
        for matrix, ax in zip(matrices, axes, strict=True):
            values = np.ma.masked_invalid(np.asarray(matrix.values, dtype=float))
            image = ax.imshow(
                values, cmap=colour_map, vmin=limits[0], vmax=limits[1], aspect="auto",
                interpolation="nearest",
            )  # fmt: skip
            ax.set_title(_short(matrix.title, LEGEND_LENGTH))
            _name_cells(ax, matrix)
            if _has_room(matrix):
                _number_cells(ax, image, values, numbers)
            ax.set_ylabel(y_label)
        axes[-1].set_xlabel(x_label)
        everything = np.concatenate([np.asarray(matrix.values, dtype=float).ravel() for matrix in matrices])
        bar = figure.colorbar(
            image, ax=list(axes), orientation="horizontal", extend=_extend(everything, limits), aspect=30, pad=0.02,
            ticks=MaxNLocator(5, steps=[1, 2, 5, 10]),
        )  # fmt: skip
        bar.set_label(value_label)
        return _png(figure)


def bar_chart(bars: Sequence[Bar], *, x_label: str) -> bytes:
    """Horizontal bars with their deviations, grouped, the values written beside them, as PNG."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    series = list(dict.fromkeys(bar.series for bar in bars))
    places: dict[tuple[str, str], float] = {}
    for bar in bars:
        places[bar.group, bar.series] = len(places) + 0.7 * groups.index(bar.group)
    finite = [bar.value + bar.deviation for bar in bars if math.isfinite(bar.value)]
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, (ax,) = _panels([LINE_HEIGHT * (len(bars) + 0.7 * len(groups))], series)
        for bar in bars:
            place, index = places[bar.group, bar.series], series.index(bar.series)
            ax.barh(place, bar.value, height=0.9, color=COLOURS[index % len(COLOURS)], hatch=_hatch(index), ec="white")
            ax.errorbar(bar.value, place, xerr=bar.deviation, color="#333333", linewidth=1, capsize=2)
            end = bar.value + bar.deviation if math.isfinite(bar.value) else 0.0
            text = f"{plain_number(bar.value)} ± {plain_number(bar.deviation)}"
            ax.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_xlim(0, 1.45 * max([*finite, 1e-12]))
        ax.set_yticks(
            [_middle(group, places) for group in groups], [_short(group, CELL_NAME_LENGTH) for group in groups]
        )
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlabel(x_label)
        patches = [Patch(fc=COLOURS[i % len(COLOURS)], hatch=_hatch(i), ec="white") for i in range(len(series))]
        _legend(figure, patches, series)
        return _png(figure)


def _panels(heights: Sequence[float], legend: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with room for panels of these heights in inches, for axis labels and for a legend."""
    rows = math.ceil(len(legend) / _legend_columns(legend)) if legend else 0
    height = sum(heights) + LINE_HEIGHT * (rows + 4)
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _draw_line(ax: Axes, line: Line, index: int, y_range: tuple[float, float] | None) -> None:
    colour = COLOURS[index % len(COLOURS)]
    y = [_clipped(value, y_range) for value in line.y]
    if line.low is not None and line.high is not None:
        low = [_clipped(value, y_range) for value in line.low]
        high = [_clipped(value, y_range) for value in line.high]
        ax.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0)
        for edge in (low, high):
            ax.plot(line.x, edge, color=colour, alpha=0.5, linewidth=0.6)
        if len(line.x) == 1:  # a band has no width at a single point
            ax.vlines(line.x, low, high, color=colour)
    for x, value in line.cloud:
        ax.plot(x, _clipped(value, y_range), ".", color=colour, alpha=0.35, markersize=3)
    ax.plot(line.x, y, color=colour, marker=MARKERS[index % len(MARKERS)])


def _clipped(value: float, limits: tuple[float, float] | None) -> float:
    return value if limits is None or math.isnan(value) else min(max(value, limits[0]), limits[1])


def _scale(ax: Axes, panel: Panel, log_x: bool, log_y: bool) -> None:
    positions = sorted({x for line in panel.lines for x in line.x})
    if log_x:
        ax.set_xscale("log")
        ax.set_xticks(positions, [f"{x:g}" for x in positions])
        ax.minorticks_off()
    elif all(float(x).is_integer() for x in positions):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if log_y:
        ax.set_yscale("log")
        ax.minorticks_off()
    else:
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    if len(positions) == 1 and not log_x:
        ax.set_xlim(positions[0] - 1, positions[0] + 1)
        ax.set_xticks(positions)


def _tick(value: float, _: int) -> str:
    return f"{value:g}".replace("-", "−")


def _percent_tick(value: float, _: int) -> str:
    return f"{100 * value:g} %".replace("-", "−")


def _handle(index: int) -> Line2D:
    return Line2D([], [], color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)])


def _hatch(index: int) -> str:
    return ("", "///", "...", "\\\\\\", "xxx", "---", "++")[index % 7]


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    short = _distinct([_short(label, LEGEND_LENGTH) for label in labels])
    columns = _legend_columns(labels)
    figure.legend(handles, short, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.0)


def _legend_columns(labels: Sequence[str]) -> int:
    longest = min(max(map(len, labels)), LEGEND_LENGTH)
    return max(1, min(len(labels), LEGEND_WIDTH // (longest + 6)))


def _short(label: str, length: int) -> str:
    """A label that fits; matplotlib leaves out labels that begin with an underscore."""
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
    length = CELL_NAME_LENGTH * (2 if any(PAIR in name for name in names) else 1)
    return _distinct([_short(name, length) for name in names])


def _has_room(matrix: Matrix) -> bool:
    return CELL_NUMBER_LENGTH * len(matrix.columns) + max(map(len, _cell_names(matrix.rows))) <= NUMBERED_LENGTH


def _number_cells(ax: Axes, image: Any, values: Any, numbers: Callable[[float], str]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if value is np.ma.masked or not math.isfinite(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        text_colour = "white" if dark else "black"
        ax.text(column, row, numbers(value), ha="center", va="center", fontsize=9, color=text_colour)


def _extend(values: Any, limits: tuple[float, float]) -> str:
    under, over = bool((values < limits[0]).any()), bool((values > limits[1]).any())
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[under, over]


def _middle(group: str, places: dict[tuple[str, str], float]) -> float:
    own = [place for (name, _), place in places.items() if name == group]
    return sum(own) / len(own)


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # names in scripts that the font lacks: the tables have them
        figure.savefig(picture, format="png", pil_kwargs={"optimize": True})
    return picture.getvalue()
