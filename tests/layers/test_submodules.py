"""Which submodules a level has, and which levels are refused for which models."""

from typing import Any

import pytest
import transformers
from support import families

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.trace import trace
from mergekit_slta.levels import LEVELS


def test_submodules_come_in_the_order_of_the_forward_pass() -> None:
    decoder = families.skeleton("llama")
    assert decoder.submodules("layer", 2) == ["layer.2"]
    assert decoder.submodules("attn_mlp", 0) == ["layer.0.attn", "layer.0.mlp"]
    assert decoder.submodules("head_mlp", 1) == [*(f"layer.1.head.{head}" for head in range(4)), "layer.1.mlp"]
    assert decoder.submodules("linear", 0)[:2] == ["layer.0.self_attn.q_proj", "layer.0.self_attn.k_proj"]


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

# What it is that a model does -> its configuration, the levels that do not apply to it, and what is said of it.
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "a prompt before the tokens": (
        "CpmAntConfig",
        SMALL | {"dim_head": 8, "dim_ff": 48, "prompt_length": 4},
        LEVELS,
        "CpmAntForCausalLM hands its decoder layers other positions than the tokens'.*'merge_method: actmat'",
    ),
    "a change between layers": (
        "RwkvConfig",
        SMALL | {"rescale_every": 2},
        LEVELS,
        "RwkvForCausalLM changes the hidden states between its decoder layers.*'merge_method: actmat'",
    ),
    "logits from more than the last layer": (
        "Inkling2TextConfig",
        SMALL | {"num_experts": 4, "moe_intermediate_size": 16, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
        ("model",),
        "Inkling2ForCausalLM: it cannot compute its logits from .* alone .it needs those of earlier layers too.. Use",
    ),
}


def test_heads_that_cannot_be_told_apart_fall_back_to_branches() -> None:
    config = transformers.JetMoeConfig(**SMALL, kv_channels=8, num_local_experts=4, architectures=["JetMoeForCausalLM"])
    decoder = trace(config)
    assert decoder.submodules("head_mlp", 0) == ["layer.0.attn", "layer.0.mlp"]
    (fallback,) = decoder.fallbacks("head_mlp")
    assert str(fallback) == (
        "Level head_mlp falls back to level attn_mlp in layers 0 to 2 (JetMoeDecoderLayer): its heads cannot be told "
        "apart by its linear maps."
    )


@pytest.mark.parametrize("case", REFUSED)
def test_a_level_that_does_not_apply_is_refused_before_anything_is_measured(case: str) -> None:
    name, arguments, levels, words = REFUSED[case]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, name)(**arguments)
    model: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model.__name__]
    if levels == LEVELS:
        with pytest.raises(SltaError, match=words):
            trace(config)
        return
    decoder = trace(config)
    for level in levels:
        with pytest.raises(SltaError, match=words):
            decoder.submodules(level, 0)
    assert decoder.submodules("layer", 0) == ["layer.0"]
