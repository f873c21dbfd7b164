"""Made-up weights: the same products as with tensors of their values, in memory that does not grow with the model."""

from __future__ import annotations

import pytest
import torch
from support.processes import run_python

from mergekit_slta.layers.placeholders import SMALL, random_numbers, small_products, zeros

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
    with small_products():
        found = [inputs @ weight.mT, weight @ inputs.mT, weight.mT.clone() if fill is zeros else weight.mT]
        if weight.ndim == 2:
            found.append(torch.nn.functional.linear(inputs, weight, bias))
    whole = weight.contiguous()
    expected = [inputs @ whole.mT, whole @ inputs.mT, whole.mT]
    if weight.ndim == 2:
        expected.append(torch.nn.functional.linear(inputs, whole, bias))
    for own, other in zip(found, expected, strict=True):
        assert torch.allclose(own, other, atol=1e-5)


DEEPSEEK = """
import transformers
from support.memory import PeakMemory, memory_of_this_process
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.submodules import layer_submodules
from mergekit_slta.layers.probe import padding_matters
from mergekit_slta.featcal.groups import groups_by_layer

config = transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])
with PeakMemory() as peak:
    decoder = Decoder(config)
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
