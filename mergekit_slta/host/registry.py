"""The merge methods of this package, and the check of a recipe before mergekit plans its merge."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

import click
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_slta.checks import examine
from mergekit_slta.host.actmat import ActmatMerge
from mergekit_slta.host.featcal import FeatcalMerge
from mergekit_slta.host.method import Merge, Method
from mergekit_slta.host.sftm import SftmMerge
from mergekit_slta.host.slta import SltaMerge
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe

LOG = logging.getLogger(__name__)

# A new merge method is entered here.
MERGES: tuple[type[Merge], ...] = (SltaMerge, FeatcalMerge, ActmatMerge, SftmMerge)
METHODS = {kind.spec.name: Method(kind) for kind in MERGES}


def register() -> None:
    """Make the merge methods known to mergekit; a second call changes nothing."""
    known = {method.spec.name for method in merge_methods.registered_methods()}
    for name, method in METHODS.items():
        if name not in known:
            merge_methods.register(method)


_EXAMINED: ContextVar[Experiment | None] = ContextVar("examined", default=None)


@contextlib.contextmanager
def examined(experiment: Experiment) -> Iterator[None]:
    """Let this thread's plan of a recipe use the opened and checked one."""
    token = _EXAMINED.set(experiment)
    try:
        yield
    finally:
        _EXAMINED.reset(token)


def opened(config: MergeConfiguration, options: MergeOptions) -> Experiment:
    """Open and check a recipe before mergekit plans its merge, and log notes, unless it is ``examined`` already.

    Raises:
        SltaError: everything that is wrong with it.
    """
    known = _EXAMINED.get()
    if known and known.recipe.config == config:
        return known
    experiment = Experiment(Recipe.from_config(config), **options.model_dump())
    context = click.get_current_context(silent=True)
    # mergekit-multi, which has folders between its steps, names only the folder of its last one.
    given = context.params if context and "intermediate_dir" not in context.params else {}
    notes = examine.examine(experiment, out_path=given.get("out_path"))
    for note in notes if not options.quiet else ():
        LOG.warning(note)
    return experiment


def begin(config: MergeConfiguration, options: MergeOptions) -> Merge:
    """Begin the merge of a recipe for one of our methods.

    Raises:
        SltaError: everything that is wrong with the recipe.
    """
    return METHODS[config.merge_method].merge(opened(config, options))
