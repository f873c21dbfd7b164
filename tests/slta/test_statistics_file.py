"""The statistics file: what is written is what is read, and what no calibration wrote is refused in words."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mergekit.common import ModelReference
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import synthetic

from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.recipe import published_name
from mergekit_slta.slta.statistics import Statistics

MODELS = [f"org/expert{index}" for index in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return synthetic.statistics(MODELS, ["layer", "attn_mlp"]).save(tmp_path / "deep" / "stats.safetensors")


@pytest.mark.parametrize("levels", [["attn_mlp"], ["model", *synthetic.INSIDE]], ids=str)
def test_what_is_written_in_the_documented_format_is_what_is_read(levels: list[str], tmp_path: Path) -> None:
    written = synthetic.statistics(MODELS, levels)
    written.tokens.copy_(torch.arange(1, 1 + len(written.tokens)))
    file = written.save(f"{tmp_path}/stats.safetensors")
    tensors, read = load_file(file), Statistics.load(str(file))
    assert read.info == written.info and read.grams.keys() == written.grams.keys()
    expected = {f"gram/{name}": gram for name, gram in written.grams.items()}
    expected |= {"task": written.task, "tokens": written.tokens}
    found = {f"gram/{name}": gram for name, gram in read.grams.items()} | {"task": read.task, "tokens": read.tokens}
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor) and torch.equal(found[name], tensor)
        assert tensors[name].dtype == (torch.float64 if "gram/" in name else torch.int64)
    assert tensors.keys() == expected.keys()
    assert read.save(tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert list(metadata) == ["mergekit_slta"]
    content = json.loads(metadata["mergekit_slta"])
    assert json.dumps(content, sort_keys=True) == metadata["mergekit_slta"]
    assert set(content) == {
        "format_version", "levels", "base_model", "models", "calibration", "samples", "max_tokens", "seed", "inputs",
        "architecture", "num_layers", "dtype", "versions", "fingerprint",
    }  # fmt: skip
    assert set(content["fingerprint"]) == {"base", "experts", "tokens", "settings"}
    assert set(content["calibration"][0]) == {"source", "template", "sha256"}


# What no calibration wrote


def refused(path: Path, words: str) -> None:
    with pytest.raises(SltaError, match=words) as caught:
        Statistics.load(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_merged_folder_stands_for_its_statistics(path: Path, tmp_path: Path) -> None:
    refused(tmp_path / "none.safetensors", "There is no statistics file.*calibrate'.$")
    folder = tmp_path / "merged"
    (folder / "mergekit-slta").mkdir(parents=True)
    for missing in (folder, folder / "mergekit-slta" / "statistics.safetensors"):
        refused(missing, "Only slta writes statistics into the merged folder; a recipe of featcal has 'report: FOLDER'")
    path.rename(missing)
    assert Statistics.load(folder).info.levels == ("layer", "attn_mlp")


def test_files_of_other_kinds(path: Path) -> None:
    save_file(load_file(path), path, metadata={"mergekit_slta": "[]"})
    refused(path, "metadata")
    for content in (path.read_bytes()[:200], pickle.dumps({"task": [0]})):
        path.write_bytes(content)
        refused(path, "cannot be read as a safetensors file")
    for metadata in (None, {"format": "pt"}):
        save_file({"model.norm.weight": torch.ones(3)}, path, metadata=metadata)
        refused(path, "is not a statistics file")


Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors, dict[str, Any]], object]
GRAM = "gram/layer.1.mlp"
TAMPERED: dict[str, tuple[Edit, str]] = {
    "not a number": (lambda tensors, info: tensors[GRAM][0, 1, 1].fill_(torch.nan), "'layer.1.mlp' holds no Gram"),
    "a tensor more": (lambda tensors, info: tensors.update(x=torch.ones(1)), "'x' holds no Gram matrices"),
    "no tasks": (lambda tensors, info: tensors.pop("task"), "is not a statistics file"),
    "tasks in disorder": (lambda own, info: own.update(task=own["task"].flip(0)), "'task' does not name every task in"),
    "no tokens": (lambda tensors, info: tensors["tokens"].zero_(), "'tokens' does not fit"),
    "another version": (lambda tensors, info: info.update(format_version=1), "unusable metadata .format_version."),
    "a model less": (lambda tensors, info: info["models"].pop(), "does not describe all of its models and levels"),
    "a layer less": (lambda own, info: [own.pop(n) for n in [*own] if "layer.1" in n], "level 'layer' of 3 layers"),
    "more layers than memory holds": (lambda tensors, info: info.update(num_layers=10**10), "of 10000000000 layers"),
    "not semidefinite": (
        lambda tensors, info: tensors[GRAM][0].copy_(torch.tensor([[1.0, 3, 0], [3, 1, 0], [0, 0, 1]])),
        "'layer.1.mlp' holds no Gram",
    ),
    "too large": (lambda tensors, info: tensors[GRAM][0, 1, 1].fill_(1e308), "'layer.1.mlp' holds no Gram"),
    "too small": (lambda tensors, info: tensors[GRAM][0].mul_(1e-200), "'layer.1.mlp' holds no Gram"),
    "more tokens than a prompt may have": (lambda tensors, info: tensors["tokens"].fill_(2**62), "'tokens' does not"),
    "two models of one name": (lambda own, info: info["models"].__setitem__(1, info["models"][0]), "one name for two"),
    "an expert with the base model's name": (lambda own, info: info.update(base_model=info["models"][0]), "one name"),
    "an unknown level": (lambda tensors, info: info["levels"].append("tensor"), "does not hold level 'tensor'"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_file(name: str, path: Path) -> None:
    edit, words = TAMPERED[name]
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        info = json.loads(file.metadata()["mergekit_slta"])
    edit(tensors, info)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata={"mergekit_slta": json.dumps(info, sort_keys=True)})
    refused(path, words)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("./runs/math", "./runs/math"),
        ("/home/someone/models/math/", "math"),
        ("~/models/math", "math"),
        ("/home/someone/base+/home/someone/adapter", "base+adapter"),
        ("org/base+./adapter", "org/base+./adapter"),
    ],
)
def test_published_names_hold_no_path_of_a_machine(spelled: str, name: str) -> None:
    assert published_name(ModelReference.model_validate(spelled)) == name
