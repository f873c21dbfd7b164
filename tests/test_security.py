"""Models, statistics and names that somebody else gives are text and numbers: they reach no file elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from mergekit.common import ModelReference
from support import synthetic
from support.copies import sharded
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import folder_headers
from mergekit_slta.output import card


@pytest.mark.parametrize("name", ["../base/model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_names_no_file_elsewhere(name: str, llama: Family, tmp_path: Path) -> None:
    sharded(llama.base, tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(SltaError, match=r"index.json cannot be read .*which is not in the model's folder"):
        folder_headers(tmp_path / "model")


def test_a_name_writes_nothing_into_a_plain_recipe(tmp_path: Path) -> None:
    """A line break in a name would end the comment that names the expert."""
    found = synthetic.statistics(["org/a\nslices: []", "org/b"], ["model"])
    content = yaml.safe_load(found.solve("model").save_recipe(tmp_path / "plain.yml").read_text())
    assert content["merge_method"] == "task_arithmetic" and "slices" not in content


def test_names_stay_code_in_a_card() -> None:
    reference = ModelReference.model_validate("/models/a`b|<script>")
    (shown,) = [card._linked(reference)]
    assert shown == "`a'b|<script>`"
