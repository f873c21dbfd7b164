"""What the plugin can do with every model type that transformers can build from a small configuration.

    python tests/support/architecture_scan.py [TYPE ...]

writes the tables of docs/architectures.md. Nothing is downloaded: a small base model and two experts with random
weights are made of each type, merged by each method and level, written, loaded by transformers and compared tensor by
tensor. Of types that are named, the rows are printed and the page stays as it is. Some towers need ``timm``.
"""

import contextlib
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import families
from support.families import Family
from support.merging import State, by_reference, load, merged, solved, stored, wrong_tensors
from support.pages import DOCS, filled

from mergekit_slta.errors import first_line
from mergekit_slta.featcal.groups import find_groups, in_words
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import Role, linear_maps, tensor_roles, turned
from mergekit_slta.layers.trace import of_each_layer, trace
from mergekit_slta.models.checkpoint import weighted_sum
from mergekit_slta.models.layout import Layout, meta_model
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.weights import TensorWeights, fallbacks

PAGE = "architectures.md"
# What is tried of each type, and how it is marked.
LEVELS = ("layer", "attn_mlp", "head_mlp", "linear")
COLUMNS = (*LEVELS, "featcal", "actmat", "sftm")
MERGED, IN_PART, TRACED, NOT = "✓", "✓↓", "(✓)", "–"
# What transformers registers, as a heading and as the rest of the page call it; the first takes text alone.
KINDS = {
    "causal language models": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "models of images and text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
# What the reasons of a model type say, apart from the names of its own classes and layers.
FALLBACK = re.compile(r"Level (\w+) falls back to level (\w+) in layers? .+? \(\w+\): (.+)")
NO_HEADS = "it mixes tokens without known attention heads, as Mamba does"
MIXER = re.compile(r"it mixes tokens by .+ heads")
FEATCAL = "`featcal` gives most linear maps the values of `actmat`"
LARGEST = 100  # million parameters of a model that is merged
PROCESSES = 2

# The sizes that a configuration's fields get, where it has fields of these names; four layers make every kind of layer.
SIZES = families.SIZES | dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4)
AT_MOST = families.AT_MOST | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 3)
DEPTHS = ("depth", "num_hidden_layers", "num_layers", "layers", "encoder_layers", "n_layers")
GROUPED = ("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads", "num_kv_heads")


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


# What the default configurations lack to be a model, or keep from being small.
KNOBS: dict[str, dict[str, Any]] = {
    "falcon_h1": families.UNSPLIT["falcon_h1"][1],
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    **{name: {"head_dim": 8, "num_key_value_heads": 2} for name in ("ministral", "nemotron")},
    "qwen4_exp_text": {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "indexer_n_heads"), 2),
        **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "indexer_head_dim"), 8),
        "indexer_kv_heads": 1,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _mrope(2, 1, 1)}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **{name: {"rotary_dim": 4} for name in ("codegen", "gptj")},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "falcon": families.ARCHITECTURES["falcon_new"][1],
    "mamba2": {"num_heads": 8, "state_size": 8},
    "zamba2": families.UNSPLIT["zamba2"][1],
    "gemma3n_text": families.UNSPLIT["gemma3n"][1],
    "granitemoehybrid": families.ARCHITECTURES["granite_moe_hybrid"][1] | {"num_hidden_layers": families.LAYERS},
    "longcat_flash": families.UNSPLIT["longcat_flash"][1],
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    **{
        f"{name}_text": {"head_dim": 8, "rope_parameters": _mrope(2, 1, 1)}
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr_vl", "glm_ocr", "cosmos3_edge")
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "rope_parameters": _mrope(1, 1, 2)},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": _mrope(1, 1, 1, 1)},
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 4, "global_pool": ""},
        }
    },
    "gemma3n_vision": {"model_args": {"channel_multiplier": 0.1}},
    "muse_spark_audio": {"hidden_sizes": [32] * 4},
    "step3p5": {"sliding_window": 8},
    "dots3_note_vision_encoder": {"per_layer_config": None, "adapter_in_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32},
    "mistral4": {"head_dim": 16},
    "dots3_note_text": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads", "index_n_heads"), 4),
        **dict.fromkeys(("qk_nope_head_dim", "index_head_dim", "index_topk", "swa_qk_nope_head_dim"), 8),
        **dict.fromkeys(("kv_lora_rank", "shared_experts_intermediate_size"), 16),
    },
    "glm5_next_text": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "linear_num_heads", "index_n_heads"), 4),
        **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "linear_head_dim", "index_head_dim", "index_topk"), 8),
        **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 0),
        "index_kpool": 4,
    },
    "glm4v_text": {"rope_parameters": _mrope(2, 1, 1)},
    "glm4v_moe_text": {"rope_parameters": _mrope(1, 1, 0) | {"partial_rotary_factor": 0.5}},
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    **{
        f"inkling2{kind}": {"unpadded_vocab_size": families.SIZES["vocab_size"]}
        for kind in ("", "_text", "_loop", "_loop_text")
    },
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "granite_docling": {"vision_config": {"out_hidden_size": 32}},
}
# Models that see all tokens at once, or read what another model makes, or write no text (a protein's reader, a
# classifier, a robot's policy): no decoders, though registered as writers.
NO_DECODERS = {
    *("evolla", "shieldgemma2", "pi0", "bert-generation", "git", "trocr", "reformer", "xlm", "xlnet", "cpmant"),
    *("gemma4_assistant", "diffusion_gemma"),
    *(MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys() - {"openai-gpt", "gpt2"}),
}


@dataclass
class Row:
    """What was found of a model type."""

    model_type: str  # transformers' name of it
    architecture: str  # the class
    kind: str  # the key of ``KINDS`` that it is registered as
    decoder: bool = True  # whether its text model is a decoder-only language model
    works: dict[str, str] = field(default_factory=dict)  # the mark of each column
    in_part: list[str] = field(default_factory=list)  # levels that fall back in layers; ``featcal``, mostly the anchor
    reasons: list[str] = field(default_factory=list)  # why columns do not work, or in part
    seconds: float = 0.0  # of a processor


def small_configs(model_type: str, architecture: str) -> Iterator[transformers.PretrainedConfig]:
    """Configurations of a type with small towers, the smallest first; the last has the text model's own sizes."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    parts = {name: own for name in default.sub_configs if (own := getattr(default, name, None)) is not None}
    towers = {name: _smaller(own) for name, own in parts.items() if own is not text}
    for others in (towers, {}) if towers else ({},):
        for arguments in _sizes(text):
            with contextlib.suppress(Exception):  # whatever the type's own code raises for such sizes
                if text is default:
                    config = kind(**others | arguments)
                else:
                    place = next(name for name, own in parts.items() if own is text)
                    config = kind(**others | {place: type(text)(**arguments)} | KNOBS.get(model_type, {}))
                config.architectures = [architecture]
                yield config


def _smaller(config: Any) -> Any:
    """The configuration of a tower with small sizes, or as it is where its type does not take them."""
    wide = {"depth": 2, "image_size": 16, "patch_size": 8, "num_position_embeddings": 16}
    wide |= dict.fromkeys(("out_hidden_size", "adapter_out_dim", "text_hidden_size"), 32)
    own = {name: size for name, size in wide.items() if isinstance(getattr(config, name, None), int)}
    for arguments in (_sizes(config)[0] | own, KNOBS.get(config.model_type, {}) | own):
        with contextlib.suppress(Exception):
            return type(config)(**arguments)
    return config


def _shrink(config: transformers.PretrainedConfig) -> None:
    """Make each size outside the text model small, one after the other, as long as the model can still be built.

    Nothing but the text model is run, so that the sizes need not fit each other.
    """
    text = config.get_text_config()

    def outside(own: Any) -> Iterator[Any]:
        yield own
        for name in own.sub_configs:
            if (part := getattr(own, name, None)) is not None and part is not text:
                yield from outside(part)

    for own in (own for own in outside(config) if own is not text):
        for name, value in list(own.to_dict().items()):
            small = 2 if name in DEPTHS else 32
            if type(value) is int and value > small and not name.endswith(("_id", "_index")):
                setattr(own, name, small)
                if not _can_be_written(config):
                    setattr(own, name, value)


def _can_be_written(config: transformers.PretrainedConfig) -> bool:
    """Whether a configuration and what is read of its file describe the same model."""
    try:
        models = [meta_model(own) for own in (config, type(config).from_dict(config.to_dict()))]
    except Exception:  # whatever the type's own code raises
        return False
    first, second = ({name: tensor.shape for name, tensor in model.state_dict().items()} for model in models)
    return first == second


def small_decoder(model_type: str, architecture: str) -> Decoder:
    """A small model of a type; with the type's own sizes, but four layers deep, where that cannot be built.

    Raises:
        Exception: whatever the type's own code raises.
    """
    error: Exception | None = None
    for config in small_configs(model_type, architecture):
        try:
            trace(config)
            _shrink(config)
            return trace(config)
        except Exception as raised:
            error = error or raised
    assert error is not None
    raise error


def _sizes(config: Any) -> list[dict[str, Any]]:
    """The arguments to try for a configuration like this one, the smallest first."""
    known = families.numbers_of(config, {*SIZES, *AT_MOST, *GROUPED})
    sizes = {name: size for name, size in SIZES.items() if name in known}
    sizes |= {name: min(size, known[name]) for name, size in AT_MOST.items() if name in known}
    heads = known.get("num_attention_heads")
    sizes |= {name: 2 if known[name] != heads else 4 for name in GROUPED if name in known}
    depth = {name: size for name, size in sizes.items() if size == 4 and "layer" in name}
    own = KNOBS.get(config.model_type, {})
    return [sizes | own, depth | own, depth, {}]


def scan(case: tuple[str, str]) -> Row:
    """Try a model type, which is registered as a kind, at all levels and by all methods."""
    model_type, kind = case
    names = KINDS[kind][model_type]
    row, start = Row(model_type, names if isinstance(names, str) else names[0], kind), time.process_time()
    try:
        row.decoder = is_decoder(model_type, kind)
        if not row.decoder:
            return row
        try:
            decoder = small_decoder(model_type, row.architecture)
            config = decoder.model.config
            _trace_all(row, decoder)
        except Exception as error:  # it can still be merged by the methods that run nothing
            row.reasons.append(first_line(error))
            row.works |= dict.fromkeys((*LEVELS, "featcal"), NOT)
            config = next(small_configs(model_type, row.architecture))
        size = sum(parameter.numel() for parameter in meta_model(config).parameters()) / 1e6
        if size > LARGEST:
            row.reasons.append(f"not merged here: the smallest that was built has {size:.0f} million parameters.")
        else:
            with tempfile.TemporaryDirectory() as folder:
                _merge_all(row, config, Path(folder))
    except Exception as error:
        row.reasons.append(first_line(error))
    row.seconds = time.process_time() - start
    return row


def _trace_all(row: Row, decoder: Decoder) -> None:
    """Find the levels that fall back in some layers, and whether ``featcal`` solves most of the linear maps."""
    for level in LEVELS:
        found = fallbacks(decoder, level)
        row.works[level] = TRACED
        row.in_part += [level] if found else []
        row.reasons += list(map(str, found))
    row.works["featcal"] = TRACED
    if not _solves_most(decoder):
        row.in_part.append("featcal")
        kept = dict.fromkeys(in_words(maps.unsolved) for maps in of_each_layer(decoder, find_groups) if maps.unsolved)
        row.reasons.append(f"{FEATCAL}: {'; '.join(kept)}.")


def _merge_all(row: Row, config: transformers.PretrainedConfig, folder: Path) -> None:
    """Merge a family by every method and at every level."""
    family = families.make_family(folder, config, records=2, longest=10)
    states = [load(own)[0] for own in family.folders]
    said = load(family.base)[1]
    for column in COLUMNS:
        if row.works.get(column) == NOT:
            continue
        try:
            _merge(family, column, states, said, folder / column)
            row.works[column] = IN_PART if column in row.in_part else MERGED
        except Exception as error:
            row.works[column] = NOT
            row.reasons.append(f"{column}: {first_line(error)}")


def _merge(family: Family, column: str, states: list[State], said: dict[str, Any], folder: Path) -> None:
    """One merge, compared tensor by tensor.

    Raises:
        Exception: it fails, transformers does not load all of it, or a tensor differs from what it should be.
    """
    method, statistics = "slta" if column in LEVELS else column, folder / "statistics.safetensors"
    settings: dict[str, Any] = {"level": column, "statistics": str(statistics)} if method == "slta" else {}
    settings |= {"ridge": 0.1} if method == "featcal" else {}
    state, found = load(merged(family, method, folder / "out", **settings))
    wrong = [kind for kind in said if sorted(said[kind]) != sorted(found[kind])]
    assert not wrong, f"transformers reports {wrong}: {[sorted(found[kind])[:2] for kind in wrong]}"
    if method in ("actmat", "sftm"):
        roles = tensor_roles(meta_model(family.config))
        stores, written = [stored(own) for own in family.folders], stored(folder / "out")
        cut = Layout(meta_model(family.config), stores[0], {name: own.shape for name, own in stores[0].items()})

        def wanted(name: str) -> torch.Tensor:
            piece = cut.pieces.get(name)
            role = roles[piece.targets[0]] if piece else Role.OTHER
            return by_reference(stores, method, name, turned(role) if cut.turned(name) else role)

        differing = wrong_tensors(written, wanted, stores[0])
    elif method == "slta":
        differing = wrong_tensors(state, _weighted(family, column, states, statistics), states[0])
    else:
        differing = wrong_tensors(state, solved(family, folder / "solved", states), states[0])
    assert not differing, f"{len(differing)} tensors differ, such as {differing[0]}"


def _weighted(family: Family, level: str, states: list[State], statistics: Path) -> Callable[[str], torch.Tensor]:
    """The tensors of an ``slta`` merge, by the model's names, from its statistics."""
    solution = Statistics.load(statistics).solve(level)
    decoder = trace(family.config)
    weights = TensorWeights(decoder, level, solution.submodules, families.own_layout(decoder))
    base, *experts = states
    return lambda name: weighted_sum(base[name], list(zip((own[name] for own in experts), weights[name], strict=True)))


def _solves_most(decoder: Decoder) -> bool:
    """Whether featcal solves more than half of the tensors that hold linear maps."""
    every = set()
    for layer, module in enumerate(decoder.layers):
        names = decoder.layer_tensors[layer]
        every |= {names[m.weight] for m in linear_maps(module)}
    return len(every & families.solved_in_layers(decoder)) > len(every) / 2


def is_decoder(model_type: str, kind: str) -> bool:
    if model_type in NO_DECODERS:
        return False
    config = CONFIG_MAPPING[model_type]()
    if config.is_encoder_decoder or {"decoder", "text_encoder"} <= config.sub_configs.keys():
        return False
    text = config.get_text_config()
    if text.is_encoder_decoder:
        return False
    return text is config or kind != next(iter(KINDS))


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def parts(rows: list[Row]) -> dict[str, str]:
    """The generated parts of the page in Markdown."""
    decoders = {kind: [row for row in rows if row.kind == kind and row.decoder] for kind in KINDS}
    known = {row.model_type for of_kind in decoders.values() for row in of_kind}
    minutes = sum(row.seconds for row in rows) / 60
    whole = {kind: [row.model_type for row in of_kind if not row.reasons] for kind, of_kind in decoders.items()}
    rest = len({row.model_type for row in rows} - known)
    other = f"{rest} more types are registered, which are not decoder-only language models, and were not tried."
    tried = f"With transformers {transformers.__version__}, in {minutes:.0f} minutes on one core:"
    return {
        "counts": "\n\n".join([tried, "\n".join(_counts(decoders)), other]),
        "types": "\n\n".join(f"{kind.capitalize()}: {', '.join(names)}." for kind, names in whole.items()),
        "exceptions": "| model types | what | why |\n|---|---|---|\n"
        + "\n".join(_exceptions([row for of_kind in decoders.values() for row in of_kind])),
    }


def _counts(decoders: dict[str, list[Row]]) -> Iterator[str]:
    """A table of how many types merge at each level and by each method."""
    yield f"| | {' | '.join(decoders)} |"
    yield f"|---|{'---|' * len(decoders)}"
    for column in COLUMNS:
        cells = []
        for rows in decoders.values():
            marks = [row.works.get(column) for row in rows]
            cell = f"{marks.count(MERGED) + marks.count(IN_PART)} of {len(rows)}"
            cell += f" ({count} of them in part)" if (count := marks.count(IN_PART)) else ""
            cell += f" ({count} more traced)" if (count := marks.count(TRACED)) else ""
            cells.append(cell)
        yield f"| {'`slta`, ' * (column in LEVELS)}`{column}` | {' | '.join(cells)} |"


def _exceptions(rows: list[Row]) -> Iterator[str]:
    """A table row for each thing that does not work for a reason, with all model types that share it."""
    types: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        levels: dict[tuple[str, str], list[str]] = {}
        for reason in dict.fromkeys(row.reasons):
            why = MIXER.sub(NO_HEADS, reason.replace(row.architecture, "the model"))
            if fallback := FALLBACK.fullmatch(why):
                levels.setdefault((fallback[2], fallback[3]), []).append(f"`{fallback[1]}`")
                continue
            what = "only `actmat` and `sftm`" if row.works.get("actmat") == MERGED else "nothing"
            if FEATCAL in why:
                what, why = FEATCAL, "maps " + ", or ".join(re.findall(r"\((.+?)\)", why))
            ends = r" \(.*\)|, (?:so slta and featcal|as slta|so it is incomplete).*|: change or complete.*"
            why = re.sub(rf"^\w+: \S+/base: |{ends}", "", why)
            why = re.sub("lacks .* of the model", "lacks tensors of the model", why)
            types.setdefault((what, why), []).append(row.model_type)
        for (coarser, why), finer in levels.items():
            types.setdefault((f"{', '.join(finer)} → `{coarser}`", why), []).append(row.model_type)
    for (what, why), names in sorted(types.items(), key=lambda item: -len(item[1])):
        yield f"| {', '.join(dict.fromkeys(names))} | {what} | {why.removesuffix('.')} |"


def main() -> None:
    every = [(name, kind) for kind, names in KINDS.items() for name in sorted(names)]
    chosen = [case for case in every if case[0] in sys.argv[1:]] or every
    with multiprocessing.get_context("spawn").Pool(PROCESSES, _quiet) as pool:
        rows = list(tqdm(pool.imap(scan, chosen), total=len(chosen), unit="type"))
    if chosen is every:
        (DOCS / PAGE).write_text(filled(PAGE, parts(rows)), encoding="utf-8")
    else:
        print("\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
