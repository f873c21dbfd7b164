"""Every message of the package that a user may meet, as the page on troubleshooting has to have it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROW = re.compile(r"^\| (`.+?`) \|", re.MULTILINE)  # the first cell, which may hold several messages

# What these functions are given is a message, or a part of one, also where it is no sentence.
REFUSE_OR_WARN = {
    "SltaError", "_BrokenFile", "BadParameter", "LOG.warning", "LOG.error", "LOG.log", "warn", "reading", "files_named",
}  # fmt: skip
# What these are given is said when all is well.
SAY = {"LOG.info", "LOG.debug", "_say"}
# Functions that describe a result, and arguments that describe a command.
DESCRIBE = {"__str__", "__repr__", "_header", "help", "short_help", "metavar"}


def page_messages(page: str) -> list[str]:
    """The messages in the tables of a page; … stands for what differs, and at the end also for the rest."""
    return [message for cell in ROW.findall(page) for message in re.findall(r"`([^`]+)`", cell.replace(r"\|", "|"))]


def package_messages(package: Path) -> Iterator[str]:
    """The messages of the package's modules, with … for what is put into them.

    A message is every sentence, and whatever an error or a warning is made with. The reports' pages, docstrings and
    what describes a class, an option or a result are none.
    """
    for path in package.rglob("*.py"):
        if package / "reports" not in path.parents:
            yield from _messages(ast.parse(path.read_text(encoding="utf-8")), certain=False)


def is_on(messages: list[str], message: str) -> bool:
    """Whether a page has a message: whole or from a colon on, its beginning and …, or around it if it is a fragment."""
    pattern = ".*".join(map(re.escape, message.split("…")))
    found = re.compile(f"(.*: )?{pattern}").fullmatch if re.match(r"[A-Z'…-]", message) else re.compile(pattern).search
    return any(found(shown) or (shown.endswith("…") and message.startswith(shown.rstrip("… "))) for shown in messages)


def _messages(node: ast.AST, certain: bool) -> Iterator[str]:
    """The messages in a syntax tree, every string of which is one if that is certain."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in SAY:
            return
        certain = certain or name.rpartition("click.")[2] in REFUSE_OR_WARN
    if (text := string(node)) is not None:
        words = len(re.findall(r"[A-Za-z]{2,}", text))
        if " " in text.strip() and words >= (1 if certain else 2) and (certain or text.endswith((".", "?"))):
            yield text
        if isinstance(node, ast.Constant):
            return
    for part in ast.iter_child_nodes(node):
        if not _describes(node, part):
            yield from _messages(part, certain)


def _describes(node: ast.AST, part: ast.AST) -> bool:
    """Whether a part of a syntax tree only describes the rest, or has been read with it."""
    if isinstance(node, ast.JoinedStr):
        return isinstance(part, ast.Constant)
    if isinstance(node, ast.ClassDef) and isinstance(part, (ast.Assign, ast.AnnAssign)):
        return True
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and part in node.decorator_list:
        return True
    if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
        return True
    return getattr(part, "name", getattr(part, "arg", None)) in DESCRIBE


def string(node: ast.AST) -> str | None:
    """A string of a syntax tree, with … for what is put into it; None for another node."""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return None
    return re.sub("…+", "…", re.sub(r"%[\d.]*[sdrgf]\b|\{\w+\}", "…", text)).lstrip("\n")
