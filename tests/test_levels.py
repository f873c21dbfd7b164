"""The names of submodules."""

import pytest

from mergekit_slta.levels import Place, fused_map_part, head_part, of_level, place_of, submodule_name

NAMES = {
    "model": Place(None, "model"),
    submodule_name(12): Place(12, "layer"),
    submodule_name(0, "attn"): Place(0, "attn"),
    submodule_name(0, "mlp"): Place(0, "mlp"),
    submodule_name(3, head_part(11)): Place(3, "head"),
    submodule_name(3, "self_attn.q_proj"): Place(3, "self_attn.q_proj"),
    submodule_name(3, fused_map_part("mlp.experts", 7, "down_proj")): Place(3, "mlp.experts.down_proj"),
}


def test_the_names_are_the_published_ones_and_tell_their_place() -> None:
    assert {name: place_of(name) for name in NAMES} == NAMES
    assert list(NAMES)[1:] == [
        "layer.12",
        "layer.0.attn",
        "layer.0.mlp",
        "layer.3.head.11",
        "layer.3.self_attn.q_proj",
        "layer.3.mlp.experts.7.down_proj",
    ]


# The parts of a layer, and which of them are a level's.
PARTS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "all": (
        ["", "attn", "mlp", "head.0", "head.1", "mlp.up_proj"],
        {
            "layer": [""],
            "attn_mlp": ["attn", "mlp"],
            "head_mlp": ["head.0", "head.1", "mlp"],
            "linear": ["mlp.up_proj"],
        },
    ),
    "no heads": (["", "attn", "mlp"], {"head_mlp": ["attn", "mlp"]}),
    "no branches": ([""], {"attn_mlp": [""], "head_mlp": [""], "linear": [""]}),
    "one branch": (["", "attn"], {"attn_mlp": ["attn"], "head_mlp": ["attn"]}),
    "heads and no MLP": (["head.0"], {"head_mlp": ["head.0"], "attn_mlp": []}),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_level_takes_of_each_layer_its_own_parts_or_the_next_coarser_ones(kind: str) -> None:
    parts, levels = PARTS[kind]
    for level, own in levels.items():
        names = [submodule_name(2, part) for part in parts] + ["model", submodule_name(11)]
        assert of_level(names, level) == [submodule_name(2, part) for part in own] + [submodule_name(11)]
    assert of_level(["model", "layer.2"], "model") == ["model"]
