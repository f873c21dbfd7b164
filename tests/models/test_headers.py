"""Headers against the tensors themselves, damaged files, and models on a local stand-in for the Hub."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelPath, ModelReference
from safetensors.torch import load_file, save_file
from support.families import Family
from support.hub import Hub, serve

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import (
    Model,
    TensorHeader,
    file_headers,
    folder_headers,
    local_folder,
    open_model,
)


@pytest.fixture
def folder(llama: Family, tmp_path: Path) -> Path:
    """A model's folder that a test may change."""
    return Path(shutil.copytree(llama.base, tmp_path / "model"))


def headers_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()}


def shard(folder: Path) -> dict[str, str]:
    """Split a folder's weights over two files with an index; returns the index's map."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for place in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == place}, folder / place)
    file.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def pickle(folder: Path, **how: Any) -> None:
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin", **how)
    file.unlink()


def refusal(folder: Path | str) -> str:
    with pytest.raises(SltaError) as error:
        open_model(ModelReference.parse(str(folder)))
    return error.value.message


def test_headers_are_those_of_the_tensors(folder: Path) -> None:
    expected = headers_of(load_file(folder / "model.safetensors"))
    assert folder_headers(folder) == expected
    shard(folder)
    assert folder_headers(folder) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_headers_of_other_types_and_shapes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(1).to(dtype), "cube": torch.ones(2, 3, 4, dtype=dtype)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    torch.save({"state_dict": tensors}, tmp_path / "x.bin")
    for name in ("x.safetensors", "x.bin"):
        found = file_headers(tmp_path / name)
        assert found == headers_of(tensors)
        assert found["cube"].count == math.prod((2, 3, 4))


def test_headers_of_a_pickled_checkpoint(folder: Path) -> None:
    expected = headers_of(load_file(folder / "model.safetensors"))
    pickle(folder)
    assert folder_headers(folder) == expected


def test_opens_a_model_with_or_without_the_prefix_of_its_names(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    model = open_model(ModelReference.parse(str(folder)))
    assert model.architecture == "LlamaForCausalLM"
    assert model.folder == folder
    assert model.tensor("model.norm.weight") == model.tensor("norm.weight") == TensorHeader((32,), 128)
    assert model.tensor("model.norm.bias") is None


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"{tmp_path}/none cannot be used: there is no such folder here."
    assert "mergekit does not know '~'" in refusal("~/none")


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    assert "is a file: name the model's folder" in refusal(folder / "model.safetensors")


def test_a_model_on_the_hub_without_a_network() -> None:
    assert (
        refusal("org/none") == "org/none cannot be used: there is no such folder here, and the Hub cannot be reached."
    )


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_an_adapter_in_place_of_a_model(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    assert f"is a LoRA adapter: write 'BASE+{folder}'" in refusal(folder)


def test_a_config_that_transformers_cannot_read(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "none"}')
    assert f"transformers cannot read the config.json of {folder}" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert f"transformers cannot read the config.json of {folder}" in refusal(folder)


def test_a_config_with_its_own_code(folder: Path) -> None:
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "configuration_mine.py").write_text("raise SystemExit")
    assert refusal(folder) == f"{folder} brings its own code: allow it with --trust-remote-code."


@pytest.mark.parametrize("names", [None, ["LlamaForCausalLM", "LlamaModel"]])
def test_a_config_without_one_architecture(folder: Path, names: list[str] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": names}))
    assert refusal(folder) == f"The config.json of {folder} must name one class under 'architectures'."


@pytest.mark.parametrize("change", [{}, {"model_type": "qwen2"}])
def test_a_config_with_more_layers_than_the_checkpoint_has_tensors(change: dict[str, str], folder: Path) -> None:
    """transformers would build them all, or a list of them, and run out of memory or time."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change | {"num_hidden_layers": 10**12}))
    count = len(load_file(folder / "model.safetensors"))
    assert refusal(folder) == (
        f"The config.json of {folder} names 1000000000000 layers, but its checkpoint has {count} tensors: "
        "get sound copies of both."
    )


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert "has no weights: mergekit needs model.safetensors or pytorch_model.bin" in refusal(folder)


def test_a_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    assert refusal(folder) == (f"{folder} lacks model-1.safetensors, which its index names: complete the download.")


def test_a_shard_without_a_tensor_of_the_index(folder: Path) -> None:
    places = shard(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places | {"model.extra": "model-0.safetensors"}}))
    assert "model-0.safetensors lacks model.extra, which the index expects there" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index(folder: Path, text: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json cannot be read" in refusal(folder)


@pytest.mark.parametrize("left", [0, 5, 100, 5000])
def test_a_truncated_file(folder: Path, left: int) -> None:
    os.truncate(folder / "model.safetensors", left)
    message = refusal(folder)
    assert "model.safetensors cannot be read (it is truncated" in message
    assert message.endswith("get a sound copy.")


def test_a_header_that_is_no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((5).to_bytes(8, "little") + b"hello world")
    assert "model.safetensors cannot be read" in refusal(folder)


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a git-lfs pointer without the weights: run 'git lfs pull'." in refusal(folder)


def test_a_pickled_checkpoint_of_an_old_format(folder: Path) -> None:
    pickle(folder, _use_new_zipfile_serialization=False)
    assert "pytorch_model.bin cannot be read" in refusal(folder)


def test_a_pickled_checkpoint_that_runs_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": partial(os.system, "true")}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be read" in refusal(folder)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        yield hub


def opened(name: str) -> dict[str, tuple[int, ...]] | str | None:
    """The shapes of a model's tensors, None where they cannot be seen, or why it cannot be used."""
    try:
        found = open_model(ModelReference.parse(name)).tensors
    except SltaError as error:
        return error.message
    return {name: header.shape for name, header in found.items()} if found is not None else None


def test_models_on_the_hub_are_seen_without_a_download(hub: Hub, make_family: MakeFamily) -> None:
    family = make_family(experts=3)
    organization = hub.root / "org"
    for name, folder in zip(("whole", "sharded", "pickled", "empty"), family.folders, strict=True):
        shutil.copytree(folder, organization / name)
    shard(organization / "sharded")
    pickle(organization / "pickled")
    (organization / "empty" / "model.safetensors").unlink()

    models = ("org/whole", "org/sharded", "org/pickled", "org/empty", "org/none", "org/whole@v2", "gated/model")
    found: dict[str, Any] = {name: opened(name) for name in models}
    shapes = {name: header.shape for name, header in folder_headers(family.base).items()}
    assert found["org/whole"] == found["org/sharded"] == shapes
    assert found["org/pickled"] is None
    assert found["org/empty"] == "org/empty has no weights: mergekit needs model.safetensors or pytorch_model.bin."
    assert found["org/none"] == (
        "org/none cannot be used: there is no such folder here, and there is no such repository, or it is private; "
        "check the name or 'hf auth login'."
    )
    assert found["org/whole@v2"] == "org/whole@v2 cannot be used: the repository has no such revision."
    assert found["gated/model"].startswith("gated/model cannot be used: the repository is gated; ask for access")
    assert "config.json" in hub.fetched
    assert not any("model" in name for name in hub.fetched if name != "model.safetensors.index.json")


def test_a_downloaded_model_is_read_from_the_cache(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("c" * 40)
    path = ModelPath(path="org/model")
    assert local_folder(path, str(tmp_path)) is None
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c" * 40)
    assert local_folder(path, str(tmp_path)) == snapshot
    (snapshot / "model.safetensors").unlink()
    assert local_folder(path, str(tmp_path)) is None


def test_a_model_is_named_as_the_recipe_names_it(llama: Family) -> None:
    reference = ModelReference.parse(f"{llama.base}+adapter")
    model = open_model(reference)
    assert isinstance(model, Model)
    assert str(model) == f"{llama.base}+adapter"
