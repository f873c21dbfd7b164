"""The architectures that the tests go through, and where mergekit or a level leaves one of them out."""

from __future__ import annotations

from support.families import ARCHITECTURES, UNSPLIT

LEVELS = ("model", "layer", "attn_mlp", "head_mlp", "linear")
EVERY = (*ARCHITECTURES, *UNSPLIT)

# People merge these now. Each is measured against the reference, merged and compared with the model
# made by hand, and solved for by featcal.
HYBRIDS = ("falcon_h1", "minimax", "zamba2")
CURRENT = (
    *("gemma3_vision", "gemma4_vision", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "llama4_vision", "mistral3"),
    *HYBRIDS,
)
# mergekit 0.1.5 asks for a tensor that their checkpoints do not have, or leaves some of their tensors out.
UNMERGED = ("gpt_neox", "falcon_alibi", "nemotron_h", "glm_moe_dsa")
