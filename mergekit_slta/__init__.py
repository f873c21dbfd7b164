"""Merge methods for mergekit that solve for the merging weights instead of searching for them."""

__version__ = "0.1.0"

TYPE_CHECKING = False  # this file runs at every start of Python: not even typing is imported
if TYPE_CHECKING:
    from typing import Any

# Public name -> the module that defines it, loaded on first use.
_EXPORTS = {
    "Decoder": "mergekit_slta.layers.decoder",
    "Experiment": "mergekit_slta.recipe.experiment",
    "Recipe": "mergekit_slta.recipe.recipe",
    "SltaError": "mergekit_slta.errors",
    "Solution": "mergekit_slta.slta.solver",
    "Statistics": "mergekit_slta.slta.statistics",
    "TensorWeights": "mergekit_slta.slta.weights",
    "calibrate": "mergekit_slta.slta.calibrate",
    "load": "mergekit_slta.slta.statistics",
    "measured_statistics": "mergekit_slta.slta.measure",
    "plan_linearity": "mergekit_slta.linearity.scores",
    "save": "mergekit_slta.slta.statistics",
    "solve_model": "mergekit_slta.featcal.scratch",
    "solve": "mergekit_slta.slta.solver",
    "write_linearity": "mergekit_slta.reports.linearity",
    "write_report": "mergekit_slta.reports.merge",
}


def __getattr__(name: str) -> "Any":
    """Load a public name from its module on first use.

    Raises:
        AttributeError: ``name`` is not public.
    """
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
