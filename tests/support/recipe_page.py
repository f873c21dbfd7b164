"""The tables of the page of recipes, made from the settings classes of the merge methods.

python tests/support/recipe_page.py

writes them into docs/recipe.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergekit_slta.recipe.settings import SETTINGS, KeptBase, MethodSettings, Parameters

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipe.md"
HEAD = "| where | parameter | default | meaning |\n|---|---|---|---|\n"


def with_tables(page: str) -> str:
    """The page, with every method's table between its marks as the settings classes have it.

    Raises:
        ValueError: the page has no place for a method's table.
    """
    for method, settings in SETTINGS.items():
        begin, end = f"<!-- parameters of {method} -->", "<!-- end of parameters -->"
        before, found, after = page.partition(begin)
        if not found or end not in after:
            raise ValueError(
                f"docs/recipe.md has no place for the parameters of '{method}': write a section '## {method}', a "
                f"sentence on what it merges, and the marks {begin} and {end}; then run "
                "python tests/support/recipe_page.py."
            )
        table = HEAD + "".join(_rows(settings))
        page = f"{before}{begin}\n\n{table}\n{end}{after.split(end, 1)[1]}"
    return page


def _rows(settings: type[MethodSettings]) -> Iterator[str]:
    tables: list[tuple[str, type[Parameters]]] = [("expert", settings.expert), ("shared", settings)]
    if settings.runs_models:
        tables.insert(1, ("base model", KeptBase))
    rows: dict[tuple[str, str, str | None], list[str]] = {}  # a parameter of an expert may be the base model's too
    for where, table in tables:
        own = table.__annotations__  # the method's own parameters stand before those that it shares
        for name, field in sorted(table.model_fields.items(), key=lambda item: item[0] not in own):
            rows.setdefault((field.alias or name, _default(field.default), field.description), []).append(where)
    for (name, default, meaning), places in rows.items():
        yield f"| {', '.join(places)} | `{name}` | {default} | {meaning} |\n"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) and value else str(value)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
