"""Sentences for the terminal: names and values of other people's files do no harm, and a lack of memory is said."""

from pathlib import Path
from unittest import mock

import pytest
from support import families, memory
from support.calibration_samples import write_jsonl
from support.command import run
from support.families import Family

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


@pytest.mark.parametrize(
    ("command", "where"),
    [("ask", "transformers.LlamaForCausalLM.from_pretrained"), ("merge", "mergekit_slta.host.methods.merged_vector")],
)
def test_a_lack_of_memory_is_said_and_blames_no_file(
    command: str, where: str, llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, mock.Mock(side_effect=memory.torch_without_memory()))
    recipe = families.write_recipe(tmp_path / "recipe.yml", families.recipe(llama, "actmat", calibration=False))
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    arguments: dict[str, list[object]] = {
        "ask": [llama.base, prompts, "--max-new-tokens", 2, "-o", tmp_path / "answers.jsonl"],
        "merge": [recipe, tmp_path / "out"],
    }
    said = run(command, *arguments[command], "--quiet", code=3).output.splitlines()[-1]
    assert said.startswith("Error: Memory ran out ([enforce fail at") and "merge fewer experts" in said
