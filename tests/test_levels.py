"""The names of submodules."""

import pytest

from mergekit_slta.levels import Place, fused_map_part, head_part, of_level, place_of, submodule_name


@pytest.mark.parametrize(
    ("part", "name", "kind"),
    [
        ("", "layer.3", "layer"),
        ("attn", "layer.3.attn", "attn"),
        (head_part(11), "layer.3.head.11", "head"),
        (fused_map_part("mlp.experts", 7, "down_proj"), "layer.3.mlp.experts.7.down_proj", "mlp.experts.down_proj"),
    ],
)
def test_the_names_are_the_published_ones_and_tell_their_place(part: str, name: str, kind: str) -> None:
    assert submodule_name(3, part) == name and place_of(name) == Place(3, kind)


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
