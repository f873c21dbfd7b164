"""Headers against the tensors themselves, damaged files, and models on a local stand-in for the Hub."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelPath, ModelReference
from safetensors.torch import save_file
from support.copies import pickled, sharded
from support.examining import edit_config
from support.families import Family
from support.hub import serve

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import folder_headers, local_folder, open_model


@pytest.fixture
def folder(llama: Family, tmp_path: Path) -> Path:
    """A model's folder that a test may change."""
    return Path(shutil.copytree(llama.base, tmp_path / "model"))


def refusal(folder: Path | str) -> str:
    with pytest.raises(SltaError) as error:
        open_model(ModelReference.parse(str(folder)))
    return error.value.message


def test_names_of_no_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    said = " cannot be used: there is no such folder, and it is not the name of a repository."
    assert refusal(tmp_path / "none") == f"{tmp_path}/none{said}"
    assert refusal("~/none") == f"~/none{said}"
    assert refusal("~/model") == f"mergekit does not expand the '~' in ~/model: write {folder}."
    assert refusal(folder / "model.safetensors") == f"{folder}/model.safetensors{said}"
    assert refusal(tmp_path / "a.gguf").startswith(f"{tmp_path}/a.gguf is a GGUF file: name the unquantized model")
    said = f"org/none cannot be used: there is no such folder in {Path.cwd()}, and the Hub cannot be reached."
    assert refusal("org/none") == said


def test_a_model_that_transformers_cannot_build_is_named_with_the_reason(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(folder, hidden_act="nosuch")
    model = open_model(ModelReference.parse(str(folder)))
    assert model.built is None and model.built is None
    (said,) = caplog.messages
    assert said.startswith(f"What needs the structure of {folder} is not checked, and goes by shapes: transformers can")
    assert "nosuch" in said


def with_own_code(folder: Path) -> None:
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "configuration_mine.py").write_text("raise SystemExit")


SHARD = "model-00002-of-00006.safetensors"


def shard(folder: Path) -> Path:
    """Split a folder's weights over several files; returns their index."""
    sharded(folder, folder)
    (folder / "model.safetensors").unlink()
    return folder / "model.safetensors.index.json"


def indexed(tensor: str, file: str) -> Callable[[Path], object]:
    """Let the index of a folder's shards name a file for a tensor."""

    def change(folder: Path) -> None:
        index = shard(folder)
        places = json.loads(index.read_text())["weight_map"] | {tensor: file}
        index.write_text(json.dumps({"weight_map": places}))

    return change


def repeated(folder: Path) -> None:
    """Leave a tensor that was mended in a file of its own in its old file, too."""
    index = shard(folder)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "mended.safetensors")
    places = json.loads(index.read_text())["weight_map"] | {"lm_head.weight": "mended.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))


def pickle_of(content: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return change


def overwrite(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


UNREADABLE = "model.safetensors cannot be read"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter": (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "write 'BASE+"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "transformers cannot read the config"),
    "its own code": (with_own_code, "needs its own code: allow it with --trust-remote-code."),
    "no class": (lambda folder: edit_config(folder, architectures=None), "must name one class under 'architectures'."),
    "no weights": (lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"), "has no tensors"),
    "a missing shard": (lambda folder: shard(folder).with_name(SHARD).unlink(), f"lacks {SHARD}, which its index"),
    **{
        f"an index to {file}": (indexed("lm_head.weight", file), "which is not in the model's folder")
        for file in ("../base/model.safetensors", "/etc/passwd", "sub/model.safetensors")
    },
    "a missing tensor": (indexed("model.extra", SHARD), f"{SHARD} lacks model.extra, which the index expects there"),
    "a tensor in two files": (repeated, "lm_head.weight in both mended.safetensors and model-0000"),
    "an index without JSON": (lambda folder: shard(folder).write_text("{"), "safetensors.index.json cannot be read"),
    "two sets": (lambda folder: sharded(folder, folder), "are two sets of tensors; transformers reads the first"),
    "half a file": (lambda folder: os.truncate(folder / "model.safetensors", 5000), f"{UNREADABLE} (it is truncated"),
    "another header": (overwrite((5).to_bytes(8, "little") + b"hello world"), UNREADABLE),
    "a pointer": (overwrite(b"version https://git-lfs.github.com/spec/v1\n"), "run 'git lfs pull'."),
    "a training run's state": (
        pickle_of({"state_dict": {"lm_head.weight": torch.ones(1)}, "epoch": 1}),
        "pytorch_model.bin does not hold tensors alone: save what the model's state_dict() returns.",
    ),
    "code in a pickle": (pickle_of({"x": partial(os.system, "true")}), "contains code (functools.partial): do not"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_used_is_refused_in_a_sentence_that_names_it(name: str, folder: Path) -> None:
    damage, words = BROKEN[name]
    damage(folder)
    message = refusal(folder)
    assert words in message
    assert str(folder) in message


def opened(name: str) -> dict[str, tuple[int, ...]] | str:
    """The shapes of a model's tensors, or why it cannot be used."""
    try:
        found = open_model(ModelReference.parse(name)).tensors
    except SltaError as error:
        return error.message
    return {name: header.shape for name, header in found.items()}


def test_models_on_the_hub_are_seen_without_a_download(make_family: MakeFamily, tmp_path: Path) -> None:
    family, organization = make_family(experts=2), tmp_path / "hub" / "org"
    for name, folder in zip(("whole", "empty"), family.folders, strict=False):
        shutil.copytree(folder, organization / name)
    pickled(family.base, organization / "pickled")
    sharded(family.folders[1], organization / "sharded")
    (organization / "empty" / "model.safetensors").unlink()
    (organization / "gguf").mkdir()
    (organization / "gguf" / "model.gguf").write_bytes(b"GGUF")

    shapes = {name: header.shape for name, header in folder_headers(family.base).items()}
    reasons = {
        "org/pickled": "download pickled weights with 'hf download org/pickled' first",
        "org/empty": "has no model.safetensors on the Hub",
        "org/gguf": "has no model.safetensors on the Hub: instead of GGUF files, name the model",
        "org/none": "there is no such repository, or it is private; check the name or 'hf auth login'.",
        "org/whole@v2": f"no such folder in {Path.cwd()}, and the repository has no such",
        "gated/model": "the repository is gated; ask for access",
    }
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        assert opened("org/whole") == opened("org/sharded") == shapes
        assert "config.json" in hub.fetched
        assert not any("model" in name for name in hub.fetched if name != "model.safetensors.index.json")
        assert not [name for name, reason in reasons.items() if reason not in opened(name)]


@pytest.mark.parametrize("layout", [sharded, pickled])
def test_what_mergekit_has_downloaded_is_there_offline(
    layout: Callable[[Path, Path], Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's client remembers the names of all files of a repository; mergekit and transformers download some."""
    repository = layout(folder, tmp_path / "hub" / "org" / "model")
    for name in ("README.md", "params.json", *["consolidated.safetensors"] * (layout is sharded)):
        (repository / name).write_text("{}")
    path, patterns = ModelPath(path="org/model"), ["config.json", "model*", "pytorch_model*"]
    with serve(tmp_path / "hub", tmp_path / "cache"):
        downloaded = ModelReference(model=path).local_path(cache_dir=str(tmp_path / "cache"))
        less = huggingface_hub.snapshot_download(path.path, cache_dir=tmp_path / "less", allow_patterns=patterns)
        assert not Path(downloaded, "consolidated.safetensors").exists()  # the weights once more
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert local_folder(path, str(tmp_path / "cache")) == Path(downloaded)
        assert local_folder(path, str(tmp_path / "less")) == Path(less)
        assert local_folder(path, str(tmp_path)) is None
