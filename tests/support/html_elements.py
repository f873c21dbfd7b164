"""The elements of an HTML page, and the proof that a page needs nothing from outside."""

import re
from html.parser import HTMLParser

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
    """No element fetches anything: every source is in the page or a link to one beside it, and there is no script."""
    page = Elements(text)
    assert not page.open
    assert not {"script", "iframe", "object", "base", "form"} & {tag for tag, _ in page.found}
    for tag, attributes in page.found:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "srcset", "data", "poster", "action"):
                assert value is not None and value.startswith("data:"), (tag, name)
    assert not re.search(r"url\(|@import|://", text)
