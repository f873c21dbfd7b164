"""A GPU computes what float64 references and the CPU compute. Skipped where torch finds no GPU.

``test_separate_device.py`` holds on any machine that every tensor lies where it belongs.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily, WriteRecipe
from mergekit.io.tasks import LoaderCache
from safetensors.torch import load_file
from support import families, reference
from support.families import Family
from support.gram_difference import gram_difference
from support.linearity_values import assert_same
from support.processes import run_python, torchrun

from mergekit_slta.actmat.covariance import merge_by_covariance
from mergekit_slta.engine import reader, streams
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.streams import Streams
from mergekit_slta.featcal.regression import Change, RidgeRegression
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.products import EXACT, errors, exact_products
from mergekit_slta.levels import LEVELS
from mergekit_slta.nonlinearity.scores import Plan, plan_studies
from mergekit_slta.sftm.superpose import merge_task_matrices, trim
from mergekit_slta.slta.statistics import Statistics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda:0"
# Grouped heads, transposed maps with biases, masks per layer, mixtures, convolutions.
ARCHITECTURES = ("llama", "gpt2", "gemma2", "mixtral", "lfm2")
GRAMS = 1e-4  # of the float64 reference's
TENSORS = 1e-4  # of a solved tensor's norm on the CPU


def leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reader, streams):
        monkeypatch.setattr(module, "takes_little", lambda *arguments, **more: False)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models' tensors, relative to each tensor's norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_grams_are_the_references(name: str, make_family: MakeFamily) -> None:
    family = make_family(name, experts=3, records=4)
    levels = [level for level in LEVELS if name != "lfm2" or level in ("layer", "linear")]
    grams = families.measure(family, *levels, device=GPU)
    models, tasks = family.models(), family.token_ids()
    for level in levels:
        for submodule, deltas in reference.deltas(models, tasks, level, reference.SPLITS[name]).items():
            assert gram_difference(grams[submodule], deltas.grams()) < GRAMS, submodule


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "llama4"])
def test_a_feature_merge_is_the_cpus(
    name: str, has_room: bool, make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the GPU has room for hidden states, and for a mixture's experts."""
    family = make_family(name, experts=2, records=3)
    families.feature_merge(family, tmp_path / "host", compare=True)
    LoaderCache.loaders.clear()
    if not has_room:
        leave_no_room(monkeypatch)
    families.feature_merge(family, tmp_path / "device", device=GPU, compare=True)
    found, expected = (families.solved_tensors(tmp_path / place) for place in ("device", "host"))
    assert difference(found, expected) < TENSORS


def test_hidden_states_stay_where_there_is_room(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()
    advance = Streams.advance

    def noting(streams: Streams) -> None:
        advance(streams)
        devices.update(cached.hidden.device.type for cached in streams._cache.values())

    monkeypatch.setattr(Streams, "advance", noting)
    on_device = families.measure(llama, *LEVELS, device=GPU)
    assert devices == {"cuda"}
    devices.clear()
    leave_no_room(monkeypatch)
    LoaderCache.loaders.clear()
    on_host = families.measure(llama, *LEVELS, device=GPU)
    assert devices == {"cpu"}
    assert all(torch.equal(gram, on_host[name]) for name, gram in on_device.items())


def test_products_and_convolutions_are_not_rounded() -> None:
    """Even where TF32 is allowed, as it is for convolutions by default."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with exact_products():
            assert max(errors(384, 384, 384, GPU)) < EXACT
            signal, kernel = torch.randn(2, 64, 100, device=GPU), torch.randn(64, 64, 5, device=GPU)
            found = torch.nn.functional.conv1d(signal, kernel)
        expected = torch.nn.functional.conv1d(signal.double(), kernel.double())
        assert (found - expected).norm() < EXACT * expected.norm()
        assert max(errors(384, 384, 384, GPU)) > EXACT
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("known", [None, 500], ids=["sums", "tokens"])
@pytest.mark.parametrize("ridge", [None, 0.003])
@pytest.mark.parametrize("with_prior", [False, True])
def test_a_regression_is_the_cpus(known: int | None, ridge: float | None, with_prior: bool) -> None:
    """With more inputs than a block has columns, and two tasks, of which the second has a dimension that is zero."""
    inputs, outputs, tokens = 700, 90, 500
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(tokens // 2, inputs, generator=draw) for _ in range(2)]
    given[1][:, 3] = 0
    residuals = [torch.randn(tokens // 2, outputs, generator=draw) for _ in range(2)]
    rows = torch.randn(2 * inputs, inputs, generator=draw, dtype=torch.float64)
    prior = rows.T @ rows / (2 * inputs)
    samples, weights = torch.arange(tokens // 2) // 10, torch.rand(tokens // 2, generator=draw) + 0.5

    def solved(device: str) -> Change:
        own = prior.to(device) if with_prior else None
        equations = RidgeRegression(inputs, outputs, ridge, device, prior=own, tokens=known)
        for task in range(2):
            equations.add(given[task].to(device), residuals[task].to(device), samples, weights)
            equations.finish_task()
        return equations.solve()

    found, expected = solved(GPU), solved("cpu")
    assert (found.ridge, found.enlarged) == (expected.ridge, expected.enlarged)
    assert found.matrix.device.type == "cuda"
    for part in ("matrix", "mean", "shares"):
        own, other = getattr(found, part).cpu(), getattr(expected, part)
        assert (own - other).norm() < 1e-8 * other.norm(), part


def test_task_matrices_are_merged_as_on_the_cpu() -> None:
    """By covariances, with the system that featcal takes over, and by singular features."""
    draw = torch.Generator().manual_seed(0)
    tasks = [torch.randn(600, 520, generator=draw) for _ in range(3)]

    def merged(device: str) -> list[torch.Tensor]:
        own = [task.to(device) for task in tasks]
        return [part.cpu() for part in (*merge_by_covariance(own, 0.01), trim(own[0], 0.2), merge_task_matrices(own))]

    for found, expected in zip(merged(GPU), merged("cpu"), strict=True):
        assert (found - expected).norm() < TENSORS * expected.norm()


def test_linearity_is_the_cpus(make_family: MakeFamily) -> None:
    family = make_family(experts=2, records=2, longest=8)

    def scores(device: str) -> Any:
        LoaderCache.loaders.clear()
        studies = plan_studies(2, pairs=True, triples=False)
        models = families.checkpoints(family.folders)
        decoder = Decoder(family.config, device=device)
        return Plan(decoder, models, ("one", "two"), family.token_ids(), LEVELS, studies).measure()

    assert_same(scores(GPU), scores("cpu"), 1e-4)


@pytest.mark.parametrize("method", ["slta", "featcal", "actmat", "sftm"])
def test_a_merge_by_the_command_is_the_cpus(
    method: str, llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    recipe = write_recipe(llama, method, calibration=method in ("slta", "featcal"))
    merged = {}
    for place, options in {"host": ["--device", "cpu"], "device": ["--cuda"]}.items():
        done = run_python("-m", "mergekit.scripts.run_yaml", recipe, tmp_path / place, "--no-copy-tokenizer", *options)
        assert done.returncode == 0, done.stderr
        merged[place] = load_file(tmp_path / place / "model.safetensors")
    assert difference(merged["device"], merged["host"]) < TENSORS


def test_memory_that_runs_out_halves_the_batches(llama: Family, caplog: pytest.LogCaptureFixture) -> None:
    """Within the mean of the memory that large batches take and that small ones do."""
    tasks = [[sample * 150 for sample in samples] for samples in llama.token_ids()]

    def measured(**arguments: Any) -> tuple[dict[str, torch.Tensor], int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return families.measure(
            llama, "attn_mlp", tasks=tasks, device=GPU, **arguments
        ), torch.cuda.max_memory_reserved()

    expected, little = measured(batch_tokens=2048)
    _, much = measured()
    assert much > little
    torch.cuda.set_per_process_memory_fraction((little + much) / 2 / torch.cuda.get_device_properties(0).total_memory)
    try:
        found, _ = measured()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "Out of memory" in caplog.text
    assert all(gram_difference(found[name], gram) < GRAMS for name, gram in expected.items())


def test_a_measurement_that_was_interrupted_goes_on(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = families.measure(llama, "attn_mlp", device=GPU)
    advance, advanced = Streams.advance, []

    def interrupt(streams: Streams) -> None:
        advance(streams)
        advanced.append(streams.layer)
        if streams.layer == 2:
            raise KeyboardInterrupt

    for stops in (True, False):
        partial = Partial(tmp_path / "partial", {})
        partial.begin()
        LoaderCache.loaders.clear()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) if stops else nullcontext():
            if stops:
                patched.setattr(Streams, "advance", interrupt)
            found = families.measure(llama, "attn_mlp", device=GPU, partial=partial)
    assert len(list((tmp_path / "partial").glob("layer-*"))) == families.LAYERS
    assert advanced == [1, 2]
    assert all(torch.equal(gram, found[name]) for name, gram in expected.items())


def test_processes_that_share_a_gpu_write_the_same_file(
    llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    recipe = write_recipe(llama, samples=6, batch_tokens=40)
    files = []
    for count in (1, 2):
        files.append(tmp_path / f"{count}.safetensors")
        done = torchrun(count, "-m", "mergekit_slta", "calibrate", recipe, "-o", files[-1], "--cuda")
        assert done.returncode == 0, done.stderr
    one, two = map(Statistics.load, files)
    assert two.info == one.info
    assert all(gram_difference(two.grams[name], gram) < 1e-6 for name, gram in one.grams.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_with_a_gpu_each_solve_what_one_alone_solves(
    llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    """Through nccl, which no other test takes."""
    recipe = write_recipe(llama, "featcal", samples=6, batch_tokens=40)
    merged = []
    for count in (1, 2):
        done = torchrun(count, "-m", "mergekit_slta", "merge", recipe, tmp_path / f"{count}", "--cuda")
        assert done.returncode == 0, done.stderr
        merged.append(load_file(tmp_path / f"{count}" / "model.safetensors"))
    assert difference(merged[1], merged[0]) < TENSORS
