"""Pages: nothing from outside, everything escaped, files written whole."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import pytest
from support.html_elements import Elements, assert_self_contained

from mergekit_slta.reports.page import Chart, Page, Section, Table, enumerated, percent, plain_number

EVIL = "<script>alert('x')</script> & \"quotes\""


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
