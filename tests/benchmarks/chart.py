"""The charts of findings and the gallery, and the picture of least squares, drawn into docs/.

    python tests/benchmarks/chart.py

The scores in ``scores.json`` were printed by the commands that it names, as means and deviations. A method has the same
colour in all charts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mergekit_slta import files
from mergekit_slta.figures import AXIS, COLOURS, DOTS_PER_INCH, INK, STYLE, WIDTH, Line, Panel, drawn, line_chart

SCORES = Path(__file__).with_name("scores.json")
DOCS = Path(__file__).resolve().parents[2] / "docs"
BLUE, ORANGE, GREEN, PINK, _, SKY, _ = COLOURS
MERGES = {
    "experts": ("each expert alone", GREEN),
    "best": ("best of mergekit's", "#9a9a9a"),
    "slta": ("slta attn_mlp", PINK),
    "actmat": ("actmat", ORANGE),
    "featcal": ("featcal", BLUE),
}


def main() -> None:
    """Draw all pictures."""
    content = json.loads(SCORES.read_text())
    files.write(DOCS / "scores.png", drawn(scores_chart(content)))
    files.write(DOCS / "prompts.png", drawn(curves(content["prompts"])))
    files.write(DOCS / "figures" / "least-squares.png", drawn(least_squares()))


def curves(content: dict[str, Any]) -> Figure:
    """Accuracy of each merge in a band of its deviation, by the number of prompts."""
    scores = {label: {int(x): pair for x, pair in of.items()} for label, of in content["scores"].items()}
    means = [Line(label, [*of], [mean for mean, _ in of.values()]) for label, of in scores.items()]
    figure = line_chart([Panel("", means)], x_label=content["x"], y_label="accuracy", top=1.0)
    ax = figure.axes[0]
    for of, colour in zip(scores.values(), COLOURS, strict=False):
        low, high = ([mean + sign * deviation for mean, deviation in of.values()] for sign in (-1, 1))
        ax.fill_between([*of], low, high, color=colour, alpha=0.15)
    ax.set_ylim(0, 1)
    numbers = [*next(iter(scores.values()))]
    ax.set_xscale("log")
    ax.set_xticks(numbers, list(map(str, numbers)))
    ax.minorticks_off()
    return figure


def scores_chart(content: dict[str, Any]) -> Figure:
    """Accuracy of merges of three families, and what one merge with the base model keeps: four panels in a column."""
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(WIDTH, 9.0), dpi=DOTS_PER_INCH, layout="constrained")
        *merged, kept = figure.subplots(4, 1, height_ratios=(5, 5, 5, 8))
        for ax, group in zip(merged, content["merged"], strict=True):
            _merged(ax, group)
        _kept(kept, content["kept"])
        figure.legend(*kept.get_legend_handles_labels(), loc="outside lower left", ncols=2, handlelength=1)
        return figure


def _merged(ax: Axes, group: dict[str, Any]) -> None:
    labels, colours = zip(*MERGES.values(), strict=True)
    _bars(ax, range(len(labels)), [group["scores"][name] for name in MERGES], color=colours, height=0.7)
    ax.set_yticks(range(len(labels)), labels)
    _frame(ax, group)
    ax.set_xlabel("accuracy, mean of three tasks")


def _kept(ax: Axes, group: dict[str, Any]) -> None:
    colours = np.array([to_rgb(colour) for colour in (INK, GREEN, SKY, BLUE)])  # of the models, as in other charts
    for i, (label, strength) in enumerate((("accuracy on its task", 1.0), ("instructions followed", 0.4))):
        style: Any = {"color": 1 - strength * (1 - colours), "height": 0.34, "label": label}
        places = [row + 0.36 * (i - 0.5) for row in range(len(group["scores"]))]
        _bars(ax, places, [scores[i] for scores in group["scores"].values()], **style)
    ax.set_yticks(range(len(group["scores"])), list(group["scores"]))
    _frame(ax, group)
    ax.set_xlabel("share of the prompts")


def _bars(ax: Axes, places: Sequence[float], scores: list[dict[str, Any]], **style: Any) -> None:
    """Bars with their numbers, and with a line for the standard deviation where there is one."""
    deviations = [score.get("deviation", np.nan) for score in scores]
    lines = {"elinewidth": 1, "capsize": 3}
    bars = ax.barh(places, [score["mean"] for score in scores], xerr=deviations, error_kw=lines, **style)
    said = [
        _number(score["mean"])
        + (f" ± {_number(score['deviation'])}" if "deviation" in score else "")
        + score.get("note", "")
        for score in scores
    ]
    ax.bar_label(bars, said, padding=5, fontsize=9)


def _frame(ax: Axes, group: dict[str, Any]) -> None:
    ax.set_title(f"{group['family']}\n{group['detail']}", x=-0.44)
    ax.set_xlim(0, 1.5)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()


def _number(value: float) -> str:
    return f"{value + 1e-9:.2f}"  # a half rounds up


def least_squares() -> Figure:
    """Two experts' versions of a matrix with one row of two numbers, weighted sums of them, and the least squares."""
    base, first, second = np.array([0.0, 0.0]), np.array([2.2, 0.7]), np.array([0.9, 2.3])
    inputs = np.array([first, second])  # what each expert's prompts give the matrix; a fine-tune moves along its inputs
    solved = np.linalg.solve(inputs, [inputs[0] @ first, inputs[1] @ second])
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(WIDTH, 4.8), dpi=DOTS_PER_INCH, layout="constrained")
        ax: Any = figure.subplots()
        for expert, across, colour, name in ((first, inputs[0], BLUE, "A"), (second, inputs[1], ORANGE, "B")):
            along = np.array([-across[1], across[0]]) / np.linalg.norm(across)
            ends = np.array([expert + length * along for length in (-4, 4)])
            ax.plot(*ends.T, color=colour, label=f"answers expert {name}'s prompts as expert {name} does")
            ax.annotate("", expert, base, arrowprops={"arrowstyle": "->", "color": colour, "linestyle": "--"})
            ax.plot(*expert, "o", color=colour, markersize=8)
            ax.annotate(f"expert {name}", expert, (8, -4), textcoords="offset points")
        sums = np.array([first, (first + second) / 2, second])
        ax.plot(*sums.T, ":", color=AXIS, label="weighted averages of the experts")
        ax.plot([], [], "--", color=AXIS, label="the change that fine-tuning made")
        ax.plot(*base, "o", color=INK, markersize=8)
        ax.annotate("base model", base, (8, -12), textcoords="offset points")
        ax.plot(*solved, "*", color=GREEN, markersize=16, label="least squares: answers both")
        ax.set(xlim=(-0.4, 3.4), ylim=(-0.5, 2.9), aspect="equal", xticks=[], yticks=[])
        ax.set(xlabel="first number of the matrix", ylabel="second number of the matrix")
        figure.legend(loc="outside upper left", fontsize=9)
        return figure


if __name__ == "__main__":
    main()
