"""Float32 products are exact inside, whatever torch's settings are, and the settings are as before afterwards."""

from multiprocessing.context import ForkServerContext

import pytest
import torch
from support.processes import run_afresh
from support.rounding import rounding

ROUNDED = """
import sys, torch
from mergekit_slta.engine.precision import exact_products
exec(sys.argv[1])
matmul, conv, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn
owners = matmul, conv, mkldnn.matmul, mkldnn.conv

def settings():
    found = [owner.fp32_precision for owner in owners]
    try:
        return [*found, torch.get_float32_matmul_precision()]
    except RuntimeError:  # it refuses to say what was set by the newer interface
        return found

before = settings()
assert "tf32" in before or "bf16" in before
with exact_products():
    assert not {"tf32", "bf16"} & {owner.fp32_precision for owner in owners}
    one, other = torch.randn(7, 1024), torch.randn(1024, 512)
    exact = one.double() @ other.double()
    assert (one @ other - exact).norm() < float(sys.argv[2]) * exact.norm()
    torch.nn.functional.conv1d(torch.ones(1, 4, 9), torch.ones(4, 4, 3))
assert settings() == before
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="needs torch's newer interface")
@pytest.mark.parametrize(
    "allowed",
    [
        "pass",  # convolutions, as torch has it
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'bf16'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.set_float32_matmul_precision('medium')",
    ],
)
def test_nothing_is_rounded_however_that_was_allowed(allowed: str, forks: ForkServerContext) -> None:
    run_afresh(forks, ROUNDED, allowed, rounding(sums=1, terms=1024))
