"""Everything about a recipe that can be known to be wrong from configs and file headers, all at once."""

from __future__ import annotations

from mergekit.config import MergeConfiguration
from mergekit.merge_methods import MergeMethodSpec
from mergekit.options import MergeOptions

from mergekit_slta.recipe import recipe_problems


def preflight(config: MergeConfiguration, options: MergeOptions, spec: MergeMethodSpec) -> list[str]:
    """What is wrong with a recipe, one sentence each; empty if nothing is."""
    return recipe_problems(config, spec)
