"""The names of submodules; ``test_architectures.py`` compares those of every architecture with the reference's."""

import random

import pytest
from support import families

from mergekit_slta.levels import LEVELS, of_level, place_of
from mergekit_slta.slta.weights import submodules


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "lfm2", "mamba", "zamba2"])
def test_a_file_of_all_levels_gives_each_level_its_own_submodules_by_number(architecture: str) -> None:
    """Also where layers have no heads or no branches, whose next coarser submodules stand for them."""
    large = {"num_hidden_layers": 12, "num_attention_heads": 16} if architecture == "llama" else {}
    decoder = families.skeleton(architecture, **large)
    by_layer = {level: [submodules(decoder, level, layer) for layer in range(len(decoder))] for level in LEVELS[1:]}
    names = sorted({name for layers in by_layer.values() for own in layers for name in own})
    random.Random(0).shuffle(names)
    for level, layers in by_layer.items():
        found = of_level([*names, "model"], level)
        assert [place_of(name).layer for name in found] == [layer for layer, own in enumerate(layers) for _ in own]
        assert sorted(found) == sorted(name for own in layers for name in own)
        if level == "head_mlp" and large:
            assert found == [name for own in layers for name in own]  # 2 before 10
    kinds = {place_of(name).kind for name in names} - {"layer", "attn", "mlp", "head"}
    assert kinds <= {name for layer in decoder.layers for name in (*dict(layer.named_modules()), *layer.state_dict())}
    assert of_level(names, "model") == [] and of_level(["model", *names], "model") == ["model"]
