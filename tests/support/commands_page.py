"""The page of commands, made from what the commands say about themselves.

python tests/support/commands_page.py

writes docs/commands.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import click

from mergekit_slta.cli.commands import main
from mergekit_slta.cli.options import MODEL_OPTIONS, ModelCommand

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
INTRODUCTION = """\
# Commands

Every command and option, as `mergekit-slta --help` and `mergekit-slta COMMAND --help` show them."""

MERGE_ONLY = "\n| options of `mergekit-yaml --help` | how to merge and to write |"


def commands_page() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION, _text(main)]
    rows = "\n".join(f"| [`{name}`](#{name}) | {command.short_help} |" for name, command in main.commands.items())
    parts.append(f"| command | what it does |\n|---|---|\n{rows}")
    for name, command in main.commands.items():
        context = click.Context(command, info_name=f"mergekit-slta {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        parts += [f"## {name}", f"`{' '.join(usage.split())}`", _text(command)]
        others = "\n| [options for models](#options-for-models) | where to compute, how to get models |"
        more = others * isinstance(command, ModelCommand) + MERGE_ONLY * (name == "merge")
        parts.append(_table(option for option in command.params if isinstance(option, click.Option)) + more)
    parts += [
        "## Options for models",
        "These are mergekit's own.",
        _table(MODEL_OPTIONS),
    ]
    return "\n\n".join(parts) + "\n"


def _text(command: click.Command) -> str:
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.replace("<", "&lt;").split()) for paragraph in paragraphs)


def _table(options: Iterable[click.Option]) -> str:
    rows = []
    for option in options:
        record = option.get_help_record(click.Context(main))
        assert record is not None, option.name
        # | parts cells, and the range of a number in brackets would be a link
        names, meaning = (" ".join(cell.replace("|", " or ").replace("[x", r"\[x").split()) for cell in record)
        rows.append(f"| `{names}` | {meaning} |")
    return "\n".join(["| option | meaning |", "|---|---|", *rows])


if __name__ == "__main__":
    PAGE.write_text(commands_page(), encoding="utf-8")
