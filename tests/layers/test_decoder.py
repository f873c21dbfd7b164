"""Decoders that need images, whose layers do not split, or that are refused.

That layers run one at a time do what the whole model does is what tests/test_architectures.py says of all the others.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from support import families, reference
from support.architecture_scan import small_decoder
from support.families import LAYERS
from support.processes import run_python
from support.rounding import rounding

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.calls import embed
from mergekit_slta.layers.trace import trace
from mergekit_slta.levels import LEVELS

TOLERANCE = 4 * rounding(8 * LAYERS)  # of states up to four, after some eight sums in each layer


def test_a_decoder_leaves_the_configuration_that_others_read_as_it_is() -> None:
    config = families.config_of("mixtral", dtype="bfloat16")
    before = copy.deepcopy(vars(config))
    trace(config)
    assert vars(config) == before


_TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION = _TINY | {"image_size": 16, "patch_size": 8}


@pytest.mark.parametrize(
    ("config", "tower"),
    [
        # It needs images, so that its language tower runs alone.
        (
            transformers.Blip2Config(
                text_config=families.config_of("opt").to_dict(),
                vision_config=_VISION,
                qformer_config=_TINY | {"encoder_hidden_size": 16},
                num_query_tokens=2,
            ),
            "language_model",
        ),
        # It runs on text alone, and moves the tokens to its first tensor's device, which is an image tower's.
        (transformers.Idefics3Config(text_config=families.config_of("llama").to_dict(), vision_config=_VISION), ""),
    ],
    ids=["blip-2", "idefics3"],
)
@torch.no_grad()
def test_a_wrapper_for_images_runs_on_text(config: transformers.PretrainedConfig, tower: str) -> None:
    model = families.random_model(config)
    config.architectures = [type(model).__name__]
    decoder, state = trace(config), model.state_dict()
    ids = torch.randint(3, families.VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    hidden, calls = embed(decoder, ids, {name: state[name] for name in decoder.edge_tensors})
    assert (decoder.body is decoder.tower is not decoder.model.base_model) == bool(tower)
    path = decoder.layers_path.removeprefix(f"{tower}.")
    expected = reference.layer_outputs(model.get_submodule(tower), ids, path)
    for layer in range(len(decoder)):
        weights = {name: state[full] for name, full in decoder.layer_tensors(layer).items()}
        hidden = decoder.run(layer, weights, hidden, calls[layer]).output
        assert torch.allclose(hidden, expected[layer], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("qwen4_exp_text", "Qwen4ExpForCausalLM"), ("dbrx", "DbrxForCausalLM")]
)
def test_a_child_that_ends_attention_and_feeds_the_mlp_apart_is_split_at_no_branch(
    model_type: str, architecture: str
) -> None:
    """Its norm before the MLP would take attention's weight."""
    decoder = small_decoder(model_type, architecture)
    found = decoder.fallbacks("attn_mlp")
    assert {layer for fallback in found for layer in fallback.layers} == {*range(len(decoder))}
    assert {fallback.coarser for fallback in found} == {"layer"}


def test_an_encoder_is_refused() -> None:
    with pytest.raises(SltaError, match="not a decoder-only.*actmat"):
        trace(transformers.BertConfig(architectures=["BertForMaskedLM"]))


SMALL: dict[str, Any] = families.GROUPED | {"head_dim": 8}

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
    decoder = small_decoder("jetmoe", "JetMoeForCausalLM")
    assert decoder.submodules("head_mlp", 0) == ["layer.0.attn", "layer.0.mlp"]
    (fallback,) = decoder.fallbacks("head_mlp")
    assert str(fallback) == (
        "Level head_mlp falls back to level attn_mlp in layers 0 to 3 (JetMoeDecoderLayer): its heads cannot be told "
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


DEEPSEEK = """
import transformers
from support.memory import memory_of_this_process
from mergekit_slta.layers.trace import trace
from mergekit_slta.engine.streams import padding_matters
from mergekit_slta.featcal.groups import groups_by_layer

decoder = trace(transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]))
padding_matters(decoder, (3, 20))
groups_by_layer(decoder)
print(memory_of_this_process("VmHWM"))
"""


@pytest.mark.slow
def test_the_full_deepseek_v3_is_traced_in_the_memory_of_a_few_matrices() -> None:
    done = run_python("-c", DEEPSEEK)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1.5 * 2**30
