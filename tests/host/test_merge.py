"""A merge from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from mergekit import options
from safetensors.torch import load_file
from support import families
from support.families import Family

from mergekit_slta.host.run import MergeOptions, merge
from mergekit_slta.output.verify import verify


def test_a_merge_in_python_is_mergekits_own(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    content = families.recipe(llama, samples=3, level="layer")
    data = dict(zip(llama.experts, llama.data, strict=True))
    recipe = families.recipe_of(llama.base, data, samples=3, level="layer")
    more: dict[str, Any] = {"write_threads": np.int64(1), "random_seed": torch.tensor(1), "write_model_card": False}
    assert merge(recipe, "~/ours", device=torch.device("cpu"), quiet=True, **more) == tmp_path / "ours"
    theirs = load_file(families.merge(content, tmp_path / "theirs") / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert verify(recipe, tmp_path / "ours").problems == ()
    assert ours.keys() == theirs.keys() and all(ours[name].equal(tensor) for name, tensor in theirs.items())


def test_its_options_are_mergekits() -> None:
    assert set(get_type_hints(MergeOptions)) == set(options.MergeOptions.model_fields) - {"num_threads", "verbosity"}
    with pytest.raises(TypeError, match="no option devise"):
        merge("recipe.yml", "out", devise="cuda")  # type: ignore[call-arg]
