"""Float32 products are exact inside, whatever torch's settings are, and the settings are as before afterwards."""

import os
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_afresh
from support.slow import slow_but

from mergekit_slta.engine import precision
from mergekit_slta.engine.precision import EXACT, exact_products, relative_error

TESTS = Path(__file__).resolve().parents[1]
# What products may look like: one token or many, more inputs or more outputs, odd numbers.
LAYER_SIZES = [(1, 64, 64), (2, 100, 37), (7, 1024, 2816), (33, 256, 768), (300, 768, 256), (1024, 512, 1408)]
# oneDNN's names for what a processor can do: it then uses nothing newer, as on an older processor.
PROCESSORS = ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX10_1_512_AMX"]

needs_setting = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="needs torch's newer interface"
)


def largest_error() -> float:
    with exact_products():
        return max(relative_error(*size) for size in LAYER_SIZES)


@pytest.mark.parametrize("processor", slow_but(PROCESSORS[:1], PROCESSORS))
def test_products_of_all_sizes_and_layouts_are_exact_on_each_processor(processor: str) -> None:
    code = "from engine.test_precision import largest_error; print(largest_error())"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": processor, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < EXACT


@needs_setting
def test_a_kernel_that_rounds_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "EXACT", 1e-12)  # which no float32 product reaches
    precision._onednn_is_exact.cache_clear()
    mkldnn: Any = torch.backends.mkldnn
    with exact_products():
        assert mkldnn.matmul.fp32_precision == "ieee"
    precision._onednn_is_exact.cache_clear()


ROUNDED = """
import sys, torch
from mergekit_slta.engine.precision import EXACT, exact_products, relative_error
exec(sys.argv[1])
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

def settings():
    found = [matmul.fp32_precision, cudnn.conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
    try:
        return [*found, torch.get_float32_matmul_precision()]
    except RuntimeError:  # it refuses to say what was set by the newer interface
        return found

before = settings()
assert "tf32" in before or "bf16" in before
with exact_products():
    assert "tf32" not in (matmul.fp32_precision, cudnn.conv.fp32_precision)
    assert relative_error(7, 1024, 512) < EXACT
    torch.nn.functional.conv1d(torch.ones(1, 4, 9), torch.ones(4, 4, 3))
assert settings() == before
"""


@needs_setting
@pytest.mark.parametrize(
    "allowed",
    [
        "pass",  # convolutions, as torch has it
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
    ],
)
def test_nothing_is_rounded_however_that_was_allowed(allowed: str, forks: ForkServerContext) -> None:
    run_afresh(forks, ROUNDED, allowed)
