"""LoRA adapters in a folder and on a local stand-in for the Hub, and the folder that mergekit merges them into."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from mergekit.common import ModelPath, ModelReference
from safetensors.torch import save_file
from support.adapters import write_adapter
from support.families import Family
from support.hub import serve

from mergekit_slta.errors import SltaError
from mergekit_slta.models.adapters import adapter_folder, adapter_headers, adapter_weights, last_change, merged_folder
from mergekit_slta.models.headers import TensorHeader


@pytest.mark.parametrize("left_out", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_incomplete_adapter(tmp_path: Path, left_out: str) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    path = ModelPath(path=str(tmp_path))
    assert adapter_headers(path) == {"x": TensorHeader((1,), 4)}
    (tmp_path / left_out).unlink()
    with pytest.raises(SltaError, match=f"is no LoRA adapter: it lacks {left_out}"):
        adapter_headers(path)


FIND_ALL = """
import json, sys
from mergekit.common import ModelPath
from mergekit_slta.models.adapters import adapter_folder, adapter_headers
from mergekit_slta.errors import SltaError

def shapes(path):
    try:
        found = adapter_headers(path)
    except SltaError as error:
        return error.message
    return found and {name: list(header.shape) for name, header in found.items()}

paths = [ModelPath(path=name) for name in sys.argv[1].split(",")]
found = [shapes(path) for path in paths]
print(json.dumps([*found, sorted(file.name for file in adapter_folder(paths[0]).iterdir())]))
"""


def test_adapters_on_the_hub(tmp_path: Path) -> None:
    """Their tensors are seen without a download; the download is of nothing but the adapter."""
    organization = tmp_path / "hub" / "org"
    for name, weights in (("whole", "adapter_model.safetensors"), ("pickled", "adapter_model.bin"), ("empty", "x")):
        (organization / name).mkdir(parents=True)
        save_file({"x": torch.ones(2, 3)}, organization / name / weights)
        if name != "empty":
            (organization / name / "adapter_config.json").write_text("{}")
    (organization / "whole" / "training.bin").write_text("large")
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        *found, files = json.loads(hub.run(FIND_ALL, "org/whole,org/pickled,org/empty").splitlines()[-1])
    whole, pickled, empty = found
    assert whole == {"x": [2, 3]}
    assert pickled is None
    assert empty.startswith("org/empty is no LoRA adapter: it lacks adapter_config.json,")
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert set(hub.fetched) == set(files)


def test_the_weights_of_an_adapter(tmp_path: Path) -> None:
    folder = adapter_folder(ModelPath(path=str(tmp_path)))
    with pytest.raises(SltaError, match="holds no LoRA adapter"):
        adapter_weights(folder)
    for name in ("adapter_model.bin", "adapter_model.safetensors"):  # the second is preferred
        (tmp_path / name).write_text("")
        assert adapter_weights(folder) == tmp_path / name


def test_an_adapter_changes_with_its_files(tmp_path: Path) -> None:
    assert last_change(ModelPath(path="org/adapter")) == 0
    for number, name in enumerate(("adapter_config.json", "adapter_model.safetensors", "README.md")):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (number + 5, number + 5))
    assert last_change(ModelPath(path=str(tmp_path))) == 6


def test_the_folder_of_a_merged_adapter_is_mergekits(llama: Family, tmp_path: Path) -> None:
    reference = ModelReference.parse(f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}")
    assert merged_folder(reference, str(tmp_path)) == Path(reference.merged(cache_dir=str(tmp_path)).model.path)
