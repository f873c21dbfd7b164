"""A merge from Python."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from support import families
from support.families import Family

from mergekit_slta.host.merge import merge
from mergekit_slta.output.verify import verify
from mergekit_slta.recipe.recipe import Recipe


def test_a_merge_in_python_is_mergekits_own(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    content = families.recipe(llama, samples=3, level="layer")
    data = dict(zip(llama.experts, llama.data, strict=True))
    recipe = Recipe(llama.base, data, samples=3, level="layer")
    options: dict[str, Any] = {"write_threads": np.int64(1), "random_seed": torch.tensor(1), "write_model_card": False}
    assert merge(recipe, "~/ours", device=torch.device("cpu"), quiet=True, **options) == tmp_path / "ours"
    theirs = load_file(families.merge(content, tmp_path / "theirs") / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert verify(recipe, tmp_path / "ours").problems == ()
    assert ours.keys() == theirs.keys() and all(ours[name].equal(tensor) for name, tensor in theirs.items())


def test_its_options_are_mergekits_with_their_defaults() -> None:
    arguments = signature(merge).parameters.values()
    options = {own.name: own.default for own in arguments if own.kind is own.KEYWORD_ONLY}
    theirs = {name: field.default for name, field in MergeOptions.model_fields.items()}
    assert options == {name: value for name, value in theirs.items() if name not in ("num_threads", "verbosity")}
