"""Which maps of a layer are solved together, and which are kept.

That maps with the same input are solved together, in the layer's order, is what ``test_merge.py`` compares with the
reference, which has them in a table made by hand.
"""

import pytest
from support import families
from support.architecture_scan import small_decoder
from support.rounding import rounding

from mergekit_slta.featcal.groups import find_groups, in_words
from mergekit_slta.layers.decoder import INPUT, Writer
from mergekit_slta.layers.maps import linear_maps
from mergekit_slta.layers.trace import of_each_layer, trace

ARCHITECTURES = (*families.ARCHITECTURES, *families.UNSPLIT, *families.MULTIMODAL)

# The maps that stay the anchor's in some layer, by name; routed experts by their module.
KEPT = {
    **{name: {"mlp.gate"} for name in ("mixtral", "qwen3_moe", "glm4_moe", "glm_moe_dsa", "minimax", "qwen3_5_moe")},
    "zamba2": {
        *(f"shared_transformer.self_attn.{name}_proj" for name in "qkvo"),
        *(f"shared_transformer.feed_forward.{name}_proj" for name in ("gate_up", "down")),
        *(f"shared_transformer.feed_forward.gate_up_proj_adapter_list.{n}.{part}" for n in (0, 1) for part in (0, 1)),
    },
    "zaya": {"self_attn.qkv_proj.v_proj_delayed"},  # called again for the token before the first
    "gpt_oss": {"mlp.router"},
    "longcat_flash": {"mlp.router.classifier"},  # never called: the router uses its weight itself
    "gemma3n": {"altup.modality_router"},  # called twice
    "jamba_dense": {"mamba.dt_proj"},  # never called: the mixer uses its weights itself
    "mamba": {"mixer.dt_proj"},
    "granite_moe_hybrid": {"block_sparse_moe.router"},
    "llama4": {"feed_forward.router"},
    "llama4_vision": {"feed_forward.router"},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_kept_are_routers_and_experts_that_cannot_be_called(architecture: str) -> None:
    """And every other map is in one group."""
    decoder, kept = families.skeleton(architecture), set()
    for layer in range(families.LAYERS):
        found, maps = find_groups(decoder, layer), {m.name: m.module for m in linear_maps(decoder.layers[layer])}
        solved = [m.name for group in found.groups for m in group.maps]
        assert sorted([*solved, *found.unsolved]) == sorted(maps)
        kept |= {maps[name] for name in found.unsolved}
    assert kept == KEPT.get(architecture, set())


def test_a_mixture_of_another_layout_keeps_its_experts_and_its_router() -> None:
    found = find_groups(small_decoder("jetmoe", "JetMoeForCausalLM"), 0)
    assert [str(group) for group in found.groups] == ["self_attention.kv_proj"]
    routers, stacks = (
        [f"{mixture}.{name}" for mixture in ("mlp", "self_attention.experts") for name in names]
        for names in (["router.layer"], ["input_linear.weight", "output_linear.weight"])
    )
    assert in_words(found.unsolved) == (
        f"{', '.join(sorted(routers))} (that choose a mixture's routed experts); "
        f"{', '.join(stacks)} (that compute all routed experts together: which tokens each expert gets is not known)"
    )


def test_a_router_that_is_no_part_of_its_mixture_is_kept() -> None:
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    found = find_groups(families.skeleton("gemma4", enable_moe_block=True, **sizes), 0)
    assert [*found.unsolved] == ["router.proj"]
    assert [group.child for group in found.groups if group.fused] == ["experts"]


def test_the_factors_of_a_shared_expert_are_no_routers() -> None:
    config = families.config_of("qwen3_5_moe")
    config.text_config.shared_expert_intermediate_size = config.text_config.num_experts  # as in Qwen3-Next
    assert [*find_groups(trace(config), 1).unsolved] == ["mlp.gate"]


def test_a_matrix_of_several_blocks_that_each_have_their_own_input_is_kept() -> None:
    """DeepSeek V4's first output map: one map could not be told from its inputs and outputs."""
    unsolved = find_groups(small_decoder("deepseek_v4", "DeepseekV4ForCausalLM"), 0).unsolved
    assert unsolved["self_attn.o_a_proj"] == "in a module that does more than multiply"


def test_a_map_whose_output_is_added_times_a_constant_is_a_writer() -> None:
    """Granite's configuration multiplies every branch; ``featcal_reference.WRITERS`` has those without a constant."""
    writers = {
        "mamba.out_proj": Writer(0.4, {INPUT: 1.0}),
        "shared_mlp.output_linear": Writer(0.4, {INPUT: 1.0, "mamba": 0.4, "block_sparse_moe": 0.4}),
    }
    found = of_each_layer(families.skeleton("granite_moe_hybrid"), find_groups)[-1].writers
    assert found.keys() == writers.keys()
    for module, writer in writers.items():
        assert found[module].factor == pytest.approx(writer.factor, abs=rounding())
        assert found[module].stream == pytest.approx(writer.stream, abs=rounding())
