"""The base model's files beside its weights that mergekit leaves behind."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support import families
from support.examining import edit_config
from support.families import Family
from support.hub import serve

TEMPLATES = ("chat_template.jinja", "additional_chat_templates/rag.jinja", "tekken.json")
OTHERS = ("audio_tokenizer_config.json", "preprocessor_config.json", "modeling_own.py", "helper.py")
GENERATION = "generation_config.json"


@pytest.fixture
def recipe(family: Family) -> dict[str, Any]:
    """A recipe whose base model has all kinds of files, and code of its own."""
    (family.base / "additional_chat_templates").mkdir()
    for name in (*TEMPLATES, *OTHERS):
        (family.base / name).write_text("{}")
    (family.base / GENERATION).write_text('{"eos_token_id": [2, 5]}')
    (family.base / "notes.json").write_text("{}")
    edit_config(family.base, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    return families.recipe(family, "sftm", experts=[0], calibration=False)


def copied(recipe: dict[str, Any], out: Path, **options: Any) -> list[str]:
    families.merge(recipe, out, **{"copy_tokenizer": True} | options)
    return [name for name in (*TEMPLATES, *OTHERS, "notes.json") if (out / name).is_file()]


def test_all_that_transformers_reads_comes_along(recipe: dict[str, Any], tmp_path: Path) -> None:
    assert copied(recipe, tmp_path / "merged") == [*TEMPLATES, *OTHERS]
    assert json.loads((tmp_path / "merged" / GENERATION).read_text())["eos_token_id"] == [2, 5]
    assert "AutoModelForCausalLM" in json.loads((tmp_path / "merged/config.json").read_text())["auto_map"]


@pytest.mark.parametrize(
    ("changes", "options", "generation"),
    [
        ({"tokenizer": {"source": "union"}}, {}, False),
        ({"chat_template": "chatml"}, {}, True),
        ({}, {"copy_tokenizer": False}, True),
    ],
    ids=str,
)
def test_what_belongs_to_another_tokenizer_stays(
    changes: dict[str, Any], options: dict[str, Any], generation: bool, recipe: dict[str, Any], tmp_path: Path
) -> None:
    Path(recipe["base_model"], "chat_template.jinja").unlink()
    assert copied(recipe | changes, tmp_path / "merged", **options)[-len(OTHERS) :] == [*OTHERS]
    assert not (tmp_path / "merged" / "tekken.json").exists()
    assert (tmp_path / "merged" / GENERATION).is_file() == generation


def test_a_file_that_cannot_be_copied_is_named(
    recipe: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "merged" / "helper.py").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "mergekit_slta"):
        copied(recipe, tmp_path / "merged")
    (said,) = [text for text in caplog.messages if "yourself" in text]
    assert f"from {recipe['base_model']} yourself: " in said and "helper.py" in said


def test_what_mergekit_does_not_download_is_fetched(recipe: dict[str, Any], tmp_path: Path) -> None:
    base = Path(recipe["base_model"])
    (tmp_path / "hub/org").mkdir(parents=True)
    base.rename(tmp_path / "hub/org/base")
    with serve(tmp_path / "hub", tmp_path / "cache"):
        found = copied(recipe | {"base_model": "org/base"}, tmp_path / "merged")
    assert set(found) == {*TEMPLATES, *OTHERS} - {"additional_chat_templates/rag.jinja"}  # the stand-in has no folders
