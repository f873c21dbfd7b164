"""The names of submodules; ``test_architectures.py`` compares those of every architecture with the reference's."""

import random

from support import families

from mergekit_slta.levels import LEVELS, of_level
from mergekit_slta.slta.weights import submodules


def test_the_submodules_of_a_level_are_in_the_order_of_their_numbers() -> None:
    decoder = families.skeleton("llama", num_hidden_layers=12, num_attention_heads=16)
    by_level = {level: [n for layer in range(12) for n in submodules(decoder, level, layer)] for level in LEVELS[1:]}
    names = sorted({name for own in by_level.values() for name in own})
    random.Random(0).shuffle(names)
    assert of_level(names, "head_mlp") == by_level["head_mlp"]  # 2 before 10
