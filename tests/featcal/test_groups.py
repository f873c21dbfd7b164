"""Which maps of a layer are solved together, and in which order, against a table made by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from support import families

from mergekit_slta.featcal.groups import MapGroup, find_groups, groups_by_layer, kept_in_words, solved_in
from mergekit_slta.layers.children import child_of, is_inside
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import LinearMap, is_fused, linear_maps
from mergekit_slta.layers.trace import trace, trace_model

Names = tuple[str, ...]

ATTENTION = ("self_attn.q_proj/k_proj/v_proj", "self_attn.o_proj")
GATED = ("mlp.gate_proj/up_proj", "mlp.down_proj")
LLAMA = (*ATTENTION, *GATED)
NEOX = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
FALCON = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
MIXTURE = (*ATTENTION, "mlp.experts")
GRANITE_MAMBA = ("mamba.in_proj", "mamba.out_proj")
GRANITE_SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")
LATENT = ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj")
LONGCAT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
INDEXER = ("self_attn.indexer.wq_b", "self_attn.indexer.wk/indexer.weights_proj")
ALTUP = ("altup.prediction_coefs", "laurel.linear_left", "laurel.linear_right")
CORRECTION = ("altup.correction_coefs", "per_layer_input_gate", "per_layer_projection")
SHARED_MIXTURE = (
    "mlp.experts", "mlp.shared_experts.gate_proj/shared_experts.up_proj", "mlp.shared_experts.down_proj",
)  # fmt: skip
JAMBA_MLP = ("feed_forward.gate_proj/up_proj", "feed_forward.down_proj")
LFM2_MLP = ("feed_forward.w1/w3", "feed_forward.w2")

# Architecture -> the groups of its layers in their order; where layers differ, one entry for each of them.
GROUPS: dict[str, Names | list[Names]] = {
    **dict.fromkeys(
        (
            "llama", "llama_dynamic", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "olmo", "olmo2",
            "cohere", "cohere_without_qk_norm", "cohere2", "stablelm", "stablelm_parallel", "granite",
        ),
        LLAMA,
    ),
    "phi": ("self_attn.q_proj/k_proj/v_proj", "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    "phi3_longrope": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "glm4": (*ATTENTION, "mlp.gate_up_proj", "mlp.down_proj"),
    **dict.fromkeys(("gpt2", "openai_gpt"), ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    **dict.fromkeys(("gpt_neox", "gpt_neox_sequential"), NEOX),
    **dict.fromkeys(("falcon_7b", "falcon_new", "falcon_one_norm", "falcon_alibi", "bloom", "bloom_post"), FALCON),
    "starcoder2": (*ATTENTION, "mlp.c_fc", "mlp.c_proj"),
    **dict.fromkeys(("arcee", "apertus"), (*ATTENTION, "mlp.up_proj", "mlp.down_proj")),
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), MIXTURE),
    "glm4_moe": [
        LLAMA,
        *[(*ATTENTION, *SHARED_MIXTURE)] * 2,
    ],
    "minicpm3": (
        "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
        "self_attn.o_proj", *GATED,
    ),
    "jamba_dense": [
        ("mamba.in_proj", "mamba.x_proj", "mamba.out_proj", *JAMBA_MLP),
        (*ATTENTION, *JAMBA_MLP),
        ("mamba.in_proj", "mamba.x_proj", "mamba.out_proj", *JAMBA_MLP),
    ],
    "bamba": [(*GRANITE_MAMBA, *JAMBA_MLP), (*ATTENTION, *JAMBA_MLP), (*GRANITE_MAMBA, *JAMBA_MLP)],
    "lfm2": [
        ("conv.in_proj", "conv.out_proj", *LFM2_MLP),
        ("self_attn.q_proj/k_proj/v_proj", "self_attn.out_proj", *LFM2_MLP),
        ("conv.in_proj", "conv.out_proj", *LFM2_MLP),
    ],
    "granite_moe_hybrid": [
        (*GRANITE_MAMBA, "block_sparse_moe.experts", *GRANITE_SHARED),
        (*ATTENTION, "block_sparse_moe.experts", *GRANITE_SHARED),
        (*GRANITE_MAMBA, "block_sparse_moe.experts", *GRANITE_SHARED),
    ],
    "granite_hybrid_dense": [
        (*GRANITE_MAMBA, *GRANITE_SHARED),
        (*ATTENTION, *GRANITE_SHARED),
        (*GRANITE_MAMBA, *GRANITE_SHARED),
    ],
    **dict.fromkeys(("opt", "opt_post"), ("self_attn.q_proj/k_proj/v_proj", "self_attn.out_proj", "fc1", "fc2")),
    "mamba": ("mixer.in_proj", "mixer.x_proj", "mixer.out_proj"),
    "nemotron_h": [
        ("mixer.in_proj", "mixer.out_proj"),
        ("mixer.up_proj", "mixer.down_proj"),
        ("mixer.q_proj/k_proj/v_proj", "mixer.o_proj"),
    ],
    "llama4": (
        *ATTENTION,
        "feed_forward.experts",
        "feed_forward.shared_expert.gate_proj/shared_expert.up_proj",
        "feed_forward.shared_expert.down_proj",
    ),
    "falcon_h1": (*GRANITE_MAMBA, *ATTENTION, "feed_forward.up_proj/gate_proj", "feed_forward.down_proj"),
    "zaya": (
        "self_attn.qkv_proj.q_proj/qkv_proj.k_proj/qkv_proj.v_proj_current", "self_attn.o_proj", "mlp.gate.down_proj",
        "mlp.gate.router_mlp.fc1", "mlp.gate.router_mlp.fc2", "mlp.gate.router_mlp.out_proj", "mlp.experts",
    ),
    "minimax": [
        ("self_attn.qkv_proj/output_gate", "self_attn.out_proj", "mlp.experts"),
        MIXTURE,
        ("self_attn.qkv_proj/output_gate", "self_attn.out_proj", "mlp.experts"),
    ],
    "zamba2": [
        GRANITE_MAMBA,
        (
            *(f"shared_transformer.{name}" for name in ("self_attn.q_proj/self_attn.k_proj/self_attn.v_proj",
            "self_attn.o_proj", "feed_forward.gate_up_proj/feed_forward.gate_up_proj_adapter_list.0.0",
            "feed_forward.gate_up_proj_adapter_list.0.1", "feed_forward.down_proj")),
            "linear", "mamba_decoder.mamba.in_proj", "mamba_decoder.mamba.out_proj",
        ),
        GRANITE_MAMBA,
    ],
    "longcat_flash": (
        *(f"self_attn.0.{name}" for name in LONGCAT_ATTENTION),
        "mlp.experts", "mlps.0.gate_proj/up_proj", "mlps.0.down_proj",
        *(f"self_attn.1.{name}" for name in LONGCAT_ATTENTION),
        "mlps.1.gate_proj/up_proj", "mlps.1.down_proj",
    ),
    "glm_moe_dsa": [
        (*LATENT, *INDEXER, "self_attn.o_proj", *GATED),
        (*LATENT, "self_attn.o_proj", *SHARED_MIXTURE),
        (*LATENT, *INDEXER, "self_attn.o_proj", *SHARED_MIXTURE),
    ],
    "gemma3n": [
        *[(*ALTUP, *LLAMA, *CORRECTION)] * 2,
        *[(*ALTUP, "self_attn.q_proj", *LLAMA[1:], *CORRECTION)] * 2,
    ],
    "gemma4": [
        *[(*LLAMA, "per_layer_input_gate", "per_layer_projection")] * 2,
        *[("self_attn.q_proj", *LLAMA[1:], "per_layer_input_gate", "per_layer_projection")] * 2,
    ],
}  # fmt: skip

# The maps that stay the anchor's in some layer, by name; routed experts by their module.
KEPT = {
    **{name: {"mlp.gate"} for name in ("mixtral", "qwen3_moe", "glm4_moe", "glm_moe_dsa", "minimax")},
    # Solved in the next layer that shares them.
    "zamba2": {f"shared_transformer.feed_forward.gate_up_proj_adapter_list.1.{part}" for part in (0, 1)},
    "zaya": {"self_attn.qkv_proj.v_proj_delayed"},  # called again for the token before the first
    "gpt_oss": {"mlp.router"},
    "longcat_flash": {"mlp.router.classifier"},  # never called: the router uses its weight itself
    "gemma3n": {"altup.modality_router"},  # called twice
    "jamba_dense": {"mamba.dt_proj"},  # never called: the mixer uses its weights itself
    "mamba": {"mixer.dt_proj"},
    "granite_moe_hybrid": {"block_sparse_moe.router"},
    "llama4": {"feed_forward.router"},
}

skeleton = functools.cache(families.skeleton)


def test_every_decoder_is_in_the_table() -> None:
    assert set(families.ARCHITECTURES | families.UNSPLIT) == set(GROUPS)


@pytest.mark.parametrize("architecture", GROUPS)
def test_groups_are_those_of_the_table(architecture: str) -> None:
    expected = GROUPS[architecture]
    for layer in range(families.LAYERS):
        groups = find_groups(skeleton(architecture), layer).groups
        assert tuple(map(str, groups)) == (expected[layer] if isinstance(expected, list) else expected)


@pytest.mark.parametrize("architecture", GROUPS)
def test_what_is_kept_are_routers_and_experts_that_cannot_be_called(architecture: str) -> None:
    decoder = skeleton(architecture)
    names = {m.name: m.module for layer in decoder.layers for m in linear_maps(layer)}
    kept = {names[name] for layer in range(families.LAYERS) for name in find_groups(decoder, layer).kept}
    assert kept == KEPT.get(architecture, set())


@pytest.mark.parametrize("architecture", [name for name in GROUPS if name != "zamba2"])
def test_layers_of_the_same_modules_have_the_same_groups(architecture: str) -> None:
    decoder = skeleton(architecture)
    assert groups_by_layer(decoder) == [find_groups(decoder, layer) for layer in range(len(decoder))]


def test_maps_that_layers_share_are_solved_in_the_first_that_calls_them() -> None:
    """Each layer has adapters of its own in what it shares."""
    decoder = families.skeleton("zamba2", use_shared_attention_adapter=True)
    first, later = (maps for maps in groups_by_layer(decoder)[1::2])
    names = [{m.name for group in maps.groups for m in group.maps} for maps in (first, later)]
    shared, adapters = "shared_transformer.", [".0.0", ".0.1", ".1.0", ".1.1"]
    own = [{name for name in found if "adapter_list" in name} for found in names]
    assert [sorted({name[-4:] for name in found}) for found in own] == [adapters[:2], adapters[2:]]
    assert [len(found) for found in own] == [2 * len("qkv") + 2] * 2
    assert {name for name in names[0] - own[0] if not name.startswith(shared)} == names[1] - own[1]
    assert len([name for name in names[0] - own[0] if name.startswith(shared)]) == len("qkvo") + 2
    assert not first.kept and not later.kept
    solved = solved_in(decoder)
    path = "model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list"
    assert [solved[f"{path}.{adapter}.weight"] for adapter in ("0.0", "0.1", "1.0", "1.1")] == [1, 1, 3, 3]


class Router(torch.nn.Linear):
    """Returns its product, and the expert of each token."""

    def forward(self, input: torch.Tensor) -> Any:
        product = super().forward(input)
        return product, product.argmax(1)


class Mixture(torch.nn.Module):
    """Two experts of numbered modules, each called with the tokens that go to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router(32, 2)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32)) for _ in range(2)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat, summed = hidden.flatten(0, 1), torch.zeros_like(hidden).flatten(0, 1)
        _, chosen = self.gate(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            summed = summed.index_add(0, rows, expert(flat[rows]))
        return summed.view_as(hidden)


def test_a_mixtures_experts_and_router_that_are_modules_of_their_own_are_kept() -> None:
    class Model(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = Mixture()

    with torch.device("meta"):
        model = Model(families.config_of("llama")).eval()
    found = find_groups(trace_model(model), 0)
    assert tuple(map(str, found.groups)) == ATTENTION
    experts = {f"mlp.experts.{expert}.{part}" for expert in (0, 1) for part in (0, 1)}
    assert found.kept == {
        "mlp.gate": "in a module that does more than multiply",
        **dict.fromkeys(experts, "in a module that is given some of the tokens only"),
    }


@pytest.mark.parametrize("architecture", GROUPS)
def test_every_map_is_in_one_group_or_kept(architecture: str) -> None:
    decoder = skeleton(architecture)
    for layer in range(families.LAYERS):
        found = find_groups(decoder, layer)
        names = [m.name for group in found.groups for m in group.maps] + list(found.kept)
        assert sorted(names) == sorted(m.name for m in linear_maps(decoder.layers[layer]))


def in_features(decoder: Decoder, layer: int, linear_map: LinearMap) -> int:
    return linear_map.matrix(decoder.layers[layer].state_dict()).shape[1]


@pytest.mark.parametrize("architecture", GROUPS)
def test_a_group_is_entered_by_its_first_module_and_has_one_input(architecture: str) -> None:
    decoder = skeleton(architecture)
    for layer in range(families.LAYERS):
        for group in find_groups(decoder, layer).groups:
            assert group.module == group.modules[0]
            assert all(is_inside(module, {group.child}) for module in group.modules)
            # Gemma 3n's layers call the maps of AltUp one by one.
            assert group.child in (child_of(decoder.layers[layer], group.module), group.module)
            assert group.fused == is_fused(decoder.layers[layer].get_submodule(group.module))
            assert group.fused or len({in_features(decoder, layer, m) for m in group.maps}) == 1


def test_routed_experts_are_one_group_with_two_maps_each() -> None:
    group = find_groups(skeleton("mixtral"), 0).groups[-1]
    names = [f"mlp.experts.{expert}.{name}" for expert in range(4) for name in ("gate_up_proj", "down_proj")]
    assert sorted(m.name for m in group.maps) == sorted(names)


def test_experts_that_return_their_input_have_no_maps() -> None:
    decoder = skeleton("longcat_flash")
    group = next(group for group in find_groups(decoder, 0).groups if group.fused)
    assert len(decoder.layers[0].get_parameter("mlp.experts.gate_up_proj")) == 6
    assert {m.expert for m in group.maps} == {0, 1, 2, 3}


def test_maps_that_are_used_in_other_ways_than_one_call_are_kept_and_the_reason_is_named() -> None:
    assert find_groups(skeleton("gemma3n"), 0).kept == {"altup.modality_router": "called more than once"}
    assert find_groups(skeleton("mamba"), 0).kept == {"mixer.dt_proj": "not used by calling the module"}


def test_maps_of_equal_sizes_that_are_given_different_tensors_stay_apart() -> None:
    """Whatever the sizes: here every matrix of the layer is square."""
    decoder = families.skeleton("llama", intermediate_size=32, num_key_value_heads=4)
    assert tuple(map(str, find_groups(decoder, 0).groups)) == LLAMA


def test_tracing_leaves_the_weights_without_values() -> None:
    decoder = families.skeleton("llama")
    find_groups(decoder, 1)
    assert all(parameter.device == torch.device("meta") for parameter in decoder.model.parameters())


def test_a_group_names_its_modules_inside_the_child_once() -> None:
    maps = [LinearMap(name, name, f"{name}.weight", None, False) for name in ("a.x", "a.b.y")]
    assert str(MapGroup("a", "a.x", tuple(maps))) == "a.x/b.y"
    assert str(MapGroup("fc1", "fc1", (LinearMap("fc1", "fc1", "fc1.weight", "fc1.bias", False),))) == "fc1"


def test_a_mixture_of_another_layout_keeps_its_experts_and_its_router() -> None:
    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8,
        num_local_experts=4, architectures=["JetMoeForCausalLM"],
    )  # fmt: skip
    found = find_groups(trace(config), 0)
    assert [str(group) for group in found.groups] == ["self_attention.kv_proj"]
    routers, stacks = (
        [f"{mixture}.{name}" for mixture in ("mlp", "self_attention.experts") for name in names]
        for names in (["router.layer"], ["input_linear.weight", "output_linear.weight"])
    )
    assert kept_in_words(found.kept) == (
        f"{', '.join(sorted(routers))} (choosing a mixture's experts); "
        f"{', '.join(stacks)} (in a module that is not given the experts of each token)"
    )
