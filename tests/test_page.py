"""Pages: nothing from outside, everything escaped, files written whole."""

from __future__ import annotations

import base64
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mergekit_slta.page import Chart, Page, Section, Table, enumerated, percent, plain_number

EVIL = "<script>alert('x')</script> & \"quotes\""
VOID = {"meta", "link", "img"}


class Elements(HTMLParser):
    """Every element with its attributes, and whether all of them are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_self_contained(text: str) -> None:
    """No element fetches anything: every source is in the page, and there is no script."""
    page = Elements(text)
    assert not page.open
    assert not {"script", "iframe", "object", "base", "form"} & {tag for tag, _ in page.found}
    for tag, attributes in page.found:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "srcset", "data", "poster", "action"):
                assert value is not None and value.startswith("data:"), (tag, name)
    assert not re.search(r"url\(|@import|://", text)


def page(text: str) -> Page:
    table = Table([text, text], [[text, text]])
    chart = Chart("chart", text, text, text, b"\x89PNG", table)
    return Page(text, [text], {text: text}, [Section(text, [text], [chart], table)])


def test_everything_is_escaped() -> None:
    text = page(EVIL).html()
    assert_self_contained(text)
    assert Elements(text).text.count(EVIL) == text.count("&lt;script&gt;") - 1  # one is the picture's alternative text
    assert [a["alt"] for tag, a in Elements(text).found if tag == "img"] == [EVIL]


def test_a_page_opens_with_its_verdict_and_names_every_table() -> None:
    elements = Elements(page("word").html())
    tags = [tag for tag, _ in elements.found]
    assert tags[tags.index("h1") + 1] == "p"
    assert ("html", {"lang": "en"}) in elements.found
    assert tags.count("details") == tags.count("summary") == tags.count("img") == 1
    assert all(attributes.get("scope") for tag, attributes in elements.found if tag == "th")


def test_pictures_are_in_the_page_and_beside_it(tmp_path: Path) -> None:
    path = page("word").write(tmp_path / "new", "report.html")
    assert (tmp_path / "new" / "chart.png").read_bytes() == b"\x89PNG"
    assert base64.b64encode(b"\x89PNG").decode() in path.read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == ["chart.png", "report.html"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.914, "91 %"), (1.0, "100 %"), (0.997, "over 99 %"), (0.0, "0 %"), (-0.002, "0 %"), (-0.12, "−12 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_numbers_and_lists() -> None:
    assert [plain_number(number) for number in (0.12345, -3.0, 1234.5, math.nan)] == ["0.123", "−3", "1.23e+03", "–"]
    assert [enumerated(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_a_table_as_text_is_aligned() -> None:
    lines = str(Table(["name", "n"], [["a", "1"], ["long name", "100"]])).splitlines()
    assert lines == ["name         n", "a            1", "long name  100"]
