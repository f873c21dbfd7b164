"""Tiny random model families on disk: a base model and experts as Hugging Face folders, with a tokenizer and data."""

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import torch
import transformers
import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from support.actmat_reference import merged_tensor
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from mergekit_slta.engine import loop
from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.featcal.groups import find_groups
from mergekit_slta.featcal.merge import FeatureMerge, SolvedModel
from mergekit_slta.host import patches
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import Role, tensor_roles
from mergekit_slta.layers.trace import of_each_layer, tail_problem, trace
from mergekit_slta.models import headers
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.layout import Layout
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.grams import Calibration

# transformers 5.24's Llama 4 with a vision tower reads this field of its language model's output, which has none.
setattr(MoeCausalLMOutputWithPast, "image_outputs", None)  # noqa: B010, because mypy knows no such field

PAD, BOS, EOS = 0, 1, 2
ALPHABETS = ("abcdefghi ", "jklmnopqr ", "stuvwxyz0 ", "123456789 ", "0a1b2c3d4 ")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?=[]\n"
VOCABULARY = 64
LAYERS = 3

# The numbers that a configuration's fields get, where it has fields of these names.
SIZES: dict[str, int] = {
    name: size
    for size, names in {
        128: "max_position_embeddings",
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
        48: "intermediate_size ffn_dim n_inner intermediate_size_mlp d_ff dff ffn_hidden_size",
        32: "hidden_size d_model n_embd embedding_size emb_dim hidden_size_per_layer_input word_embed_proj_dim",
        16: "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "moe_intermediate_size moe_hidden_size expert_ffn_hidden_size moe_latent_size "
        "q_lora_rank kv_lora_rank o_lora_rank laurel_rank",
        8: "head_dim global_head_dim v_head_dim qk_nope_head_dim attention_head_dim qk_rope_head_dim swa_head_dim "
        "swa_v_head_dim linear_key_head_dim linear_value_head_dim "
        "mamba_d_state mamba_d_head mamba_n_heads mamba_chunk_size "
        "mamba_head_dim mamba_num_heads n_mamba_heads ssm_state_size chunk_size",
        4: "num_attention_heads n_head num_heads n_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts",
        LAYERS: "num_hidden_layers num_layers n_layer n_layers",
        2: "num_key_value_heads linear_num_key_heads linear_num_value_heads",
        1: "n_group topk_group mamba_n_groups n_groups",
    }.items()
    for name in names.split()
}
# Those of the towers beside a text model.
VISION: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "image_size", "num_position_embeddings"), 16),
    # As many layers as the language tower has, which must not be taken for it.
    **dict.fromkeys(("num_hidden_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "patch_size": 8,
    "out_hidden_size": 32,
}
# Those that must not grow.
AT_MOST = dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2)

_HALF_SLIDE = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_WINDOW = {"sliding_window": 4}
_LATER_LAYERS_SLIDE = _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
# Frequencies that change with a sample's length, some samples being shorter than this and some longer.
ORIGINAL_CONTEXT = 8
_LONGROPE = {
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}
_FALCON = {"ffn_hidden_size": 128}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LATENT = {"q_lora_rank": 12, "num_key_value_heads": 4}

Table = dict[str, tuple[str, dict[str, Any]]]

# Key -> the class of the configuration, and what it has beside the sizes above. Every mechanism that moves a branch has
# an entry: grouped heads, parallel branches, norms after branches, scaled branches, masks per layer, fused projections
# and mixtures.
ARCHITECTURES: Table = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", _WINDOW),
    "qwen2": ("Qwen2Config", _LATER_LAYERS_SLIDE),
    "qwen3": ("Qwen3Config", _LATER_LAYERS_SLIDE | {"head_dim": 16}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", _SLIDING | {"attn_logit_softcapping": 1.0}),
    "gemma3": ("Gemma3TextConfig", _SLIDING),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", _WINDOW),
    "phi3_longrope": ("Phi3Config", _LONGROPE),
    "gpt2": ("GPT2Config", {"n_inner": None, "pad_token_id": None}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "falcon_new": (
        "FalconConfig",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "falcon_alibi": ("FalconConfig", _FALCON | {"alibi": True, "parallel_attn": False, "multi_query": False}),
    "olmo2": ("Olmo2Config", {}),
    "cohere": ("CohereConfig", {"use_qk_norm": True}),
    "mixtral": ("MixtralConfig", _WINDOW),
    "qwen3_moe": ("Qwen3MoeConfig", _LATER_LAYERS_SLIDE),
    "glm4_moe": ("Glm4MoeConfig", {"first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True}),
    "gpt_oss": ("GptOssConfig", _SLIDING),
    "jamba_dense": (
        "JambaConfig",
        {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1}
        | {"mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "granite_moe_hybrid": (
        "GraniteMoeHybridConfig",
        {"residual_multiplier": 0.4, "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "logits_scaling": 4.0}
        | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 32},
    ),
}

# Decoders whose layers are no plain sum of two branches: sums inside a branch's module or on a view, norms after the
# sum, inputs for each layer, two mixers side by side, one branch only, several hidden states per token, a value for
# the next layer beside the hidden states.
UNSPLIT: Table = {
    "bloom": ("BloomConfig", {}),
    "mamba": ("MambaConfig", {"state_size": 4, "intermediate_size": 64}),
    "nemotron_h": ("NemotronHConfig", {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    "opt": ("OPTConfig", {}),
    "llama4": ("Llama4TextConfig", {"attention_chunk_size": 8}),
    "falcon_h1": ("FalconH1Config", {"mamba_d_ssm": 64}),
    "gemma4": (
        "Gemma4TextConfig",
        _HALF_SLIDE
        | {"sliding_window": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
        | {"head_dim": 8, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    # Post-norm sums with factors, linear attention and a mixture.
    "minimax": (
        "MiniMaxConfig",
        _LINEAR
        | {"head_dim": 8, "block_size": 16}
        | {f"{part}_alpha_factor": 0.9 for part in ("full_attn", "linear_attn", "mlp")}
        | {f"{part}_beta_factor": 1.1 for part in ("full_attn", "linear_attn", "mlp")},
    ),
    # Two layers share an attention and an MLP.
    "zamba2": (
        "Zamba2Config",
        {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1}
        | {"num_key_value_heads": 4, "attention_head_dim": 16, "adapter_rank": 4, "use_mem_rope": True},
    ),
    # Two attentions and two MLPs in lists, a mixture beside them, some of whose experts return their input.
    "longcat_flash": ("LongcatFlashConfig", _LATENT | {"zero_expert_num": 2, "expert_ffn_hidden_size": 12}),
    "zaya": ("ZayaConfig", {"router_hidden_size": 16}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        _LATENT
        | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 1}
        | {"indexer_types": ["full", "shared", "full"]},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        _HALF_SLIDE
        | {"intermediate_size": [48] * 4, "altup_num_inputs": 2, "laurel_rank": 4, "hidden_size_per_layer_input": 8}
        | {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    ),
}

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INTERLEAVED = _MROPE | {"mrope_interleaved": True}
_QWEN3_5 = {
    # The norm after the linear attention magnifies what nearly cancels; a larger epsilon bounds that.
    "text_config": {"rms_norm_eps": 0.03, "rope_parameters": _INTERLEAVED | {"partial_rotary_factor": 1.0}}
    | {"linear_num_value_heads": 4}
    | _LINEAR
}

# Language towers inside multimodal models.
MULTIMODAL: Table = {
    "gemma3_vision": (
        "Gemma3Config",
        {"text_config": _SLIDING, "vision_config": {"vision_use_head": False}, "mm_tokens_per_image": 4},
    ),
    "gemma4_vision": (
        "Gemma4Config",
        {
            "text_config": UNSPLIT["gemma4"][1],
            "vision_config": {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8},
        },
    ),
    "qwen3_5": ("Qwen3_5Config", _QWEN3_5),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", _QWEN3_5),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {"text_config": {"rope_parameters": _INTERLEAVED}, "vision_config": {"deepstack_visual_indexes": [0, 1, 2]}},
    ),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", {"text_config": {"rope_parameters": _MROPE}}),
    # Prompts beside images are seen as a whole, text alone is not.
    "paligemma": ("PaliGemmaConfig", {"projection_dim": 32}),
    "llama4_vision": (
        "Llama4Config",
        {
            "text_config": UNSPLIT["llama4"][1],
            "vision_config": {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        },
    ),
    "mistral3": ("Mistral3Config", {}),
}


# Models that are no decoders.
ENCODERS: Table = {
    "t5": ("T5Config", {"d_kv": 8, "num_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "clip_vision": (
        "CLIPVisionConfig",
        {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
    ),
}

EVERY = (*ARCHITECTURES, *UNSPLIT)
# People merge these now. Each is measured against the reference, merged and compared with the model made by hand, and
# solved for by featcal.
CURRENT = (
    *("gemma3_vision", "gemma4_vision", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "llama4_vision", "mistral3"),
    *("falcon_h1", "minimax", "zamba2"),
)


def model_class(config: PretrainedConfig) -> Any:
    """What transformers makes the model of a configuration with: a class for text alone, for images too, or others."""
    kinds: list[Any] = [AutoModelForCausalLM] if config.get_text_config() is config else []
    kinds += [transformers.AutoModelForImageTextToText, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel]
    return next(kind for kind in kinds if type(config) in kind._model_mapping)


def config_of(architecture: str, **changes: Any) -> PretrainedConfig:
    """The tiny configuration of an entry of one of the tables above, with changed fields."""
    name, own = (ARCHITECTURES | UNSPLIT | MULTIMODAL | ENCODERS)[architecture]
    return small_config(name, **own | changes)


def small_config(name: str, **own: Any) -> PretrainedConfig:
    """A tiny configuration of a class, with fields of its own."""
    kind = getattr(transformers, name)
    config: PretrainedConfig = kind(**_with_sizes(kind(), own))
    config.architectures = [model_class(config)._model_mapping[type(config)].__name__]
    return config


def _with_sizes(default: PretrainedConfig, own: Mapping[str, Any], sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    """The arguments of a configuration like a default one: the sizes of its fields and of its parts' fields."""
    text = default.get_text_config()
    if text is default:
        known = numbers_of(default, [*sizes, *AT_MOST])
        small = sizes | {name: min(most, known[name]) for name, most in AT_MOST.items() if name in known}
        tokens = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS} if sizes is SIZES else {}
        return {default.attribute_map.get(name, name): small[name] for name in known} | tokens | dict(own)
    parts = {
        name: getattr(default, name) or kind()
        for name, kind in default.sub_configs.items()
        if name in own or getattr(default, name, None) is not None
    }
    return dict(own) | {
        name: _with_sizes(part, own.get(name, {}), SIZES if part is text else VISION) for name, part in parts.items()
    }


def numbers_of(config: PretrainedConfig, names: Iterable[str]) -> dict[str, int]:
    """The numbers that a configuration is given under some names; what it computes from others is left out."""
    given, found = {*config.to_dict(), *config.attribute_map}, {}
    for name in names:
        with suppress(Exception):  # some configurations have such a field for each layer, not for the model
            if name in given and isinstance(value := getattr(config, name, None), int):
                found[name] = value
    return found


def skeleton(architecture: str, **changes: Any) -> Decoder:
    """The decoder of an entry that ``config_of`` knows, with changed fields, without weights."""
    return trace(config_of(architecture, **changes))


def changed_llama(change: Callable[[torch.nn.ModuleList], object]) -> Any:
    """A class of models whose layers are a Llama's, changed."""

    class Model(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            change(self.model.layers)

    return Model


def traced(kind: Any) -> Decoder:
    """The decoder of a class of Llama models, without weights."""
    with torch.device("meta"):
        model = kind(config_of("llama")).eval()
    return trace(model.config, built=model)


@dataclass(frozen=True)
class Family:
    """A base model, its experts and their calibration data, on disk."""

    base: Path
    experts: tuple[Path, ...]  # T in all
    data: tuple[Path, ...]  # a ``.jsonl`` file per expert, its records ``{"text": ...}``
    config: PretrainedConfig  # the base model's

    @property
    def folders(self) -> tuple[Path, ...]:
        """The base model's folder, then the experts'."""
        return (self.base, *self.experts)

    def model(self, index: int) -> torch.nn.Module:
        """The base model (0) or an expert (1 ... T) as it is on disk, in float64."""
        return load_model(self.folders[index])

    def models(self) -> list[torch.nn.Module]:
        """The base model and the experts in float64."""
        return [load_model(folder) for folder in self.folders]

    def token_ids(self, samples: int = 1000, max_tokens: int = 512, seed: int = 0) -> list[list[list[int]]]:
        """Each expert's calibration samples, drawn as the recipe's settings say."""
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        tasks = []
        for file in self.data:
            texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
            order = random.Random(seed).sample(range(len(texts)), len(texts))[:samples]
            tasks.append([tokenizer(texts[index])["input_ids"][:max_tokens] for index in order])
        return tasks


def make_family(
    folder: Path,
    architecture: str | PretrainedConfig = "llama",  # an entry that ``config_of`` knows, or a configuration
    *,
    experts: int = 2,
    dtype: torch.dtype = torch.float32,  # the checkpoints'
    scale: float = 0.1,  # each task vector's norm relative to the weights', tensor by tensor, before it is rounded
    touch: Callable[[str], bool] = lambda name: True,  # which tensors the experts change, by the model's names
    records: int = 6,  # of each expert
    longest: int = 20,  # the most characters of a record; the shortest has three
    chat_template: str | None = None,
) -> Family:
    """Write random models to the folders ``base``, ``expert0`` ..., and their records to ``task0.jsonl`` ..."""
    config = config_of(architecture) if isinstance(architecture, str) else architecture
    generator = torch.Generator().manual_seed(0)
    base = random_model(config, generator)
    shared = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in _floats(base).items()}
    _save(base, dtype, folder / "base", chat_template)
    for index in range(experts):
        expert = copy.deepcopy(base)
        for name, tensor in _floats(expert).items():
            own = torch.randn(tensor.shape, generator=generator)
            # A direction in common and different lengths make merging weights that differ from 1/T.
            direction = (own + 0.5 * shared[name]) * (1 + 0.5 * index)
            if touch(name):
                tensor.add_(direction * (scale * tensor.norm() / direction.norm()) * (1 + 0.5 * index))
        _save(expert, dtype, folder / f"expert{index}", chat_template)
    data = tuple(write_records(folder / f"task{index}.jsonl", index, records, longest) for index in range(experts))
    folders = tuple(folder / f"expert{index}" for index in range(experts))
    return Family(folder / "base", folders, data, AutoConfig.from_pretrained(folder / "base"))


def random_model(config: PretrainedConfig, generator: torch.Generator | None = None) -> Any:
    """A model whose attention is not uniform and whose norms and biases are not all ones and zeros."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some modules draw their first values
        model = model_class(config).from_config(config, dtype=torch.float32)
    generator = generator or torch.Generator().manual_seed(0)
    for tensor in _floats(model).values():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)
        else:
            tensor.add_(0.1 * noise)
    return model.eval()


def write_records(path: Path, task: int, records: int = 6, longest: int = 20, seed: int = 0) -> Path:
    """Write a task's calibration records: texts of different lengths over the task's own letters."""
    drawn = random.Random(f"{seed}-{task}")
    letters = ALPHABETS[task % len(ALPHABETS)]
    texts = ["x" + "".join(drawn.choices(letters, k=drawn.randint(2, longest - 1))) for _ in range(records)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def wide_tasks(tasks: int, samples: int = 15) -> list[list[list[int]]]:
    """Samples of random tokens of the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    lengths = [40 + 5 * (index % 5) for index in range(samples)]
    return [
        [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
        for _ in range(tasks)
    ]


def write_tokenizer(folder: Path, chat_template: str | None = None) -> None:
    """A character-level tokenizer that adds <s> and </s>."""
    save_tokenizer(folder, character_tokenizer(("<pad>", "<s>", "</s>", *CHARACTERS)), chat_template)


def character_tokenizer(tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """One that adds <s> and </s>; a token's id is its place."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(BPE(vocabulary, []))
    ends = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return backend


def save_tokenizer(folder: Path, backend: tokenizers.Tokenizer, chat_template: str | None, **settings: Any) -> None:
    usual: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "model_max_length": 128}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **usual | settings)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def open_model(folder: Path, **settings: Any) -> Any:
    """A model from its folder, as transformers loads it."""
    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, **settings)


def load_model(folder: Path) -> torch.nn.Module:
    """A model from its folder, in float64 and evaluation mode."""
    # Falcon's eager attention adds ALiBi twice, once in the mask and once itself.
    attention = "sdpa" if getattr(AutoConfig.from_pretrained(folder), "alibi", False) else "eager"
    settings = {"attn_implementation": attention, "experts_implementation": "eager"}
    model: torch.nn.Module = open_model(folder, dtype=torch.float64, **settings)
    return model.double().eval()


def recipe(
    family: Family,
    method: str = "slta",
    *,
    experts: Sequence[int] | None = None,  # which ones, in the recipe's order; all by default
    calibration: bool = True,  # whether each expert names its data
    per_expert: dict[str, Any] | None = None,  # further parameters of every expert
    keep: dict[str, Any] | None = None,  # of the base model, whose task has the last expert's data; else it has no task
    dtype: str | None = "float32",
    out_dtype: str | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """A recipe as a dictionary; ``parameters`` are the shared ones."""
    models = []
    for index in experts if experts is not None else range(len(family.experts)):
        own = {"calibration": str(family.data[index])} if calibration else {}
        models.append({"model": str(family.experts[index]), "parameters": own | (per_expert or {})})
    if keep is not None:
        models.append({"model": str(family.base), "parameters": {"calibration": str(family.data[-1])} | keep})
    content = {"merge_method": method, "base_model": str(family.base), "models": models, "parameters": parameters}
    return content | {"dtype": dtype} | ({"out_dtype": out_dtype} if out_dtype else {})


def write_recipe(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def merge(content: dict[str, Any], out: Path, **options: Any) -> Path:
    """Run a recipe through mergekit in this process; ``options`` are those of ``MergeOptions``."""
    patches.install()
    usual: dict[str, Any] = {"quiet": True, "write_model_card": False, "copy_tokenizer": False}
    run_merge(MergeConfiguration.model_validate(content), str(out), MergeOptions(**usual | options))
    return out


def checkpoint(folder: Path | str) -> Checkpoint:
    """A model as the plugin reads it."""
    return Checkpoint(headers.open_model(ModelReference.model_validate(str(folder))))


def checkpoints(folders: Sequence[Path]) -> list[Checkpoint]:
    return [checkpoint(folder) for folder in folders]


def batches_of(positions: int) -> AbstractContextManager[object]:
    """Batches of at most this number of token positions; 0 is what fits."""
    fixed = mock.patch.object(loop, "fitting_batch", return_value=positions)
    return fixed if positions else nullcontext()


def measure(
    family: Family, *levels: str, tasks: Any = None, device: str = "cpu", batch_tokens: int = 0, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Calibrate on all of the family's records, or on ``tasks``; ``arguments`` are those of ``pass_layers``."""
    decoder = trace(family.config, device=device)
    with batches_of(batch_tokens):
        of_all = Calibration(decoder, checkpoints(family.folders), tasks or family.token_ids(), Ranks(), levels)
        return loop.pass_layers(of_all, **arguments)


def feature_merge(
    family: Family, folder: Path, *, tasks: Any = None, device: str = "cpu", batch_tokens: int = 0, **arguments: Any
) -> SolvedModel:
    """Solve a feature merge into a folder, on all of the family's records or on ``tasks``, or go on with it.

    ``arguments`` are further ones of ``FeatureMerge``; the ridge is 0.1 by default.
    """
    models = checkpoints(family.folders)
    decoder, partial = trace(family.config, device=device), Partial(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial.begin({}, Ranks())
    counts, tasks = [1.0] * len(family.experts), tasks or family.token_ids()
    weights = [torch.ones(len(row)) for samples in tasks for row in samples]
    head = None if tail_problem(decoder) else decoder.head
    arguments = {"ridge": 0.1, "head": head, "token_weights": weights} | arguments
    with batches_of(batch_tokens):
        merge = FeatureMerge(decoder, models, tasks, Ranks(), counts, partial=partial, **arguments)
        partial.write(len(decoder), loop.pass_layers(merge, partial=partial))
    return SolvedModel(decoder, partial, own_layout(decoder))


def own_layout(decoder: Decoder) -> Layout:
    """A checkpoint that stores the model's own tensors."""
    return Layout(decoder.model, decoder.model.state_dict())


def solved_in_layers(decoder: Decoder) -> set[str]:
    """The tensors of the layers that a feature merge solves, by the model's names."""
    layers = enumerate(of_each_layer(decoder, find_groups))
    maps = [(decoder.layer_tensors[at], m) for at, own in layers for group in own.groups for m in group.maps]
    return {names[key] for names, m in maps for key in (m.weight, m.bias) if key}


def actmat_state(family: Family) -> dict[str, torch.Tensor]:
    """Every tensor of the anchor of a feature merge, by the model's names: the naive merge of the layers' maps."""
    decoder, models = trace(family.config), family.models()
    base, *experts = (model.state_dict() for model in models)
    edges, roles = dict.fromkeys(decoder.edge_tensors, Role.OTHER), tensor_roles(decoder.model)
    roles = edges | {name: roles[name] for names in decoder.layer_tensors for name in names.values()}
    merged = {n: merged_tensor(role, base[n], [own[n] for own in experts]) for n, role in roles.items()}
    models[0].load_state_dict(merged, strict=False)
    state: dict[str, torch.Tensor] = models[0].state_dict()  # names of the same tensor too
    return state


class Interrupted(Exception):
    """Stands for whatever ends a process."""


@contextmanager
def after_layer(last: int) -> Iterator[None]:
    """Within it, a run ends when it has finished a layer."""
    original = Partial.write

    def write(partial: Partial, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        original(partial, layer, tensors)
        if layer == last:
            raise Interrupted

    with mock.patch.object(Partial, "write", write):
        yield


def solved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the folder of a finished feature merge, by the model's names."""
    files = sorted(folder.glob("layer-*"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in found.items() if not name.startswith("error.")}


def recipe_of(base: object, experts: Mapping[Any, Any], method: str = "slta", **parameters: Any) -> Recipe:
    """A recipe of experts, each with its calibration source or with a table of its parameters."""
    tables = {name: own if isinstance(own, Mapping) else {"calibration": own} for name, own in experts.items()}
    models = [{"model": str(name), "parameters": table} for name, table in tables.items()]
    content = {"merge_method": method, "base_model": base, "models": models, "parameters": parameters}
    return Recipe(content | {"dtype": "float32"})


def experiment(content: dict[str, Any], **arguments: Any) -> Experiment:
    """What a recipe asks for, opened; ``arguments`` are those of ``Experiment``."""
    return Experiment(Recipe(content), **{"quiet": True} | arguments)


def _floats(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's floating-point tensors by name, each one once where weights are tied."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        # MiniMax's buffers follow from its configuration; an entry of Zaya's is always -1.
        computed = name.endswith(("_decay", "slope_rate", "balancing_biases"))
        if tensor.is_floating_point() and tensor.data_ptr() not in seen and not computed:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


def _save(model: Any, dtype: torch.dtype, folder: Path, chat_template: str | None) -> None:
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, chat_template)
    model.to(torch.float32)
