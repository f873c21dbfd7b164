"""Pages: nothing from outside, everything escaped, files written whole."""

from __future__ import annotations

import base64
from pathlib import Path

from support.html_elements import Elements, assert_self_contained

from mergekit_slta.figures import Matrix, heat_map
from mergekit_slta.reports.page import Chart, Page
from mergekit_slta.tables import Table

PICTURE = heat_map([Matrix("", [[0.5]], ["a"], ["b"])], x_label="", y_label="", value_label="")
EVIL = "<script>alert('x')</script> & \"quotes\""


def page(text: str) -> Page:
    table = Table([text, text], [[text, text]])
    chart = Chart("chart", text, text, PICTURE, table)
    return Page(text, [text], {text: text}, [chart], table)


def test_everything_is_escaped() -> None:
    text = page(EVIL).html()
    assert_self_contained(text)
    # Two are attributes: the description and the alternative text.
    assert Elements(text).text.count(EVIL) == text.count("&lt;script&gt;") - 2
    assert [a["alt"] for tag, a in Elements(text).found if tag == "img"] == [f"{EVIL}; the numbers are below"]


def test_a_page_opens_with_its_verdict_and_names_every_table() -> None:
    elements = Elements(page("word").html())
    tags = [tag for tag, _ in elements.found]
    assert tags[tags.index("h1") + 1] == "p"
    assert ("html", {"lang": "en"}) in elements.found
    assert tags.count("details") == tags.count("summary") == tags.count("img") == 1
    assert all(attributes.get("scope") for tag, attributes in elements.found if tag == "th")


def test_pictures_are_in_the_page_and_beside_it(tmp_path: Path) -> None:
    path = page("word").write(tmp_path / "new", "report.html")
    assert (tmp_path / "new" / "chart.png").read_bytes() == PICTURE.png()
    assert f"data:image/svg+xml;base64,{base64.b64encode(PICTURE.svg()).decode()}" in path.read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == ["chart.png", "report.html"]
