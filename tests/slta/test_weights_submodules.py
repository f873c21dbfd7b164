"""The submodules of real decoders at each level, and which layers fall back to a coarser one."""

from typing import Any

import pytest
import torch
from support import families
from support.architecture_scan import small_decoder

from mergekit_slta.slta.weights import fallbacks, submodules


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("qwen4_exp_text", "Qwen4ExpForCausalLM"), ("dbrx", "DbrxForCausalLM")]
)
def test_a_child_that_ends_attention_and_feeds_the_mlp_apart_is_split_at_no_branch(
    model_type: str, architecture: str
) -> None:
    """Its norm before the MLP would take attention's weight."""
    decoder = small_decoder(model_type, architecture)
    found = fallbacks(decoder, "attn_mlp")
    assert {layer for fallback in found for layer in fallback.layers} == {*range(len(decoder))}
    assert {fallback.coarser for fallback in found} == {"layer"}


class Twice(torch.nn.Module):
    """A layer that calls its only child twice, so that nothing tells what either call adds."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm, self.map = layer.input_layernorm, layer.self_attn.o_proj

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states + self.map(self.norm(hidden_states + self.map(hidden_states)))


def test_a_layer_whose_branches_cannot_be_told_apart_falls_back_and_is_named() -> None:
    def change(layers: torch.nn.ModuleList) -> None:
        layers[1] = Twice(layers[1])

    decoder = families.traced(families.changed_llama(change))
    for level, parts in (("attn_mlp", ["layer.1"]), ("linear", ["layer.1.map"])):
        assert submodules(decoder, level, 1) == parts
    assert submodules(decoder, "attn_mlp", 0) == ["layer.0.attn", "layer.0.mlp"]
    assert fallbacks(decoder, "linear") == []
    for level in ("attn_mlp", "head_mlp"):
        (fallback,) = fallbacks(decoder, level)
        assert str(fallback).startswith(f"Level {level} falls back to level layer in layer 1 (Twice): its attention")


@pytest.mark.parametrize(
    ("architecture", "layer"), [("JetMoeForCausalLM", "JetMoeDecoderLayer"), ("RwkvForCausalLM", "RwkvBlock")]
)
def test_heads_that_cannot_be_told_apart_fall_back_to_branches(architecture: str, layer: str) -> None:
    decoder = small_decoder(architecture.removesuffix("ForCausalLM").lower(), architecture)
    assert submodules(decoder, "head_mlp", 0) == ["layer.0.attn", "layer.0.mlp"]
    (fallback,) = fallbacks(decoder, "head_mlp")
    assert str(fallback).startswith(f"Level head_mlp falls back to level attn_mlp in layers 0 to 3 ({layer}): its")
