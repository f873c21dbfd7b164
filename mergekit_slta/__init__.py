"""Merge methods for mergekit that solve for the merging weights instead of searching for them.

import mergekit_slta as slta

recipe = slta.Recipe.load("merge.yml")
statistics = slta.measure(recipe)
print(statistics.solve())
slta.merge(recipe, "merged/")
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The public names, for type checkers here, and for Python below: each is imported on first use, which takes seconds.
if TYPE_CHECKING:
    from mergekit_slta.checks.examine import check as check
    from mergekit_slta.comparison.compare import compare as compare
    from mergekit_slta.comparison.compare import evaluate as evaluate
    from mergekit_slta.errors import SltaError as SltaError
    from mergekit_slta.host.merge import merge as merge
    from mergekit_slta.nonlinearity.scores import linearity as linearity
    from mergekit_slta.output.publish import publish as publish
    from mergekit_slta.output.verify import verify as verify
    from mergekit_slta.recipe.recipe import Recipe as Recipe
    from mergekit_slta.reports.merge import report as report
    from mergekit_slta.slta.measure import measure as measure
    from mergekit_slta.slta.solution import Solution as Solution
    from mergekit_slta.slta.statistics import Statistics as Statistics
else:  # a type checker would take any misspelt name for one that __getattr__ knows
    _MODULES = {
        "Recipe": "recipe.recipe",
        "SltaError": "errors",
        "Solution": "slta.solution",
        "Statistics": "slta.statistics",
        "check": "checks.examine",
        "compare": "comparison.compare",
        "evaluate": "comparison.compare",
        "linearity": "nonlinearity.scores",
        "measure": "slta.measure",
        "merge": "host.merge",
        "publish": "output.publish",
        "report": "reports.merge",
        "verify": "output.verify",
    }

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("publish", "verify"):  # mergekit must know the methods, also where start-up files are off
            import_module("mergekit_slta.host.patches")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *_MODULES})
