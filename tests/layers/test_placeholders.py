"""Made-up weights: the same products as with tensors of their values, in memory that does not grow with the model."""

from __future__ import annotations

import pytest
import torch
from support.memory import peak_of
from support.processes import run_python

from mergekit_slta.layers.placeholders import SMALL, SmallProducts, random_numbers, zeros

SHAPES = [(300, 400), (3, 200, 300), (400,), (4, 5)]


@pytest.mark.parametrize("fill", [zeros, random_numbers])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_with_made_up_weights_is_the_product_with_their_values(fill: object, shape: tuple[int, ...]) -> None:
    weight = fill({"w": torch.empty(shape, device="meta")}, torch.device("cpu"))["w"]  # type: ignore[operator]
    assert weight.shape == shape
    if weight.numel() > SMALL:
        assert weight.untyped_storage().nbytes() < weight.numel() * 4
    if weight.ndim < 2:
        return
    inputs = torch.randn(*shape[:-2], 2, shape[-1], generator=torch.Generator().manual_seed(0))
    bias = torch.randn(shape[-2])
    with SmallProducts():
        found = [inputs @ weight.mT, weight @ inputs.mT, weight.mT.clone() if fill is zeros else weight.mT]
        if weight.ndim == 2:
            found.append(torch.nn.functional.linear(inputs, weight, bias))
    whole = weight.contiguous()
    expected = [inputs @ whole.mT, whole @ inputs.mT, whole.mT]
    if weight.ndim == 2:
        expected.append(torch.nn.functional.linear(inputs, whole, bias))
    for own, other in zip(found, expected, strict=True):
        assert torch.allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (1,)])
def test_a_product_to_which_a_bias_is_added_copies_a_part_of_the_weights_at_a_time(batch: tuple[int, ...]) -> None:
    """As in GPT-2's layers and in the fused experts of GPT-OSS."""
    shape = (*batch, 8192, 8192)
    weight = zeros({"w": torch.empty(shape, device="meta")}, torch.device("cpu"))["w"]
    inputs, bias = torch.zeros(*batch, 2, 8192), torch.zeros(8192)
    add = torch.baddbmm if batch else torch.addmm

    def compute() -> None:
        with SmallProducts():
            add(bias, inputs, weight)

    compute()  # so that the threads and the libraries have their memory
    assert peak_of(compute) < weight.numel()  # a quarter of the matrix


DEEPSEEK = """
import transformers
from support.memory import PeakMemory, memory_of_this_process
from mergekit_slta.layers.trace import trace
from mergekit_slta.layers.submodules import layer_submodules
from mergekit_slta.layers.probe import padding_matters
from mergekit_slta.featcal.groups import groups_by_layer

config = transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])
with PeakMemory() as peak:
    decoder = trace(config)
    for level in ("layer", "attn_mlp", "head_mlp", "linear", "model"):
        for layer in decoder.one_of_each_kind():
            layer_submodules(decoder, level, layer)
    padding_matters(decoder, (3, 20))
    groups_by_layer(decoder)
print(peak.bytes, memory_of_this_process("VmHWM"))
"""


@pytest.mark.slow
def test_the_full_deepseek_v3_is_examined_in_less_than_a_gigabyte() -> None:
    done = run_python("-c", DEEPSEEK)
    assert done.returncode == 0, done.stderr
    peak, whole = map(int, done.stdout.split()[-2:])
    assert peak < 2**29
    assert whole < 2**30
