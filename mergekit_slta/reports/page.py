"""One self-contained HTML page: text, charts and the table behind each chart, with nothing to fetch from elsewhere."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergekit_slta import __version__, files


def percent(share: float) -> str:
    """A share as a whole percentage; what rounding would make complete is not called complete."""
    if math.isnan(share):
        return "–"
    if 0.995 <= share < 1:
        return "over 99 %"
    return f"{round(100 * share)} %".replace("-", "−")


def plain_number(number: float) -> str:
    """A number with three significant digits."""
    return "–" if math.isnan(number) else f"{number:.3g}".replace("-", "−")


def enumerated(words: Sequence[str]) -> str:
    """Words with commas, and "and" before the last."""
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


@dataclass(frozen=True)
class Table:
    """A table: the first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """The table as text, the first column to the left and the others to the right."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        names = [line[0].ljust(widths[0]) for line in lines]
        return "\n".join("  ".join([name, *line[1:]]).rstrip() for name, line in zip(names, cells, strict=True))


@dataclass(frozen=True)
class Chart:
    """A picture and what it is drawn from.

    Attributes:
        name: the file's name without ``.png``.
        title: what it shows, in a few words.
        caption: how to read it.
        alt: what it says, for those who cannot see it.
        png: the picture.
        table: its numbers.
    """

    name: str
    title: str
    caption: str
    alt: str
    png: bytes
    table: Table


@dataclass(frozen=True)
class Section:
    """A part of the page; a table here stands open."""

    title: str
    paragraphs: Sequence[str]
    charts: Sequence[Chart] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Page:
    """A page: its title, what it says first, some facts, and the rest."""

    title: str
    verdict: Sequence[str]
    facts: Mapping[str, str]
    sections: Sequence[Section]

    def html(self) -> str:
        """The page as HTML; everything that comes from elsewhere is escaped."""
        verdict = "".join(f'<p class="verdict">{_text(sentence)}</p>\n' for sentence in self.verdict)
        facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in self.facts.items())
        sections = "".join(_section(section) for section in self.sections)
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{_HEAD}<title>{_text(self.title)}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{_text(self.title)}</h1>\n{verdict}"
            f'{sections}<section>\n<h2>What was measured</h2>\n<dl class="facts">\n{facts}</dl>\n</section>\n</main>\n'
            f"<footer>Written by mergekit-slta {_text(__version__)}</footer>\n</body>\n</html>\n"
        )

    def write(self, folder: Path, name: str) -> Path:
        """Write the page and every chart's picture into a folder; returns the page's path."""
        for chart in (chart for section in self.sections for chart in section.charts):
            files.write(folder / f"{chart.name}.png", chart.png)
        files.write(folder / name, self.html().encode())
        return folder / name


_HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
"""

_STYLE = """
:root { color: #1a1a1a; background: #ffffff; font: 16px/1.5 system-ui, "Segoe UI", Roboto, Arial, sans-serif; }
body { margin: 0; }
main, footer { max-width: 1120px; margin: 0 auto; padding: 0 16px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 1.2rem 0 0.6rem; }
h2 { font-size: 1.25rem; margin: 2rem 0 0.4rem; border-top: 1px solid #d0d0d0; padding-top: 1rem; }
h3 { font-size: 1.05rem; margin: 0 0 0.3rem; }
h1, h2, h3, p, dd, figcaption { overflow-wrap: anywhere; }
p { margin: 0.4rem 0; max-width: 75ch; }
.verdict { font-size: 1.1rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 28px 32px; }
figure { margin: 0.8rem 0 0; min-width: 0; }
figure img { display: block; width: 100%; max-width: 520px; height: auto; }
figcaption { font-size: 0.9rem; color: #444444; max-width: 65ch; margin-bottom: 0.4rem; }
details { margin-top: 0.4rem; }
summary { cursor: pointer; color: #00558a; }
.table { overflow: auto; max-height: 26rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 10px 2px 0; text-align: right; white-space: nowrap; }
th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid #888888; position: sticky; top: 0; background: #ffffff; }
tbody th { font-weight: 400; }
.open td, .open th { text-align: left; white-space: normal; }
.facts { display: grid; grid-template-columns: minmax(7rem, auto) 1fr; gap: 2px 16px; font-size: 0.9rem; }
.facts dt { color: #444444; }
.facts dd { margin: 0; }
footer { color: #444444; font-size: 0.85rem; padding: 2rem 16px; }
@media print {
  figure, table { break-inside: avoid; }
  .table { max-height: none; overflow: visible; }
  h2 { break-after: avoid; }
}
"""


def _section(section: Section) -> str:
    paragraphs = "".join(f"<p>{_text(paragraph)}</p>\n" for paragraph in section.paragraphs)
    table = f'<div class="table open" tabindex="0">{_table(section.table)}</div>\n' if section.table else ""
    charts = "".join(_chart(chart) for chart in section.charts)
    grid = f'<div class="charts">\n{charts}</div>\n' if charts else ""
    return f"<section>\n<h2>{_text(section.title)}</h2>\n{paragraphs}{table}{grid}</section>\n"


def _chart(chart: Chart) -> str:
    picture = base64.b64encode(chart.png).decode()
    return (
        f"<figure>\n<h3>{_text(chart.title)}</h3>\n<figcaption>{_text(chart.caption)}</figcaption>\n"
        f'<img src="data:image/png;base64,{picture}" alt="{_text(chart.alt)}">\n'
        f'<details><summary>Numbers: {_text(chart.title)}</summary>\n<div class="table" tabindex="0">'
        f"{_table(chart.table)}</div></details>\n</figure>\n"
    )


def _table(table: Table) -> str:
    header = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.header)
    rows = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in table.rows
    )
    return f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
