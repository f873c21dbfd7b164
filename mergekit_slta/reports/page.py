"""Self-contained HTML pages with text, charts and the numbers behind each chart; the HTML is ``page.html.jinja``."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from matplotlib.figure import Figure

from mergekit_slta import __version__, files
from mergekit_slta.figures import drawn
from mergekit_slta.tables import Table


class Chart(NamedTuple):
    """A picture and the numbers that it is drawn from."""

    name: str  # of the picture's file, without ``.png``
    title: str  # what the picture shows, in a few words
    caption: str  # how to read it
    picture: Figure  # as SVG in the page and as PNG beside it
    table: Table  # of its numbers, which unfold below it


class Page(NamedTuple):
    """A page: its title, the sentences that it opens with, a table or charts, and facts about the measurement."""

    title: str
    verdict: Sequence[str]
    facts: Mapping[str, str]
    charts: Sequence[Chart] = ()
    table: Table | None = None

    def html(self) -> str:
        """The page as HTML. Jinja escapes every value, because names and paths come from other people's files."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("mergekit_slta.reports", "."),
            autoescape=True,
            trim_blocks=True,
            keep_trailing_newline=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters["svg"] = lambda figure: base64.b64encode(drawn(figure, "svg")).decode()
        return environment.get_template("page.html.jinja").render(page=self, version=__version__)

    def write(self, folder: Path, name: str) -> Path:
        """Write the page and every chart's picture into a folder; return the page's path."""
        for chart in self.charts:
            files.write(folder / f"{chart.name}.png", drawn(chart.picture))
        files.write(folder / name, self.html().encode())
        return folder / name
