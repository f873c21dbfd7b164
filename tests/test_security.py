"""What comes from somebody else is text or numbers: it names no file elsewhere, runs nothing, and commands no terminal.

docs/robustness.md says what the user sees of each, and which test holds it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from conftest import WriteRecipe
from mergekit.common import ModelReference
from support import synthetic
from support.copies import sharded
from support.families import Family

from mergekit_slta import files
from mergekit_slta.cli.commands import main
from mergekit_slta.engine.partial import Partial
from mergekit_slta.errors import SltaError, visible
from mergekit_slta.models.headers import folder_headers
from mergekit_slta.output import card
from mergekit_slta.slta.statistics import Statistics

NAMES = ["org/\x1b[31mred\x07", "org/x\nmerge_method: linear\u202e"]


@pytest.mark.parametrize("name", ["../base/model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_names_no_file_elsewhere(name: str, llama: Family, tmp_path: Path) -> None:
    sharded(llama.base, tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(SltaError, match=r"index.json cannot be read .*which is not in the model's folder"):
        folder_headers(tmp_path / "model")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Statistics whose models have names that a terminal or a recipe would obey."""
    synthetic.statistics(NAMES, ["layer"], layers=2).save(tmp_path / "stats.safetensors")
    return tmp_path / "stats.safetensors"


def said(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


def test_control_characters_are_shown(hostile: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    outputs = [said("solve", hostile), said("report", hostile, "-o", report)]
    outputs.append(said("solve", hostile, "--models", "nobody", code=1))
    for output in outputs:
        assert all(c.isprintable() or c in "\n\t" for c in output)
        assert "\\x1b[31mred\\x07" in output


def test_a_name_begins_no_line(tmp_path: Path) -> None:
    """A line break in a name would let a recipe or a file put sentences of its own into a refusal."""
    error = SltaError("Two\nlines\x1b.", "Another sentence.")
    assert error.format_message() == "Two\\nlines\\x1b.\nAnother sentence."
    recipe = tmp_path / "recipe.yml"
    content = {"merge_method": "slta\nNo problem found", "models": [{"model": "org/a\nb"}]}
    recipe.write_text(yaml.safe_dump(content))
    (line,) = said("check", recipe, code=1).splitlines()
    assert "'slta\\nNo problem found'" in line


def test_visible_text() -> None:
    assert visible("α → θ₀\n\t“x”") == "α → θ₀\n\t“x”"
    assert visible("a\x1b[0m\r\x85\u2028\u202e\ud800") == "a\\x1b[0m\\r\\x85\\u2028\\u202e\\ud800"
    assert visible("a\nb", kept="") == "a\\nb"


def test_a_name_ends_no_comment(hostile: Path, llama: Family) -> None:
    solution = Statistics.load(hostile).solve("layer")
    from mergekit_slta.slta.plain_recipe import _header

    header = _header(solution, {"edges": "base"})
    assert "merge_method: linear" in header
    assert yaml.safe_load(header) is None


def test_names_stay_code_in_a_card() -> None:
    reference = ModelReference.model_validate("/models/a`b|<script>\x1b")
    (shown,) = [card._linked(reference)]
    assert shown == "`a'b|<script>\\x1b`"


def test_cache_files_are_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        files.write(files.cache_folder() / "hashes" / "x.json", b"{}")
        partial = Partial(files.cache_folder() / "x.partial", {})
        partial.begin()
        files.write(tmp_path / "shared" / "x.json", b"{}")
    finally:
        os.umask(before)
    for path in [files.cache_folder(), *files.cache_folder().rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "shared" / "x.json").stat().st_mode) == 0o666


def test_an_eight_bit_checkpoint_is_refused(family: Family, write_recipe: WriteRecipe) -> None:
    """Codes without their scales, which would be read as weights."""
    from support.copies import edit_tensors

    name = "model.layers.1.mlp.gate_proj.weight"
    edit_tensors(family.experts[1], lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    output = said("check", write_recipe(family), code=1)
    assert f"{family.experts[1]} stores {name} in 8 bits or fewer, so it is quantized" in output
