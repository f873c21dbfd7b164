"""Merge methods for mergekit that solve for the merging weights instead of searching for them.

import mergekit_slta as slta

recipe = slta.Recipe.load("merge.yml")
statistics = slta.measure(recipe)
print(statistics.solve())
slta.merge(recipe, "merged/")
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # this file runs at every start of Python: not even typing is imported
if TYPE_CHECKING:
    from typing import Any

    from mergekit_slta.checks.examine import check as check
    from mergekit_slta.comparison.compare import compare as compare
    from mergekit_slta.comparison.compare import evaluate as evaluate
    from mergekit_slta.errors import SltaError as SltaError
    from mergekit_slta.featcal.scratch import solve_model as solve_model
    from mergekit_slta.host.merge import merge as merge
    from mergekit_slta.layers.decoder import Decoder as Decoder
    from mergekit_slta.nonlinearity.scores import linearity as linearity
    from mergekit_slta.nonlinearity.scores import plan_linearity as plan_linearity
    from mergekit_slta.output.publish import publish as publish
    from mergekit_slta.output.verify import verify as verify
    from mergekit_slta.recipe.experiment import Experiment as Experiment
    from mergekit_slta.recipe.new import new_recipe as new_recipe
    from mergekit_slta.recipe.recipe import Recipe as Recipe
    from mergekit_slta.reports.comparison import write_comparison as write_comparison
    from mergekit_slta.reports.linearity import write_linearity as write_linearity
    from mergekit_slta.reports.merge import report as report
    from mergekit_slta.slta.calibrate import calibrate as calibrate
    from mergekit_slta.slta.measure import measure as measure
    from mergekit_slta.slta.measure import measured_statistics as measured_statistics
    from mergekit_slta.slta.solution import Solution as Solution
    from mergekit_slta.slta.solver import solve as solve
    from mergekit_slta.slta.statistics import Statistics as Statistics
    from mergekit_slta.slta.weights import TensorWeights as TensorWeights

    load = Statistics.load
    save = Statistics.save
    write_report = report

# Public name -> where it is, imported on first use: the module, and the name there.
_EXPORTS = {
    "Decoder": "mergekit_slta.layers.decoder:Decoder",
    "Experiment": "mergekit_slta.recipe.experiment:Experiment",
    "Recipe": "mergekit_slta.recipe.recipe:Recipe",
    "SltaError": "mergekit_slta.errors:SltaError",
    "Solution": "mergekit_slta.slta.solution:Solution",
    "Statistics": "mergekit_slta.slta.statistics:Statistics",
    "TensorWeights": "mergekit_slta.slta.weights:TensorWeights",
    "calibrate": "mergekit_slta.slta.calibrate:calibrate",
    "check": "mergekit_slta.checks.examine:check",
    "compare": "mergekit_slta.comparison.compare:compare",
    "evaluate": "mergekit_slta.comparison.compare:evaluate",
    "linearity": "mergekit_slta.nonlinearity.scores:linearity",
    "load": "mergekit_slta.slta.statistics:Statistics.load",
    "measure": "mergekit_slta.slta.measure:measure",
    "measured_statistics": "mergekit_slta.slta.measure:measured_statistics",
    "merge": "mergekit_slta.host.merge:merge",
    "new_recipe": "mergekit_slta.recipe.new:new_recipe",
    "plan_linearity": "mergekit_slta.nonlinearity.scores:plan_linearity",
    "publish": "mergekit_slta.output.publish:publish",
    "report": "mergekit_slta.reports.merge:report",
    "save": "mergekit_slta.slta.statistics:Statistics.save",
    "solve": "mergekit_slta.slta.solver:solve",
    "solve_model": "mergekit_slta.featcal.scratch:solve_model",
    "verify": "mergekit_slta.output.verify:verify",
    "write_comparison": "mergekit_slta.reports.comparison:write_comparison",
    "write_linearity": "mergekit_slta.reports.linearity:write_linearity",
    "write_report": "mergekit_slta.reports.merge:report",
}


def __getattr__(name: str) -> "Any":
    """Load a public name from its module on first use.

    Raises:
        AttributeError: ``name`` is not public.
    """
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    from operator import attrgetter

    module, _, path = _EXPORTS[name].partition(":")
    value = attrgetter(path)(import_module(module))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
