"""Products of the faster kernel, only where it is exact, and only for as long as asked."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from support.processes import run_afresh
from support.slow import slow_but
from torch.nn import functional

from mergekit_slta.layers import products
from mergekit_slta.layers.products import EXACT, errors, exact_products

TESTS = Path(__file__).resolve().parents[1]
# What products may look like: one token or many, more inputs or more outputs, odd numbers.
LAYER_SIZES = [(1, 64, 64), (2, 100, 37), (7, 1024, 2816), (33, 256, 768), (300, 768, 256), (1024, 512, 1408)]


def largest_error() -> float:
    with exact_products():
        return max(error for size in LAYER_SIZES for error in errors(*size))


def test_products_of_all_sizes_and_layouts_are_exact_inside() -> None:
    assert largest_error() < EXACT


# oneDNN's names for what a processor can do: it then uses nothing newer, as on an older processor.
PROCESSORS = ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX10_1_512_AMX"]


@pytest.mark.parametrize("processor", slow_but(PROCESSORS[:2], PROCESSORS))
def test_products_are_exact_on_other_processors(processor: str) -> None:
    code = "from layers.test_products import largest_error; print(largest_error())"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": processor, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < EXACT


needs_setting = pytest.mark.skipif(products._settings() is None, reason="needs torch's newer interface")


@needs_setting
@pytest.mark.parametrize("exact", [True, False])
def test_the_settings_are_as_before_afterwards(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn_is_exact", lambda: exact)
    settings = products._settings()
    before = settings.fp32_precision
    with exact_products():
        assert (settings.fp32_precision == "bf16") == exact
    assert settings.fp32_precision == before


NO_TF32 = """
import sys, torch
from mergekit_slta.layers.products import exact_products
exec(sys.argv[1])
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

def settings():
    found = [matmul.fp32_precision, cudnn.conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
    try:
        return [*found, torch.get_float32_matmul_precision()]
    except RuntimeError:  # it refuses to say what was set by the newer interface
        return found

before = settings()
assert "tf32" in before
with exact_products():
    assert "tf32" not in (matmul.fp32_precision, cudnn.conv.fp32_precision)
    torch.nn.functional.conv1d(torch.ones(1, 4, 9), torch.ones(4, 4, 3))
assert settings() == before
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="needs torch's newer interface")
@pytest.mark.parametrize(
    "allowed",
    [
        "pass",  # convolutions, as torch has it
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
    ],
)
def test_a_gpu_rounds_nothing_however_that_was_allowed(allowed: str, forks: ForkServerContext) -> None:
    run_afresh(forks, NO_TF32, allowed)


@needs_setting
def test_short_attention_is_computed_by_torchs_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN takes twice as long for it, and it is as exact."""
    monkeypatch.setattr(products, "_onednn_is_exact", lambda: True)
    settings, attention = products._settings(), functional.scaled_dot_product_attention
    used = []

    def noted(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        used.append(settings.fp32_precision)
        return attention(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    with exact_products():
        for tokens in (products.FEW_TOKENS - 1, products.FEW_TOKENS):
            query, key, value = (torch.randn(2, 3, tokens, 16) for _ in range(3))
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            assert settings.fp32_precision == "bf16"
            if tokens < products.FEW_TOKENS:  # on some processors bfloat16 is what the others are rounded to
                exact = attention(query.double(), key.double(), value.double(), is_causal=True)
                assert (found - exact).norm() < EXACT * exact.norm()
    assert used == ["ieee", "bf16"]
    assert functional.scaled_dot_product_attention is noted


@needs_setting
def test_threads_leave_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits, else it would leave behind what the first one has changed."""
    monkeypatch.setattr(products, "_onednn_is_exact", lambda: True)
    settings, attention = products._settings(), functional.scaled_dot_product_attention
    before = settings.fp32_precision

    def work(start: float) -> None:
        time.sleep(start)
        with exact_products():
            time.sleep(0.2)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0.0, 0.1)))
    assert settings.fp32_precision == before and functional.scaled_dot_product_attention is attention


@needs_setting
def test_a_kernel_that_rounds_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "EXACT", 1e-12)  # which no float32 product reaches
    products._onednn_is_exact.cache_clear()
    before = products._settings().fp32_precision
    with exact_products():
        assert products._settings().fp32_precision == before
    products._onednn_is_exact.cache_clear()


def test_a_torch_without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_settings", lambda: None)
    with exact_products():
        assert max(errors(*LAYER_SIZES[-1])) < EXACT


@needs_setting
@pytest.mark.parametrize("rounded", products.SIZES)
def test_one_rounded_product_is_enough_to_change_nothing(
    rounded: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor whose kernel for one size rounds the factors to bfloat16."""

    monkeypatch.setattr(products, "errors", lambda *size: [2e-3 if size == rounded else 2e-7])
    products._onednn_is_exact.cache_clear()
    assert not products._onednn_is_exact()
    products._onednn_is_exact.cache_clear()
