"""A GPU computes what float64 references and the CPU compute. Skipped where torch finds no GPU.

``test_separate_device.py`` holds on any machine that every tensor lies where it belongs.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily, WriteRecipe
from safetensors.torch import load_file
from support import families, reference
from support.families import Family
from support.linearity_values import assert_same
from support.merging import worst_error
from support.processes import run_python, torchrun
from support.reference import gram_difference
from support.rounding import distance_rounding, gram_rounding, regression_rounding

from mergekit_slta.featcal.regression import RIDGES
from mergekit_slta.levels import LEVELS
from mergekit_slta.nonlinearity.studies import STEPS, Linearity, linearity
from mergekit_slta.slta.statistics import Statistics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda:0"
# Grouped heads, transposed maps with biases, masks per layer, mixtures, convolutions.
ARCHITECTURES = ("llama", "gpt2", "gemma2", "mixtral", "lfm2")
# A GPU's functions are off by two units, four times as much as a processor's; a layer may scan over 16 tokens.
GRAMS = 4 * gram_rounding(sums=4 + 16)
TENSORS = regression_rounding(RIDGES[0])  # of a solved tensor's norm on the CPU, with whichever ridge is chosen


@pytest.fixture
def products_may_be_rounded() -> Iterator[None]:
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("products_may_be_rounded")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_grams_are_the_references(name: str, make_family: MakeFamily) -> None:
    """Even where TF32 is allowed for products, as it is for convolutions by default."""
    family = make_family(name, experts=3, records=4)
    levels = [level for level in LEVELS if name != "lfm2" or level in ("layer", "linear")]
    grams = families.measure(family, *levels, device=GPU)
    models, tasks = family.models(), family.token_ids()
    for level in levels:
        for submodule, deltas in reference.deltas(models, tasks, level, reference.SPLITS[name]).items():
            assert gram_difference(grams[submodule], deltas.grams()) < GRAMS, submodule


@pytest.mark.parametrize("ridge", [None, 0.003])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "llama4"])
def test_a_feature_merge_is_the_cpus(name: str, ridge: float | None, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(name, experts=2, records=3)
    families.feature_merge(family, tmp_path / "host", ridge=ridge)
    families.feature_merge(family, tmp_path / "device", device=GPU, ridge=ridge)
    found, expected = (families.solved_tensors(tmp_path / place) for place in ("device", "host"))
    assert worst_error(found, expected) < TENSORS


def test_linearity_is_the_cpus(llama: Family) -> None:
    recipe = families.recipe(llama, experts=[0, 1])

    def scores(device: str) -> Linearity:
        return linearity(families.experiment(recipe, device=device), LEVELS, samples=1)

    assert_same(scores(GPU), scores("cpu"), distance_rounding(1 / STEPS))


@pytest.mark.parametrize("method", ["slta", "featcal", "actmat", "sftm"])
def test_a_merge_by_the_command_is_the_cpus(
    method: str, llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    recipe = write_recipe(llama, method, calibration=method in ("slta", "featcal"))
    merged = {}
    for place, options in {"host": ["--device", "cpu"], "device": ["--cuda"]}.items():
        run_python("-m", "mergekit.scripts.run_yaml", recipe, tmp_path / place, "--no-copy-tokenizer", *options)
        merged[place] = load_file(tmp_path / place / "model.safetensors")
    assert worst_error(merged["device"], merged["host"]) < TENSORS


def test_memory_that_runs_out_halves_the_batches(llama: Family, caplog: pytest.LogCaptureFixture) -> None:
    """Within the mean of the memory that large batches take and that small ones do."""
    tasks = [[sample * 150 for sample in samples] for samples in llama.token_ids()]

    def measured(batch_tokens: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        grams = families.measure(llama, "attn_mlp", tasks=tasks, device=GPU, batch_tokens=batch_tokens)
        return grams, torch.cuda.max_memory_reserved()

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


def test_processes_that_share_a_gpu_write_the_same_file(
    llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    recipe = write_recipe(llama, samples=6)
    files = []
    for count in (1, 2):
        files.append(tmp_path / f"{count}.safetensors")
        torchrun(count, "-m", "mergekit_slta", "calibrate", recipe, "-o", files[-1], "--cuda")
    one, two = map(Statistics.load, files)
    assert two.info == one.info
    assert all(gram_difference(two.grams[name], gram) < GRAMS for name, gram in one.grams.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_with_a_gpu_each_solve_what_one_alone_solves(
    llama: Family, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    """Through nccl, which no other test takes."""
    recipe = write_recipe(llama, "featcal", samples=6)
    merged = []
    for count in (1, 2):
        torchrun(count, "-m", "mergekit_slta", "merge", recipe, tmp_path / f"{count}", "--cuda")
        merged.append(load_file(tmp_path / f"{count}" / "model.safetensors"))
    assert worst_error(merged[1], merged[0]) < TENSORS
