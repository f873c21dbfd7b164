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


# The submodules of a layer in a file of several levels, and which of them are a level's.
BRANCHES, HEADS = ["attn", "mlp"], ["head.2", "head.10"]
PARTS: list[tuple[list[str], str, list[str]]] = [
    (["", *BRANCHES, *HEADS, "mlp.up_proj"], "layer", [""]),
    (["", *BRANCHES, *HEADS, "mlp.up_proj"], "attn_mlp", BRANCHES),
    (["", *BRANCHES, *HEADS, "mlp.up_proj"], "head_mlp", [*HEADS, "mlp"]),
    (["", *BRANCHES, *HEADS, "mlp.up_proj"], "linear", ["mlp.up_proj"]),
    (["", *BRANCHES], "head_mlp", BRANCHES),
    (["", "attn"], "attn_mlp", ["attn"]),
    (["", "attn"], "head_mlp", ["attn"]),
    *(([""], level, [""]) for level in ("attn_mlp", "head_mlp", "linear")),
    (HEADS, "head_mlp", HEADS),
    (HEADS, "attn_mlp", []),
]


@pytest.mark.parametrize(("parts", "level", "expected"), PARTS, ids=str)
def test_a_level_takes_of_each_layer_the_finest_parts_or_the_next_coarser(
    parts: list[str], level: str, expected: list[str]
) -> None:
    names = ["layer.11", *(submodule_name(2, part) for part in reversed(parts)), "model"]
    assert of_level(names, level) == [*(submodule_name(2, part) for part in expected), "layer.11"]
    assert of_level(names, "model") == ["model"]
