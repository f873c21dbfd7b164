"""A merge from Python."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

from safetensors.torch import load_file
from support import families
from support.families import Family
from support.processes import run_afresh

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


def test_importing_merge_leaves_the_methods_known_to_stock_mergekit(forks: ForkServerContext) -> None:
    code = (
        "import _mergekit_slta_startup as startup; startup.install()\n"
        "import mergekit_slta; mergekit_slta.merge\n"
        "from mergekit.merge import run_merge\n"
        "from mergekit import merge_methods\n"
        "assert run_merge.__wrapped__\n"
        "names = {method.spec.name for method in merge_methods.registered_methods()}\n"
        "assert {'slta', 'featcal', 'actmat', 'sftm'} <= names, names\n"
    )
    run_afresh(forks, code)
