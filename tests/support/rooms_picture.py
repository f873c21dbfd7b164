"""docs/rooms.svg, the rooms and their imports: run ``python tests/support/rooms_picture.py`` to write it.

Graphviz's ``dot`` draws the picture (apt-get install graphviz).
"""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from test_rooms import FLOOR, FLOORS, PACKAGE, imported_rooms, room_of

PICTURE = Path(__file__).parents[2] / "docs" / "rooms.svg"
LEAVES = ("errors", "files", "levels", "tables")  # for every room; their arrows would hide the others
WORDS = {
    "cli": "the command",
    "host": "what mergekit calls",
    "output": "card, verify, publish",
    "checks": "what is wrong with a recipe",
    "reports": "figures, tables, pages",
    "featcal": "every map by least squares",
    "nonlinearity": "how linear the models are",
    "slta": "Gram matrices to merging weights",
    "comparison": "models side by side",
    "recipe": "a recipe, opened once",
    "engine": "hidden states through layers, resumable, shared",
    "layers": "one decoder layer and its parts",
    "sftm": "singular features",
    "actmat": "task vectors' Gram matrices",
    "models": "a model on disk or Hub",
    "data": "records to token ids",
}

Arrows = set[tuple[str, str]]


def arrows() -> Arrows:
    """The imports between rooms, without those that a way over other rooms makes too, so that they can be drawn."""
    below: dict[str, set[str]] = {room: set() for room in WORDS}
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        if room in below:
            found = {target for _, target in imported_rooms(ast.parse(path.read_text(encoding="utf-8")))}
            below[room] |= found & set(below) - {room}
    reach: dict[str, set[str]] = {}
    for room in sorted(below, key=lambda room: -FLOOR[room]):
        reach[room] = below[room].union(*(reach[target] for target in below[room]))
    return {
        (room, target)
        for room, targets in below.items()
        for target in targets
        if not any(target in reach[other] for other in targets)
    }


def drawn(svg: str) -> tuple[set[str], Arrows]:
    """The rooms and the arrows of a picture, from the titles that Graphviz gives them."""
    titles = {html.unescape(title) for title in re.findall(r"<title>(.+?)</title>", svg)} - {"house"}
    pairs = [title.split("->") for title in titles if "->" in title]
    return {title for title in titles if "->" not in title}, {(room, target) for room, target in pairs}


def source() -> str:
    """The picture in Graphviz's language."""
    lines = [
        "digraph house {",
        'graph [bgcolor="white", nodesep=0.25, ranksep=0.35, fontname="DejaVu Sans"]',
        'node [shape=box, style="rounded,filled", fillcolor="#eef4fb", color="#0072b2", fontname="DejaVu Sans", '
        "fontsize=11, margin=0.12]",
        'edge [color="#555555", arrowsize=0.6]',
    ]
    for room, words in WORDS.items():
        lines.append(f'{room} [label=<<b>{room}</b><br/><font point-size="9">{html.escape(words)}</font>>]')
    lines.append(f'leaves [label="{", ".join(LEAVES)}: for every room", fillcolor="#f4f4f4", color="#555555"]')
    lines.append("{models; data} -> leaves [style=invis]")
    for floor in FLOORS:
        rooms = [room for room in floor if room in WORDS]
        lines += [f"{{rank=same; {'; '.join(rooms)}}}"] if len(rooms) > 1 else []
    return "\n".join([*lines, *(f"{room} -> {target}" for room, target in sorted(arrows())), "}"])


if __name__ == "__main__":
    svg = subprocess.run(["dot", "-Tsvg"], input=source(), capture_output=True, text=True, check=True).stdout
    PICTURE.write_text(svg, encoding="utf-8")
