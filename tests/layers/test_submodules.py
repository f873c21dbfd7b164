"""Which merging weights every tensor takes, against the table made by hand."""

from typing import Any

import pytest
import torch
import transformers
from support import families, reference
from support.synthetic import random_alpha

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.submodules import TensorWeights, layer_submodules
from mergekit_slta.levels import LEVELS

EXPERTS = 2


def opened(architecture: str) -> tuple[Any, Decoder]:
    config = families.config_of(architecture)
    model = families.random_model(config)
    config.architectures = [type(model).__name__]
    return model, Decoder(config)


def has_heads(layer: torch.nn.Module, split: reference.Split) -> bool:
    """Whether a layer mixes its tokens by attention."""
    return getattr(layer, split.output.partition(".")[0], None) is not None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_every_tensor_takes_the_weights_of_the_table(architecture: str, level: str) -> None:
    model, decoder = opened(architecture)
    split = reference.SPLITS[architecture]
    if level == "head_mlp" and not all(has_heads(layer, split) for layer in model.get_submodule(split.layers)):
        with pytest.raises(SltaError, match="no heads"):
            random_alpha(decoder, level)
        return
    alpha = random_alpha(decoder, level)
    for edges in ("base", "mean"):
        weights = TensorWeights(decoder, level, alpha, edges)
        for name, tensor in model.state_dict().items():
            found = weights[name]
            found = found.view(EXPERTS, *found.shape[1:], *[1] * (tensor.ndim + 1 - found.ndim))
            expected = reference.tensor_weights(name, tensor, model, alpha, level, split, edges)
            everywhere = torch.zeros(*tensor.shape, EXPERTS, dtype=torch.float64) + expected
            assert torch.allclose(found.movedim(0, -1).expand(*tensor.shape, EXPERTS), everywhere, atol=1e-12), name


def test_edges_take_the_mean_of_all_submodules_or_nothing() -> None:
    _, decoder = opened("llama")
    alpha = random_alpha(decoder, "attn_mlp")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert not TensorWeights(decoder, "attn_mlp", alpha)[name].any()
        mean = torch.stack(list(alpha.values())).mean(0)
        assert torch.allclose(TensorWeights(decoder, "attn_mlp", alpha, "mean")[name], mean)


def test_at_level_model_edges_are_ignored() -> None:
    _, decoder = opened("llama")
    alpha = random_alpha(decoder, "model")
    for edges in ("base", "mean"):
        for name in ("model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"):
            assert torch.equal(TensorWeights(decoder, "model", alpha, edges)[name], alpha["model"])


def test_layer_1_is_not_layer_11() -> None:
    config = families.config_of("llama", num_hidden_layers=12, architectures=["LlamaForCausalLM"])
    decoder = Decoder(config)
    alpha = random_alpha(decoder, "layer")
    weights = TensorWeights(decoder, "layer", alpha)
    for layer in (1, 10, 11):
        assert weights[f"model.layers.{layer}.mlp.up_proj.weight"] is alpha[f"layer.{layer}"]


def test_names_of_a_bare_bodys_checkpoint_are_known() -> None:
    _, decoder = opened("gpt2")
    alpha = random_alpha(decoder, "attn_mlp")
    weights = TensorWeights(decoder, "attn_mlp", alpha)
    for name in ("h.1.attn.c_attn.weight", "h.1.ln_2.weight"):
        assert torch.equal(weights[name], weights[f"transformer.{name}"])
        assert weights[name].any()


def test_submodules_come_in_the_order_of_the_forward_pass() -> None:
    _, decoder = opened("llama")
    assert layer_submodules(decoder, "layer", 2) == ["layer.2"]
    assert layer_submodules(decoder, "attn_mlp", 0) == ["layer.0.attn", "layer.0.mlp"]
    assert layer_submodules(decoder, "head_mlp", 1) == [*(f"layer.1.head.{head}" for head in range(4)), "layer.1.mlp"]
    assert layer_submodules(decoder, "linear", 0)[:2] == ["layer.0.self_attn.q_proj", "layer.0.self_attn.k_proj"]


SMALL: dict[str, Any] = {
    "vocab_size": families.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "pad_token_id": families.PAD,
}
BRANCHES = ("attn_mlp", "head_mlp", "linear")

# What it is that a model does -> its configuration, the levels that do not apply to it, and what is said of it.
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "heads that cannot be told apart": (
        "JetMoeConfig",
        SMALL | {"kv_channels": 8, "num_local_experts": 4},
        ("head_mlp",),
        "'level: head_mlp' does not apply to JetMoeForCausalLM: the heads of layer 0 cannot be told .*use attn_mlp",
    ),
    "more than hidden states from layer to layer": (
        "ZayaConfig",
        SMALL | {"num_experts": 4},
        LEVELS,
        "ZayaForCausalLM hands its decoder layers more of earlier layers than the hidden states.*'merge_method: sftm'",
    ),
    "a prompt before the tokens": (
        "CpmAntConfig",
        SMALL | {"dim_head": 8, "dim_ff": 48, "prompt_length": 4},
        LEVELS,
        "CpmAntForCausalLM hands its decoder layers other positions than the tokens'.*'merge_method: sftm'",
    ),
    "a change between layers": (
        "RwkvConfig",
        SMALL | {"rescale_every": 2},
        LEVELS,
        "RwkvForCausalLM changes the hidden states between its decoder layers.*'merge_method: sftm'",
    ),
    "logits from more than the last layer": (
        "Inkling2TextConfig",
        SMALL | {"num_experts": 4, "moe_intermediate_size": 16, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
        ("model",),
        "Inkling2ForCausalLM computes its logits from more than the output of its last decoder layer: use 'level: la",
    ),
    "a module that feeds no branch": (
        "MBartConfig",
        SMALL
        | {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
        | {"is_encoder_decoder": False, "is_decoder": True},
        BRANCHES,
        r"Layer 0 \(MBartDecoderLayer\) does not split into an attention and an MLP branch: use 'level: layer'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_level_that_does_not_apply_is_refused_before_anything_is_measured(case: str) -> None:
    name, arguments, levels, words = REFUSED[case]
    config = getattr(transformers, name)(**arguments)
    model: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model.__name__]
    decoder = Decoder(config)
    for level in levels:
        with pytest.raises(SltaError, match=words):
            layer_submodules(decoder, level, 0)
    assert set(levels) == set(LEVELS) or layer_submodules(decoder, "layer", 0) == ["layer.0"]
