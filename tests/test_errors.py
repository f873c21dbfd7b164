"""Sentences for the terminal, in which names and values of other people's files can do no harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import run

from mergekit_slta.checks.examine import Findings
from mergekit_slta.errors import LONGEST, SltaError, as_note, printable
from mergekit_slta.output.verify import Verification
from mergekit_slta.tables import LONGEST_CELL, Table

CLEARS = "\x1b[2J\nall checks passed\r\u202e\ud800\x00"
CLEAR = r"\x1b[2J\nall checks passed\r\u202e\ud800\x00"


@pytest.mark.parametrize(
    "said",
    [
        str(SltaError(CLEARS)),
        as_note(CLEARS),
        str(Findings([CLEARS], [CLEARS])),
        str(Verification((CLEARS,), 1, (CLEARS,))),
        str(Table(["a", CLEARS], [[CLEARS, "1"]])),
    ],
    ids=["error", "note", "check", "verify", "table"],
)
def test_whatever_is_printed_escapes_what_moves_the_cursor_or_forges_a_line(said: str) -> None:
    assert CLEAR in said and not {*"\x1b\r\u202e\ud800\x00"} & {*said} and "\nall checks" not in said


@pytest.mark.parametrize("name", ["modèles 数学", "प्रमेय", "🧮", "a\u3000b", "e\u200dx"])
def test_names_of_any_script_stay_as_they_are(name: str) -> None:
    assert printable(name) == name


def test_a_long_value_loses_its_middle() -> None:
    said = str(SltaError(f"The name {'x' * 10**6} is wrong: give another."))
    assert len(said) <= LONGEST + 3 and said.startswith("The name xx") and said.endswith("xx is wrong: give another.")
    assert len(str(Table(["a"], [["x" * 10**6]]))) < 3 * LONGEST_CELL


def test_a_recipes_value_is_cut_and_escaped_in_messages_and_in_the_log(tmp_path: Path) -> None:
    recipe = {"merge_method": "slta", "base_model": "b", "models": [{"model": "c" + "\x1b[2J" + "d" * 10**5}]}
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe | {"parameters": {"ridge": "e" * 10**5}}))
    said = run("check", tmp_path / "recipe.yml", code=1).output
    assert "\x1b" not in said and len(said) < 4 * LONGEST
