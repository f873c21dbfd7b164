"""Which maps of a layer are solved together, and which are kept.

That maps with the same input are solved together, in the layer's order, is what ``test_merge.py`` compares with the
reference, which has them in a table made by hand.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from support import families

from mergekit_slta.featcal.groups import find_groups, groups_by_layer, kept_in_words, solved_in
from mergekit_slta.layers.children import child_of, is_inside
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import LinearMap, is_fused, linear_maps
from mergekit_slta.layers.trace import trace, trace_model

ATTENTION = ("self_attn.q_proj/k_proj/v_proj", "self_attn.o_proj")
LLAMA = (*ATTENTION, "mlp.gate_proj/up_proj", "mlp.down_proj")
ARCHITECTURES = (*families.ARCHITECTURES, *families.UNSPLIT)

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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_kept_are_routers_and_experts_that_cannot_be_called(architecture: str) -> None:
    decoder = skeleton(architecture)
    names = {m.name: m.module for layer in decoder.layers for m in linear_maps(layer)}
    kept = {names[name] for layer in range(families.LAYERS) for name in find_groups(decoder, layer).kept}
    assert kept == KEPT.get(architecture, set())


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "zamba2"])
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_map_is_in_one_group_or_kept(architecture: str) -> None:
    decoder = skeleton(architecture)
    for layer in range(families.LAYERS):
        found = find_groups(decoder, layer)
        names = [m.name for group in found.groups for m in group.maps] + list(found.kept)
        assert sorted(names) == sorted(m.name for m in linear_maps(decoder.layers[layer]))


def in_features(decoder: Decoder, layer: int, linear_map: LinearMap) -> int:
    return linear_map.matrix(decoder.layers[layer].state_dict()).shape[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
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
