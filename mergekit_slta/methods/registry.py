"""Register this package's merge methods with mergekit, and check their recipes before mergekit plans a merge."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import FinalizeModel, LoaderCache
from mergekit.options import MergeOptions

from mergekit_slta.checks import examine
from mergekit_slta.methods.actmat import ActmatMethod
from mergekit_slta.methods.base import FiniteMethod
from mergekit_slta.methods.featcal import FeatcalMethod
from mergekit_slta.methods.sftm import SftmMethod
from mergekit_slta.methods.slta import SltaMethod
from mergekit_slta.models.merged_adapters import current_loader, merge_adapter
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe

LOG = logging.getLogger(__name__)

# A new merge method is entered here.
METHODS: dict[str, FiniteMethod] = {
    method.spec.name: method for method in (SltaMethod(), FeatcalMethod(), ActmatMethod(), SftmMethod())
}
WATCHED = "_watched_by_mergekit_slta"  # marks a planner that passes its recipe to the methods


def register() -> None:
    """Make the merge methods known to mergekit; a second call changes nothing."""
    known = {method.spec.name for method in merge_methods.registered_methods()}
    for name, method in METHODS.items():
        if name not in known:
            merge_methods.register(method)


def watch_planner() -> None:
    """Register the methods, pass them the whole recipe before each merge, and have adapters merged by content.

    mergekit itself shows a method only one tensor at a time. A second call changes nothing.
    """
    from mergekit.plan import MergePlanner

    register()
    ModelReference.merged = merge_adapter
    plan = MergePlanner.__init__
    if hasattr(plan, WATCHED):
        return

    @functools.wraps(plan)
    def init(
        self: MergePlanner, config: MergeConfiguration, arch_info: Any, options: MergeOptions, *rest: Any, **more: Any
    ) -> None:
        for model in config.referenced_models() & LoaderCache.loaders.keys():
            current_loader(model)  # an adapter may have changed since mergekit loaded it for an earlier merge
        for method in METHODS.values():
            method.forget()
        if config.merge_method in METHODS:
            METHODS[config.merge_method].begin(sound_experiment(config, options))
        plan(self, config, arch_info, options, *rest, **more)

    setattr(init, WATCHED, True)
    MergePlanner.__init__ = init
    finalize = FinalizeModel.execute

    @functools.wraps(finalize)
    def execute(self: FinalizeModel, *arguments: Any, **more: Any) -> None:
        finalize(self, *arguments, **more)
        for method in METHODS.values():
            method.written()

    FinalizeModel.execute = execute


_EXAMINED: ContextVar[tuple[Experiment, examine.Findings] | None] = ContextVar("examined", default=None)


@contextlib.contextmanager
def examined(experiment: Experiment, findings: examine.Findings) -> Iterator[None]:
    """Merge the recipe of a checked experiment without repeating its notes.

    The recipe is checked again only if a model's tensors could not be seen before its download.
    """
    token = _EXAMINED.set((experiment, findings))
    try:
        yield
    finally:
        _EXAMINED.reset(token)


def sound_experiment(config: MergeConfiguration, options: MergeOptions) -> Experiment:
    """Open and check a recipe before mergekit plans its merge, and log notes, unless it is ``examined`` already.

    Raises:
        SltaError: everything that is wrong with it.
    """
    known = _EXAMINED.get()
    if known and known[0].recipe.config is config:
        experiment, said = known
        if not said.seen:
            examine.examine(experiment).refuse_problems()
        return experiment
    experiment = Experiment(Recipe.from_config(config), **options.model_dump())
    found = examine.examine(experiment).refuse_problems()
    for note in found.notes if not options.quiet else ():
        LOG.warning(note)
    return experiment
