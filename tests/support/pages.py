"""The parts of docs/ that are made of the code: the page of commands, and the tables of the page of recipes.

python tests/support/pages.py

writes them.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from mergekit_slta.cli.commands import main
from mergekit_slta.cli.options import MODEL_OPTIONS, ModelCommand
from mergekit_slta.recipe.settings import SETTINGS, KeptBase, MethodSettings, Parameters

DOCS = Path(__file__).resolve().parents[2] / "docs"


def made(name: str) -> str:
    """What a page should be: all of ``commands.md``, and ``recipe.md`` with the tables of all methods."""
    if name == "commands.md":
        return _commands()
    tables = {f"parameters of {method}": "".join(_parameters(settings)) for method, settings in SETTINGS.items()}
    return filled(name, tables)


def filled(name: str, parts: Mapping[str, str]) -> str:
    """A page with other parts, each between the comments with its name and with ``end of`` and its first word.

    Raises:
        ValueError: the page has no place for a part.
    """
    page = (DOCS / name).read_text(encoding="utf-8")
    for part, text in parts.items():
        begin, end = f"<!-- {part} -->", f"<!-- end of {part.split()[0]} -->"
        before, found, after = page.partition(begin)
        if not found or end not in after:
            raise ValueError(f"docs/{name} has no place for {part}: write the comments {begin} and {end} there.")
        page = f"{before}{begin}\n\n{text.strip()}\n\n{end}{after.split(end, 1)[1]}"
    return page


# Commands


def _commands() -> str:
    said = "as `mergekit-slta --help` and `mergekit-slta COMMAND --help` show them."
    parts = [f"# Commands\n\nEvery command and option, {said}", _text(main)]
    rows = "\n".join(f"| [`{name}`](#{name}) | {command.short_help} |" for name, command in main.commands.items())
    parts.append(f"| command | what it does |\n|---|---|\n{rows}")
    for name, command in main.commands.items():
        context = click.Context(command, info_name=f"mergekit-slta {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        parts += [f"## {name}", f"`{' '.join(usage.split())}`", _text(command)]
        more = "\n| [options for models](#options-for-models) | where to compute, how to get models |"
        more *= isinstance(command, ModelCommand)
        more += "\n| options of `mergekit-yaml --help` | how to merge and to write |" * (name == "merge")
        parts.append(_options(option for option in command.params if isinstance(option, click.Option)) + more)
    return "\n\n".join([*parts, "## Options for models", "These are mergekit's own.", _options(MODEL_OPTIONS)]) + "\n"


def _text(command: click.Command) -> str:
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.replace("<", "&lt;").split()) for paragraph in paragraphs)


def _options(options: Iterable[click.Option]) -> str:
    rows = []
    for option in options:
        record = option.get_help_record(click.Context(main))
        assert record is not None, option.name
        # | parts cells, and the range of a number in brackets would be a link
        names, meaning = (" ".join(cell.replace("|", " or ").replace("[x", r"\[x").split()) for cell in record)
        rows.append(f"| `{names}` | {meaning} |")
    return "\n".join(["| option | meaning |", "|---|---|", *rows])


# Parameters


def _parameters(settings: type[MethodSettings]) -> Iterator[str]:
    tables: list[tuple[str, type[Parameters]]] = [("expert", settings.expert), ("shared", settings)]
    if settings.runs_models:
        tables.insert(1, ("base model", KeptBase))
    rows: dict[tuple[str, str, str | None], list[str]] = {}  # a parameter of an expert may be the base model's too
    for where, table in tables:
        own = table.__annotations__  # the method's own parameters stand before those that it shares
        for name, field in sorted(table.model_fields.items(), key=lambda item: item[0] not in own):
            rows.setdefault((field.alias or name, _default(field.default), field.description), []).append(where)
    yield "| where | parameter | default | meaning |\n|---|---|---|---|\n"
    for (name, default, meaning), places in rows.items():
        yield f"| {', '.join(places)} | `{name}` | {default} | {meaning} |\n"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) and value else str(value)


if __name__ == "__main__":
    for page in ("commands.md", "recipe.md"):
        (DOCS / page).write_text(made(page), encoding="utf-8")
