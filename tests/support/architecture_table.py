"""The architectures and levels that tests/test_architectures.py goes through."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("model", "layer", "attn_mlp", "head_mlp", "linear")

# What people merge now, by the keys of ``families.MULTIMODAL`` and ``families.UNSPLIT``. Each is held to the tightest
# tolerance of Gram matrices, merged and compared with the model made by hand, and solved for by featcal.
HYBRIDS = ("falcon_h1", "minimax", "zamba2")
CURRENT = (
    "gemma3_vision",
    "gemma4_vision",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "llama4_vision",
    "mistral3",
    *HYBRIDS,
)


@dataclass(frozen=True)
class Row:
    """One architecture, or a variant that works differently.

    Attributes:
        name: what people call it.
        levels: the levels that apply to it.
        lacks: the tensor that mergekit 0.1.5 asks for and its checkpoints do not have, where mergekit cannot merge it.
        dropped: whether mergekit 0.1.5 leaves some of its tensors out of what it writes.
        headless: whether some layers mix tokens by something that has no heads, and fall back to their branches.
    """

    name: str
    levels: tuple[str, ...] = LEVELS
    lacks: str = ""
    dropped: bool = False
    headless: bool = False


ROWS = {
    "llama": Row("Llama"),
    "llama_dynamic": Row("Llama, `rope_type: dynamic`"),
    "mistral": Row("Mistral"),
    "qwen2": Row("Qwen2"),
    "qwen3": Row("Qwen3"),
    "gemma": Row("Gemma"),
    "gemma2": Row("Gemma 2"),
    "gemma3": Row("Gemma 3 (text)"),
    "phi": Row("Phi"),
    "phi3": Row("Phi-3"),
    "phi3_longrope": Row("Phi-3, `rope_type: longrope`"),
    "gpt2": Row("GPT-2"),
    "gpt_neox": Row("GPT-NeoX", lacks="attention.bias"),
    "gpt_neox_sequential": Row("GPT-NeoX, `use_parallel_residual: false`", lacks="attention.bias"),
    "falcon_7b": Row("Falcon, multi-query", lacks="lm_head.weight"),
    "falcon_new": Row("Falcon, new decoder, output head of its own"),
    "falcon_one_norm": Row("Falcon, new decoder, one norm", lacks="lm_head.weight"),
    "falcon_alibi": Row("Falcon, ALiBi", lacks="lm_head.weight"),
    "olmo": Row("OLMo"),
    "olmo2": Row("OLMo 2"),
    "cohere": Row("Cohere, `use_qk_norm: true`"),
    "cohere_without_qk_norm": Row("Cohere", lacks="self_attn.q_norm.weight"),
    "cohere2": Row("Cohere 2"),
    "starcoder2": Row("StarCoder 2"),
    "stablelm": Row("StableLM"),
    "stablelm_parallel": Row("StableLM, `use_parallel_residual: true`", lacks="post_attention_layernorm.weight"),
    "granite": Row("Granite"),
    "glm4": Row("GLM-4"),
    "arcee": Row("Arcee"),
    "apertus": Row("Apertus"),
    "mixtral": Row("Mixtral"),
    "qwen3_moe": Row("Qwen3-MoE"),
    "glm4_moe": Row("GLM-4-MoE"),
    "gpt_oss": Row("GPT-OSS"),
    "minicpm3": Row("MiniCPM3"),
    "jamba_dense": Row("Jamba without routed experts", headless=True),
    "lfm2": Row("LFM2", headless=True),
    "granite_moe_hybrid": Row("GraniteMoeHybrid", headless=True),
    "granite_hybrid_dense": Row(
        "GraniteMoeHybrid without routed experts", headless=True, lacks="block_sparse_moe.input_linear.weight"
    ),
    "bamba": Row("Bamba", headless=True),
    "bloom": Row("BLOOM"),
    "bloom_post": Row("BLOOM, `apply_residual_connection_post_layernorm: true`"),
    "openai_gpt": Row("OpenAI GPT"),
    "opt": Row("OPT"),
    "opt_post": Row("OPT, `do_layer_norm_before: false`"),
    "llama4": Row("Llama 4 (text)"),
    "falcon_h1": Row("Falcon-H1", headless=True),
    "gemma4": Row("Gemma 4 (text), `num_kv_shared_layers`"),
    "minimax": Row("MiniMax", headless=True),
    "zamba2": Row("Zamba2", headless=True),
    "mamba": Row("Mamba", headless=True),
    "nemotron_h": Row("Nemotron-H", headless=True, dropped=True),
    "gemma3n": Row("Gemma 3n (text)"),
    "longcat_flash": Row("LongCat-Flash"),
    "zaya": Row("Zaya", headless=True),
    "glm_moe_dsa": Row("GLM-MoE-DSA", dropped=True),
}
