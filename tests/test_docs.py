"""The documentation against the code: what exists is documented, what is documented exists, no link is dead."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from support import pages
from test_public_names import PROMISED

from mergekit_slta.cli.commands import main
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SETTINGS, parameter_specs

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
PARAMETERS = {spec.name for settings in SETTINGS.values() for spec in parameter_specs(settings)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", TEXTS)


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(text) if found == language]


def code(text: str) -> Iterator[str]:
    """The lines in code blocks, and the code in the text around them."""
    for _, body in FENCE.findall(text):
        yield from body.replace("\\\n", " ").splitlines()  # a command may go on in the next line
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)))


def calls(text: str) -> Iterator[list[str]]:
    """The words of every call of ``mergekit-slta`` or ``python -m mergekit_slta``, from the command on."""
    for line in code(text):
        if found := re.match(r"(?:mergekit-slta|(?:torchrun|python) .*?-m mergekit_slta) (.+)", line):
            yield shlex.split(found[1], comments=True)


def options_of(command: click.Command) -> set[str]:
    options = [option for option in command.get_params(click.Context(command)) if isinstance(option, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("page", ["commands.md", "recipe.md"])
def test_the_pages_of_commands_and_recipes_are_what_the_code_says(page: str) -> None:
    assert TEXTS[page] == pages.made(page), "run python tests/support/pages.py"


@each_page
def test_every_call_in_the_docs_has_a_command_and_options_that_exist(page: str) -> None:
    for first, *rest in calls(TEXTS[page]):
        if first.startswith("-") or first == "COMMAND":
            continue
        assert first in main.commands, first
        given = {word for word in rest if word.startswith("-")}
        assert given <= options_of(main.commands[first]) | {"--help"}, (first, rest)


@each_page
def test_every_recipe_in_the_docs_is_sound_and_every_part_of_one_names_parameters(page: str) -> None:
    for block in blocks(TEXTS[page], "yaml"):
        content = yaml.safe_load(block)
        if "merge_method" in content:
            Recipe.parse(block, page).require_sound()
        else:
            assert set(content) <= PARAMETERS


def test_the_home_page_has_the_readmes_table_of_results() -> None:
    first = TEXTS["README.md"].split("| | accuracy | needs |\n")[1].split("\n\n")[0]
    assert first in TEXTS["index.md"]


def test_the_pages_name_the_versions_that_pip_takes() -> None:
    needed = dict(re.findall(r'"(mergekit|torch|transformers)>=([^"]+)"', (ROOT / "pyproject.toml").read_text()))
    first = {name: versions.partition(",")[0] for name, versions in needed.items()}
    below = {name: versions.partition("<")[2].split(".") for name, versions in needed.items()}
    newest = {name: f"{major}.{int(minor) - 1}" for name, (major, minor, *_) in below.items()}
    for page in ("README.md", "install.md"):
        words = " ".join(TEXTS[page].split())
        assert f"mergekit {first['mergekit']}, " in words
        assert f"transformers {first['transformers']} to {newest['transformers']}" in words
    assert f"PyTorch {first['torch']} to {newest['torch']}" in " ".join(TEXTS["install.md"].split())


def test_the_messages_in_troubleshooting_exist() -> None:
    """The parts between what varies, in the code's strings, whatever its lines."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "mergekit_slta").rglob("*.py")))
    strings = re.sub(r'"\s+f?"', "", sources)
    rows = re.findall(r"^\| `+(.+?)`+ \|", TEXTS["troubleshooting.md"], re.MULTILINE)
    assert rows
    for row in rows:
        for part in re.split(r"[…'(){}:]+", row):
            assert part.strip(" :;.,") in strings, part


@each_page
def test_python_in_the_docs_uses_public_names(page: str) -> None:
    for block in blocks(TEXTS[page], "python"):
        tree = ast.parse(block)
        used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        assert {node.attr for node in used if ast.unparse(node.value) == "slta"} <= set(PROMISED)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_relative_links_lead_to_files_and_headings(page: str) -> None:
    folder = ROOT if page == "README.md" else DOCS
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", TEXTS[page])):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        path = folder / name if name else folder / page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@each_page
def test_files_of_the_repository_that_are_named_exist(page: str) -> None:
    folders = ("mergekit_slta/**", "tests/**", "examples/**", ".")  # not those of environments
    files = [path.as_posix() for folder in folders for path in ROOT.glob(f"{folder}/*.py")]
    for span in code(TEXTS[page]):
        for name in re.findall(r"(?<![\w/.])[\w/]+\.py\b", span):
            assert name.startswith("mergekit/") or any(file.endswith(f"/{name}") for file in files), name
        for name in re.findall(r"(?<![\w/.])(?:tests|examples|mergekit_slta|docs)/[\w/.-]*\w", span):
            assert (ROOT / name).exists(), name
