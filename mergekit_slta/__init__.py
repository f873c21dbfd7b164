"""Merges of fine-tuned models, computed from a few prompts per model or from parameters alone.

```python
import mergekit_slta as slta

recipe = slta.Recipe.load("merge.yml")
solution = slta.measure(recipe).solve()
print(solution)
slta.merge(solution.save_recipe("plain.yml"), "merged/")
```
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
# For type checkers here, and for Python below: each name is imported on first use, because torch takes seconds.
if TYPE_CHECKING:
    from mergekit_slta.asking.ask import ask as ask
    from mergekit_slta.checks.examine import check as check
    from mergekit_slta.errors import SltaError as SltaError
    from mergekit_slta.evaluation.evaluate import evaluate as evaluate
    from mergekit_slta.host.merge import MergeOptions as MergeOptions
    from mergekit_slta.host.merge import merge as merge
    from mergekit_slta.nonlinearity.studies import linearity as linearity
    from mergekit_slta.output.publish import publish as publish
    from mergekit_slta.output.verify import verify as verify
    from mergekit_slta.recipe.experiment import Options as Options
    from mergekit_slta.recipe.recipe import Recipe as Recipe
    from mergekit_slta.reports.merge import report as report
    from mergekit_slta.slta.measure import measure as measure
    from mergekit_slta.slta.statistics import Solution as Solution
    from mergekit_slta.slta.statistics import Statistics as Statistics
else:  # a type checker would take any misspelt name for one that __getattr__ knows
    _MODULES = {
        "MergeOptions": "host.merge",
        "Options": "recipe.experiment",
        "Recipe": "recipe.recipe",
        "SltaError": "errors",
        "Solution": "slta.statistics",
        "Statistics": "slta.statistics",
        "ask": "asking.ask",
        "check": "checks.examine",
        "evaluate": "evaluation.evaluate",
        "linearity": "nonlinearity.studies",
        "measure": "slta.measure",
        "merge": "host.merge",
        "publish": "output.publish",
        "report": "reports.merge",
        "verify": "output.verify",
    }
    __all__ = list(_MODULES)

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("ask", "check", "evaluate", "linearity", "measure", "publish", "verify"):
            # mergekit must be as it is for mergekit-yaml, also where start-up files are off.
            import_module("mergekit_slta.host.patches")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__():  # what help() and tab completion show: no rooms, although Python makes them attributes
        return [*__all__, *(name for name in globals() if name.startswith("__"))]
