"""The checks of the layers that are run: that the models have them, that the recipe takes all, and how they split."""

from __future__ import annotations

from mergekit_slta.case import Case, attempt, failures
from mergekit_slta.decoder import Decoder
from mergekit_slta.recipe import slice_problems
from mergekit_slta.submodules import layer_submodules


def known_decoder(case: Case) -> list[str]:
    """Models that are no decoder."""
    return failures([case.decoder])


def whole_depth(case: Case, decoder: Decoder) -> list[str]:
    """Slices that are not all of the layers."""
    return slice_problems(case.config, len(decoder))


def solvable_layers(case: Case) -> list[str]:
    """Layers that cannot be run one at a time, where a feature merge is to solve them."""
    return failures([case.needs])


def level_submodules(case: Case, decoder: Decoder) -> list[str]:
    """Layers without the submodules of the level that is to be measured."""
    level = case.shared("level")
    if not level:
        return []
    return failures(attempt(layer_submodules, decoder, level, layer) for layer in decoder.one_of_each_kind())


def anchor_branches(case: Case, decoder: Decoder) -> list[str]:
    """Layers without the branches that an SLTA anchor has merging weights for."""
    if case.shared("anchor") != "slta":
        return []
    found = [attempt(decoder.split_problem, layer) for layer in decoder.one_of_each_kind()]
    return failures(found) + [f"{problem}: choose another 'anchor'." for problem in found if isinstance(problem, str)]
