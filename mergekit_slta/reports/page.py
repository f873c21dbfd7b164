"""Self-contained HTML pages with text, charts and the numbers behind each chart, and an index of a folder's pages.

The HTML is in ``page.html.jinja`` and ``index.html.jinja``, which share ``frame.html.jinja``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2

from mergekit_slta import __version__, files
from mergekit_slta.reports.figures import Picture
from mergekit_slta.tables import Table

GENERATOR = "mergekit-slta"
INDEX = "index.html"


@dataclass(frozen=True)
class Chart:
    """A picture and the numbers that it is drawn from.

    Attributes:
        name: the picture's file name without ``.png``.
        title: what the picture shows, in a few words.
        caption: how to read the picture.
        alt: the picture's content, for readers who cannot see it.
        picture: the picture, as SVG in the page and as PNG beside it.
        table: the numbers in the picture.
    """

    name: str
    title: str
    caption: str
    alt: str
    picture: Picture
    table: Table


@dataclass(frozen=True)
class Section:
    """A part of the page. Its own table is always visible; the tables of its charts unfold."""

    title: str
    paragraphs: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Page:
    """A page: its title, the sentences that it opens with, its sections, and facts about the measurement."""

    title: str
    verdict: Sequence[str]
    facts: Mapping[str, str]
    sections: Sequence[Section]

    def html(self) -> str:
        """The page as HTML."""
        return _rendered("page.html.jinja", page=self)

    def write(self, folder: Path, name: str) -> Path:
        """Write the page and every chart's picture into a folder, and its index if it has other pages.

        Returns:
            The page's path.
        """
        for chart in (chart for section in self.sections for chart in section.charts):
            files.write(folder / f"{chart.name}.png", chart.picture.png())
        files.write(folder / name, self.html().encode())
        _write_index(folder)
        return folder / name


class _Heading(HTMLParser):
    """What the index says of a page: its title and its first sentence; both are empty if the page is not ours."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title = self.sentence = self._tag = ""
        self._is_ours = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._tag = tag
        self._is_ours |= given.get("name") == "generator" and given.get("content") == GENERATOR
        if self._is_ours and given.get("name") == "description":
            self.sentence = given.get("content") or ""

    def handle_data(self, data: str) -> None:
        if self._tag == "title" and self._is_ours:
            self.title += data

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


def _write_index(folder: Path) -> None:
    """Write a page with links to all pages of a folder, unless there is only one."""
    found = {path.name: _Heading(path.read_text("utf-8", "replace")) for path in sorted(folder.glob("*.html"))}
    pages = {name: heading for name, heading in found.items() if heading.title and name != INDEX}
    if len(pages) > 1:
        files.write(folder / INDEX, _rendered("index.html.jinja", pages=pages).encode())


def _rendered(template: str, **values: Any) -> str:
    """A template as HTML. Jinja escapes every value, because names and paths come from other people's files."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mergekit_slta.reports", "."),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template(template).render(generator=GENERATOR, version=__version__, **values)
