"""A whole merge by mergekit opens everything once: what the checks have opened is there for the run."""

from __future__ import annotations

import collections
import json
import os
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from mergekit.common import ModelReference
from safetensors.torch import load_file
from support import families
from support.families import Family
from support.processes import run_afresh
from transformers import AutoTokenizer

from mergekit_slta.data import draw
from mergekit_slta.host.merge import merge
from mergekit_slta.layers import trace
from mergekit_slta.models import headers
from mergekit_slta.models.headers import WEIGHT_FILES, weight_map
from mergekit_slta.recipe.recipe import Recipe

Counts = collections.Counter[tuple[str, str]]
ENTRIES = [name + index for name in WEIGHT_FILES for index in ("", ".index.json")]  # that programs look for


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """How often this package, not mergekit itself, has opened what: kind and name."""
    counts: Counts = collections.Counter()

    def count(owner: Any, name: str, kind: str, own: bool = True) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            if own or sys._getframe(1).f_globals["__name__"].startswith("mergekit_slta."):
                counts[kind, Path(str(arguments[0])).name if kind != "decoder" else ""] += 1
            return function(*arguments, **more)

        monkeypatch.setattr(owner, name, counted)

    count(ModelReference, "config", "configuration", own=False)
    count(headers, "folder_headers", "header")
    count(draw, "read_records", "data")
    count(trace, "trace_model", "decoder")
    count(AutoTokenizer, "from_pretrained", "tokenizer", own=False)
    return counts


@pytest.mark.parametrize("way", ["mergekit-yaml", "python"])
@pytest.mark.parametrize(("method", "parameters"), [("slta", {}), ("featcal", {"anchor": "actmat"})])
def test_a_merge_opens_everything_once(
    method: str, parameters: dict[str, Any], way: str, llama: Family, opened: Counts, tmp_path: Path
) -> None:
    content = families.recipe(llama, method, samples=3, **parameters)
    if way == "python":
        (tmp_path / "recipe.yml").write_text(json.dumps(content))
        merge(Recipe.load(tmp_path / "recipe.yml"), tmp_path / "out", quiet=True, write_model_card=False)
    else:
        families.merge(content, tmp_path / "out")
    models = [folder.name for folder in llama.folders]
    names = {"configuration": models, "header": models, "tokenizer": models[:1]}
    names |= {"data": [file.name for file in llama.data], "decoder": [""]}
    assert opened == {(kind, name): 1 for kind, found in names.items() for name in found}


def test_a_merge_in_python_is_mergekits_own(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, samples=3, level="layer")
    data = dict(zip(llama.experts, llama.data, strict=True))
    recipe = Recipe(llama.base, data, samples=3, level="layer")
    assert merge(recipe, tmp_path / "ours", quiet=True, write_model_card=False) == tmp_path / "ours"
    theirs = load_file(families.merge(content, tmp_path / "theirs") / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(ours[name].equal(tensor) for name, tensor in theirs.items())


def test_a_merge_into_the_same_folder_hides_the_weights_of_the_one_before(llama: Family, tmp_path: Path) -> None:
    """Programs read one of a whole file and an index of several; the time of a file does not say which is new."""
    out = tmp_path / "out"
    several, whole = {"out_shard_size": 60_000}, {"safe_serialization": True}
    for method, options in (("actmat", several), ("sftm", whole), ("actmat", several), ("sftm", whole)):
        families.merge(families.recipe(llama, method, calibration=False), out, **options)
        assert len(weight_map(out)) == (2 if options is several else 1)
        (entry,) = (file for file in out.iterdir() if file.name in ENTRIES)
        os.utime(entry, (2**32, 2**32))
    recipe = families.recipe(llama, "sftm", calibration=False)
    families.merge(recipe, out, safe_serialization=False)
    assert [file.name for file in out.iterdir() if file.name in ENTRIES] == ["pytorch_model.bin"]
    assert {file.name for file in out.glob("*.old")} == {"model.safetensors.old", "model.safetensors.index.json.old"}


def test_importing_merge_leaves_the_methods_known_to_stock_mergekit(forks: ForkServerContext) -> None:
    code = (
        "import _mergekit_slta_startup as startup; startup.install()\n"
        "import mergekit_slta; mergekit_slta.merge\n"
        "from mergekit.merge import run_merge\n"
        "from mergekit import merge_methods\n"
        "names = {method.spec.name for method in merge_methods.registered_methods()}\n"
        "assert {'slta', 'featcal', 'actmat', 'sftm'} <= names, names\n"
    )
    run_afresh(forks, code)
