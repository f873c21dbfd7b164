"""A merge from Python."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from support import families
from support.families import Family

from mergekit_slta.host.merge import merge
from mergekit_slta.recipe.recipe import Recipe


def test_a_merge_in_python_is_mergekits_own(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, samples=3, level="layer")
    data = dict(zip(llama.experts, llama.data, strict=True))
    recipe = Recipe(llama.base, data, samples=3, level="layer")
    assert merge(recipe, tmp_path / "ours", quiet=True, write_model_card=False) == tmp_path / "ours"
    theirs = load_file(families.merge(content, tmp_path / "theirs") / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(ours[name].equal(tensor) for name, tensor in theirs.items())
