"""The statistics file: what is written is what is read, and what no calibration wrote is refused in words."""

import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
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
LAYERS, SAMPLES = 4, 5


def uneven(*levels: str) -> Statistics:
    """Random statistics whose second task has a sample less than the others; samples differ in their lengths."""
    even = synthetic.statistics(MODELS, levels, layers=LAYERS, samples=SAMPLES)
    kept = torch.arange(len(even.task)) != 2 * SAMPLES - 1
    tokens = torch.randint(1, 512, even.task.shape, generator=torch.Generator().manual_seed(0))
    grams = {name: gram[kept] for name, gram in even.grams.items()}
    return Statistics(grams, even.task[kept], tokens[kept], even.info)


@pytest.fixture
def found() -> Statistics:
    return uneven("layer", "attn_mlp")


@pytest.fixture
def path(found: Statistics, tmp_path: Path) -> Path:
    found.save(tmp_path / "deep" / "stats.safetensors")
    return tmp_path / "deep" / "stats.safetensors"


def same(first: Statistics, second: Statistics) -> bool:
    return (
        first.info == second.info
        and torch.equal(first.task, second.task)
        and torch.equal(first.tokens, second.tokens)
        and set(first.grams) == set(second.grams)
        and all(torch.equal(first.grams[name], second.grams[name]) for name in second.grams)
    )


# Round trip


@pytest.mark.parametrize("levels", [["attn_mlp"], ["model", *synthetic.INSIDE]], ids=str)
def test_what_is_written_is_what_is_read(levels: list[str], tmp_path: Path) -> None:
    written = uneven(*levels)
    file = written.save(f"{tmp_path}/stats.safetensors")
    assert same(Statistics.load(str(file)), written)
    written.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_the_format_is_the_documented_one(path: Path, found: Statistics) -> None:
    tensors = load_file(path)
    assert set(tensors) == {"task", "tokens", *(f"gram/{name}" for name in found.grams)}
    assert {str(tensor.dtype) for name, tensor in tensors.items() if "gram/" in name} == {"torch.float64"}
    assert tensors["task"].dtype == tensors["tokens"].dtype == torch.int64
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
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


def test_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "none.safetensors", "There is no statistics file.*calibrate'.$")


def test_a_merged_folder_stands_for_its_statistics(path: Path, found: Statistics, tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    (folder / "mergekit-slta").mkdir(parents=True)
    for missing in (folder, folder / "mergekit-slta" / "statistics.safetensors"):
        refused(missing, "Only slta writes statistics into the merged folder; a recipe of featcal has 'report: FOLDER'")
    path.rename(missing)
    assert same(Statistics.load(folder), found)


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
    "single precision": (lambda tensors, info: tensors.update({GRAM: tensors[GRAM].float()}), "wrong shape or type"),
    "a tensor more": (lambda tensors, info: tensors.update(x=torch.ones(1)), "'x' is not the name of a submodule"),
    "no tasks": (lambda tensors, info: tensors.pop("task"), "is not a statistics file"),
    "tasks in disorder": (
        lambda tensors, info: tensors.update(task=tensors["task"].flip(0)),
        "'task' does not name every task in order",
    ),
    "no tokens": (lambda tensors, info: tensors["tokens"].zero_(), "'tokens' does not fit"),
    "another version": (lambda tensors, info: info.update(format_version=1), "unusable metadata .format_version."),
    "a field less": (lambda tensors, info: info.pop("seed"), "unusable metadata .seed."),
    "a model less": (lambda tensors, info: info["models"].pop(), "does not describe all of its models and levels"),
    "a layer less": (
        lambda tensors, info: [tensors.pop(name) for name in list(tensors) if "layer.1" in name],
        "does not cover the",
    ),
    "negative squares": (lambda tensors, info: tensors[GRAM].neg_(), "'layer.1.mlp' holds no Gram"),
    "an unknown level": (lambda tensors, info: info["levels"].append("tensor"), "it holds no level 'tensor'"),
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


# Parts of it


def test_a_subset_in_another_order(found: Statistics) -> None:
    part = found.take([2, 0])
    assert part.info.models == ("org/expert2", "org/expert0")
    assert part.info.fingerprint.experts == ("2" * 64, "0" * 64)
    assert part.task.tolist() == [0] * 5 + [1] * 5
    rows = [*range(9, 14), *range(5)]
    assert torch.equal(part.tokens, found.tokens[rows])
    for name, gram in found.grams.items():
        for row, source in enumerate(rows):
            for b, c in itertools.product(range(2), repeat=2):
                assert part.grams[name][row, b, c] == gram[source, [2, 0][b], [2, 0][c]]


def test_experts_are_selected_by_name(found: Statistics, tmp_path: Path) -> None:
    part = found.select("org/expert2", "org/expert0")
    assert same(part, found.take([2, 0]))
    assert same(part, found.select("expert2", "expert0"))  # as the tables name them
    assert same(part, replace(found, paths={"org/expert0": "/models/zero"}).select("expert2", "/models/zero"))
    assert same(Statistics.load(part.save(tmp_path / "part.safetensors")), part)  # it is a valid file itself
    assert same(found.take([0, 1, 2]), found)
    level = found.at_levels(["layer"])
    assert level.info.levels == ("layer",)
    assert same(Statistics.load(level.save(tmp_path / "level.safetensors")), level)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["org/expert0", "expert3"], "no expert 'expert3', only org/expert0, org/expert1, org/expert2"),
        (["org/expert1", "org/expert1"], "one or more of org/expert0, org/expert1, org/expert2, each once"),
        (["org/expert1", "expert1"], "one or more of org/expert0, org/expert1, org/expert2, each once"),
        ([["org/expert1"]], r"not a list of them: write select\('a', 'b'\)"),
        ([], "one or more of org/expert0, org/expert1, org/expert2, each once"),
    ],
)
def test_a_selection_that_nobody_meant_is_refused(names: list[str], said: str, found: Statistics) -> None:
    with pytest.raises(SltaError, match=said):
        found.select(*names)


def test_the_first_samples_of_each_task(found: Statistics) -> None:
    one = found.take([0]).first_samples(1)
    assert one.summary.startswith("1 sample of 1 task (")
    assert repr(one).splitlines()[1].split() == ["org/expert0", "1", str(int(one.tokens)), "task0.jsonl"]
    assert one.to_frame().to_dict("records") == [
        {"task of": "org/expert0", "samples": 1, "tokens": int(one.tokens), "calibration": "task0.jsonl"}
    ]
    part = found.first_samples(2)
    assert part.task.tolist() == [0, 0, 1, 1, 2, 2]
    rows = [0, 1, 5, 6, 9, 10]
    assert torch.equal(part.tokens, found.tokens[rows])
    assert all(torch.equal(part.grams[name], gram[rows]) for name, gram in found.grams.items())


def test_submodules_come_in_the_order_of_the_forward_pass() -> None:
    names = [f"layer.{i}.{part}" for i in range(12) for part in ("head.0", "head.1", "head.10", "mlp")]
    grams = {name: synthetic.random_grams(3, SAMPLES) for name in sorted(names)}
    deep = synthetic.statistics(MODELS, ["head_mlp"], layers=12, samples=SAMPLES, grams=grams)
    assert deep.submodules("head_mlp") == names


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("org/model", "org/model"),
        ("org/model@main", "org/model@main"),
        ("./runs/math", "./runs/math"),
        ("/home/someone/models/math", "math"),
        ("/home/someone/models/math/", "math"),
        ("~/models/math", "math"),
        ("/home/someone/base+/home/someone/adapter", "base+adapter"),
        ("org/base+./adapter", "org/base+./adapter"),
    ],
)
def test_published_names_hold_no_path_of_a_machine(spelled: str, name: str) -> None:
    assert published_name(ModelReference.model_validate(spelled)) == name
