"""Every tensor is on the device that computes, and the results are the CPU's; ``test_gpu.py`` says it of a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from mergekit.io.tasks import LoaderCache
from safetensors.torch import load_file
from support import families
from support.copies import edit_tensors
from support.families import Family
from support.linearity_values import assert_same
from support.slow import slow_but

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import embed
from mergekit_slta.layers.structure import structure
from mergekit_slta.levels import LEVELS
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.nonlinearity.scores import Plan, merge_study, path_study
from mergekit_slta.slta.calibrate import calibrate
from mergekit_slta.slta.features import LayerFeatures

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes its place")

separate_device = pytest.importorskip(
    "support.separate_device", reason="this torch makes no devices in Python", exc_type=ImportError
).separate_device
State = dict[str, torch.Tensor]
# Grouped heads, transposed maps with biases, masks per layer, mixtures, convolutions.
ARCHITECTURES = ("llama", "gpt2", "gemma2", "mixtral", "lfm2", "llama4")
TOLERANCE = 1e-3  # of a tensor's norm: on another device attention is computed by another kernel


def assert_close(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu"
        assert (found[name] - tensor).norm() <= TOLERANCE * tensor.norm(), name


def test_tensors_of_two_devices_do_not_mix() -> None:
    with separate_device() as device:
        there = torch.ones(3, device=device)
        assert there.device.type != "cpu" and (there + there).device == there.device
        assert (there + 1).cpu().tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3)[:2] @ there[:2]


@pytest.mark.parametrize("name", slow_but({*ARCHITECTURES} - {"llama"}, ARCHITECTURES))  # mixtral has its attention
def test_calibration_and_feature_merge(name: str, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(name, experts=2, records=2, longest=10)
    levels = LEVELS if name != "lfm2" else ("layer", "linear")

    def results(device: str, folder: Path) -> State:
        LoaderCache.loaders.clear()
        grams = families.measure(family, *levels, device=device)
        families.feature_merge(family, folder, device=device, compare=True)
        return grams | families.solved_tensors(folder)

    expected = results("cpu", tmp_path / "host")
    with separate_device() as device:
        assert_close(results(device, tmp_path / "device"), expected)


def test_a_feature_merge_of_few_tokens_that_searches_the_ridge(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("llama", records=2, longest=8)
    families.feature_merge(family, tmp_path / "host", by_tasks=True, ridge=None)
    with separate_device() as device:
        families.feature_merge(family, tmp_path / "device", by_tasks=True, device=device, ridge=None)
    assert_close(families.solved_tensors(tmp_path / "device"), families.solved_tensors(tmp_path / "host"))


def test_the_next_layer_is_read_by_another_thread_while_a_layer_is_used(
    llama: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor once."""
    threads: list[int] = []
    fetch = Checkpoint.fetch

    def noting(self: Checkpoint, *arguments: Any) -> State:
        threads.append(threading.get_ident())
        return fetch(self, *arguments)

    monkeypatch.setattr(Checkpoint, "fetch", noting)

    def bytes_read(device: str) -> list[int]:
        LoaderCache.loaders.clear()
        models = families.checkpoints(llama.folders)
        calibrate(Decoder(llama.config, device=device), models, llama.token_ids(), ["layer"])
        return [model.bytes_read for model in models]

    expected = bytes_read("cpu")
    with separate_device() as device:
        assert bytes_read(device) == expected
    assert len(threads) == 2 * len(llama.folders) * families.LAYERS
    assert threading.get_ident() not in threads


def test_memory_that_runs_out_while_a_layer_is_read_ahead(
    llama: Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = families.measure(llama, "layer")
    fetch, full = Checkpoint.fetch, [True]

    def failing(self: Checkpoint, *arguments: Any) -> State:
        if full:
            full.pop()
            raise torch.OutOfMemoryError
        return fetch(self, *arguments)

    monkeypatch.setattr(Checkpoint, "fetch", failing)
    LoaderCache.loaders.clear()
    with separate_device() as device:
        assert_close(families.measure(llama, "layer", device=device), expected)
    assert not full and "Out of memory" in caplog.text


def test_a_broken_tensor_that_was_read_ahead_is_named(family: Family) -> None:
    name = f"model.layers.{families.LAYERS - 1}.mlp.up_proj.weight"
    edit_tensors(family.experts[0], lambda tensors: tensors[name].fill_(torch.nan))
    LoaderCache.loaders.clear()
    with separate_device() as device, pytest.raises(SltaError, match=f"holds NaN or Inf in the tensor {name}"):
        families.measure(family, "layer", device=device)


@torch.no_grad()
def test_a_map_that_no_token_reaches_changes_nothing(llama: Family) -> None:
    """Such as an expert of a mixture that is a module of its own."""
    with separate_device() as device:
        decoder = Decoder(llama.config, device=device)
        models = families.checkpoints(llama.folders)
        names = decoder.layer_tensors(0)
        weights = [model.read(names, decoder.base_model_prefix, decoder.device) for model in models]
        edges = {name: name for name in decoder.edge_tensors}
        hidden, calls = embed(
            decoder, torch.arange(10).reshape(2, 5), models[0].read(edges, decoder.base_model_prefix, decoder.device)
        )
        features = LayerFeatures(decoder, 0, weights, ["linear"], tokens=10)
        base = features.run_base(hidden, calls[0])
        del base.inputs["mlp.down_proj"]
        grams = dict(features.grams(base, hidden, calls[0], [5, 5]))
    assert grams.pop("layer.0.mlp.down_proj").eq(0).all()
    assert all(gram.ne(0).any() for gram in grams.values())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_decoder_that_was_used_elsewhere_runs_where_it_is_moved(name: str, make_family: MakeFamily) -> None:
    family = make_family(name, experts=1)
    (model,) = families.checkpoints(family.folders[:1])
    decoder = Decoder(family.config)
    edges = {tensor: tensor for tensor in decoder.edge_tensors}

    def first_layer() -> torch.Tensor:
        structure(decoder, 0)
        weights = model.read(decoder.layer_tensors(0), decoder.base_model_prefix, decoder.device)
        outside = model.read(edges, decoder.base_model_prefix, decoder.device)
        hidden, calls = embed(decoder, torch.arange(10).reshape(2, 5), outside)
        return decoder.run(0, weights, hidden, calls[0]).output

    expected = first_layer()
    with separate_device() as device:
        decoder.to(device)
        there = first_layer()
        assert there.device.type != "cpu"
        assert (there.cpu() - expected).norm() <= TOLERANCE * expected.norm()
        decoder.to("cpu")
        assert torch.equal(first_layer(), expected)


def test_a_device_without_a_number_is_the_current_one(llama: Family) -> None:
    with separate_device() as device:
        decoder = Decoder(llama.config, device=device.partition(":")[0])
        assert decoder.device == torch.device(device)
        decoder.once(structure, 0)
        assert decoder.to(device.partition(":")[0])._known  # it was not moved


def test_linearity(make_family: MakeFamily) -> None:
    family = make_family(families.config_of("llama", num_hidden_layers=2), experts=2, records=1, longest=8)
    models = families.checkpoints(family.folders)

    def scores(device: str) -> Any:
        LoaderCache.loaders.clear()
        merges = merge_study((0, 1), 2)
        studies = [path_study(0, 2), replace(merges, others=merges.others[:4])]
        decoder, tasks = Decoder(family.config, device=device), family.token_ids()
        return Plan(decoder, models, ("one", "two"), tasks, LEVELS, studies).measure()

    expected = scores("cpu")
    with separate_device() as device:
        assert_same(scores(device), expected, TOLERANCE)


@pytest.mark.parametrize("method", ["slta", "featcal", "actmat", "sftm"])
def test_a_merge_by_mergekit(method: str, llama: Family, tmp_path: Path) -> None:
    recipe = families.recipe(llama, method, calibration=method in ("slta", "featcal"))
    expected = load_file(families.merge(recipe, tmp_path / "host") / "model.safetensors")
    LoaderCache.loaders.clear()
    with separate_device() as device:
        merged = families.merge(recipe, tmp_path / "device", device=device)
    assert_close(load_file(merged / "model.safetensors"), expected)
