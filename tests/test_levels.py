"""The names of submodules."""

import pytest

from mergekit_slta.levels import LEVELS, Place, belongs, covers, fused_map_part, head_part, place_of, submodule_name

NAMES = {
    "model": (Place(None, "model", None), {"model"}),
    submodule_name(12): (Place(12, "layer", None), {"layer"}),
    submodule_name(0, "attn"): (Place(0, "attn", None), {"attn_mlp"}),
    submodule_name(0, "mlp"): (Place(0, "mlp", None), {"attn_mlp", "head_mlp"}),
    submodule_name(3, head_part(11)): (Place(3, "head", 11), {"head_mlp"}),
    submodule_name(3, "self_attn.q_proj"): (Place(3, "self_attn.q_proj", None), {"linear"}),
    submodule_name(3, fused_map_part("mlp.experts", 7, "down_proj")): (
        Place(3, "mlp.experts.down_proj", 7),
        {"linear"},
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_tells_its_place_and_its_levels(name: str) -> None:
    place, levels = NAMES[name]
    assert place_of(name) == place
    assert {level for level in LEVELS if belongs(name, level)} == levels


def test_the_names_are_the_published_ones() -> None:
    assert list(NAMES)[1:] == [
        "layer.12",
        "layer.0.attn",
        "layer.0.mlp",
        "layer.3.head.11",
        "layer.3.self_attn.q_proj",
        "layer.3.mlp.experts.7.down_proj",
    ]


@pytest.mark.parametrize(
    ("level", "parts", "whole"),
    [
        ("attn_mlp", ["attn", "mlp"], True),
        ("attn_mlp", ["attn"], False),
        ("head_mlp", ["head.0", "head.1", "mlp"], True),
        ("head_mlp", ["head.0", "head.2", "mlp"], False),
        ("head_mlp", ["mlp"], False),
        ("linear", ["mlp.up_proj"], True),
    ],
)
def test_a_level_covers_every_layer_with_all_its_parts(level: str, parts: list[str], whole: bool) -> None:
    names = [submodule_name(layer, part) for layer in range(2) for part in parts]
    assert covers(names, level, 2) == whole
    assert not covers(names, level, 3)
    assert not covers(names, level, 1)
