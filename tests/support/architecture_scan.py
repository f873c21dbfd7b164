"""What the plugin can do with every model type that transformers can build from a small configuration.

    python tests/support/architecture_scan.py [TYPE ...]

writes docs/architectures.md, or prints the rows of the types named. Nothing is downloaded: models are built without
weights, from each type's own default configuration with small sizes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from mergekit.architecture import arch_info_for_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from mergekit_slta.errors import first_line
from mergekit_slta.featcal.groups import groups_by_layer
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.submodules import fallbacks, layer_submodules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
LEVELS = ("layer", "attn_mlp", "head_mlp", "linear")
SECONDS = 120

# The sizes that a configuration's fields get, where it has fields of these names.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp", "d_ff", "ffn_hidden_size"), 48
    ),
    **dict.fromkeys(
        ("shared_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 16
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_latent_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("hidden_size_per_layer_input", "word_embed_proj_dim"), 32),
    "max_position_embeddings": 128,
}
GROUPED = ("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads", "num_kv_heads")
# What the default configurations lack to be a model, or keep from being small.
KNOBS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {"head_dim": 8, "num_key_value_heads": 2},
    "hy_v4": {"pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
}
# Models that see all tokens at once, or read what an encoder makes: no decoders, though registered as causal.
NO_DECODERS = {
    "bert-generation",
    "git",
    "trocr",
    "reformer",
    "xlm",
    "xlnet",
    "cpmant",
    *MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
DECODERS = {"openai-gpt", "gpt2"}


@dataclass
class Row:
    """What was found of a model type.

    Attributes:
        model_type: transformers' name of it.
        architecture: the class.
        decoder: whether it is a decoder-only language model.
        works: whether each level, and featcal, work without falling back.
        reasons: why they do not.
        known: whether mergekit has a definition of the architecture, rather than taking its tensors by their names.
    """

    model_type: str
    architecture: str
    decoder: bool
    works: dict[str, bool] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    known: bool = False


def small_decoder(model_type: str) -> Decoder:
    """A small model of a type; with the type's own sizes, but four layers deep, where that cannot be built.

    Raises:
        Exception: whatever the type's own code raises.
    """
    kind = CONFIG_MAPPING[model_type]
    known = _defaults(kind)
    sizes = {name: size for name, size in SIZES.items() if isinstance(known.get(name), int)}
    heads = known.get("num_attention_heads")
    sizes |= {name: 2 if known[name] != heads else 4 for name in GROUPED if isinstance(known.get(name), int)}
    depth = {name: size for name, size in sizes.items() if size == 4 and "layer" in name}
    error: Exception | None = None
    own = KNOBS.get(model_type, {})
    for arguments in (sizes | own, depth | own, depth, {}):
        try:
            decoder = Decoder(kind(**arguments, architectures=[_architecture(model_type)]))
            for layer in decoder.one_of_each_kind():
                layer_submodules(decoder, "layer", layer)
            return decoder
        except Exception as raised:
            error = error or raised
    assert error is not None
    raise error


def _defaults(kind: Any) -> dict[str, Any]:
    try:
        config = kind()
    except Exception:
        config = kind(num_hidden_layers=4)
    found = {}
    for name in set(SIZES) | set(GROUPED) | {"num_attention_heads"}:
        with contextlib.suppress(Exception):  # some configurations have such a field for each layer, not for the model
            found[name] = getattr(config, name, None)
    return found


def _architecture(model_type: str) -> str:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return names if isinstance(names, str) else names[0]


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def scan(model_type: str) -> Row:
    """Try a model type at all levels and with featcal."""
    row = Row(model_type, _architecture(model_type), _is_decoder(model_type))
    if not row.decoder:
        return row
    try:
        with _time_limit():
            decoder = small_decoder(model_type)
            row.known = arch_info_for_config(decoder.model.config) is not None
            for level in LEVELS:
                found = fallbacks(decoder, level)
                row.works[level] = not found
                row.reasons += [sentence for sentence in found if sentence not in row.reasons]
            groups_by_layer(decoder)
            row.works["featcal"] = True
    except Exception as error:
        row.reasons.append(first_line(error))
    gc.collect()
    return row


def _is_decoder(model_type: str) -> bool:
    if model_type in NO_DECODERS - DECODERS:
        return False
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:
        return True
    return not config.is_encoder_decoder and config.get_text_config() is config


def page(rows: list[Row]) -> str:
    """The page in Markdown."""
    columns = (*LEVELS, "featcal")
    lines = [
        "# Architectures",
        "",
        "Written by `python tests/support/architecture_scan.py`, from every model type that transformers "
        f"{transformers.__version__} registers for causal language modelling, each built without weights from its own "
        "default configuration with small sizes.",
        "A level that does not apply to some layers falls back to the next coarser one in these layers; the log and "
        "`mergekit-slta check` say so. Such a level has a – here, though it can be used.",
        "",
        *_shares(rows),
        "",
        f"| Type | Class | {' | '.join(columns)} | Known to mergekit |",
        f"| --- | --- |{' :-: |' * (len(columns) + 1)}",
    ]
    decoders = [row for row in rows if row.decoder]
    for row in decoders:
        marks = ["✓" if row.works.get(name) else "–" for name in columns]
        lines.append(
            f"| {row.model_type} | {row.architecture} | {' | '.join(marks)} | {'✓' if row.known else 'by names'} |"
        )
    lines += ["", "## What is left, and why", ""]
    lines += [f"- {row.model_type}: {reason}" for row in decoders for reason in row.reasons]
    others = [row.model_type for row in rows if not row.decoder]
    lines += ["", "## No decoders", "", "Encoders, encoder-decoders and models of several modules, though registered:"]
    lines += ["", ", ".join(others) + "."]
    return "\n".join(lines) + "\n"


def _shares(rows: list[Row]) -> list[str]:
    decoders = [row for row in rows if row.decoder]
    return [
        f"- `{name}`: {count} of {len(decoders)} decoders ({count / len(decoders):.0%})"
        for name in (*LEVELS, "featcal")
        for count in [sum(row.works.get(name, False) for row in decoders)]
    ]


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows = []
    for model_type in chosen:
        rows.append(scan(model_type))
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
