"""Every place where mergekit is reached into: what is replaced, why, and how it was.

mergekit 0.1.5 has a table of merge methods and no other way in: a method sees one tensor at a time; it sees neither the
recipe nor the output folder. So each function below that is marked with `replaces` replaces one function of mergekit's,
which it gets as ``stock``; its docstring says why. A merge's plan gets two tasks of ours besides (`PrepareMerge`,
`FinishMerge`), and each tensor's task carries its `Merge`, so that two plans of a process never share a result.

All was read from the source of mergekit 0.1.5. When this module is imported, the parameters of each function that it
replaces are compared with those expected here; if they differ, the import fails with one sentence, and mergekit works
without us. mergekit's loaders are replaced in `models/spellings.py`, which this module calls.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import mergekit.card
from mergekit.architecture import auto
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.io.tasks import FinalizeModel, GatherTensors, LoaderCache
from mergekit.io.tensor_writer import TensorWriter
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner

from mergekit_slta.errors import files_named, one_line
from mergekit_slta.host import registry
from mergekit_slta.host.method import Merge
from mergekit_slta.models.headers import WEIGHT_FILES
from mergekit_slta.models.merged_adapters import merge_adapter
from mergekit_slta.models.spellings import adapt_loaders, renew_loaders
from mergekit_slta.output import card
from mergekit_slta.output.companions import copy_companions, set_aside
from mergekit_slta.recipe.configuration import model_inputs

LOG = logging.getLogger(__name__)
READ_FROM = "0.1.5"

_REPLACEMENTS: list[tuple[Any, str, Callable[..., Any]]] = []  # whose function it was, its name there, our function


def replaces(owner: Any, name: str, *parameters: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the replacement of mergekit's ``owner.name``, which must have these parameters.

    Raises:
        ImportError: it is missing or has others.
    """
    stock = inspect.unwrap(getattr(owner, name, lambda: None))
    if tuple(inspect.signature(stock).parameters) != parameters:
        raise ImportError(
            f"mergekit {version('mergekit')} has changed {owner.__name__}.{name}, which mergekit-slta needs as it is "
            f"in mergekit {READ_FROM}: install that version, or a newer mergekit-slta."
        )

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def replacement(*arguments: Any, **named: Any) -> Any:
            return function(stock, *arguments, **named)

        _REPLACEMENTS.append((owner, name, replacement))
        return function

    return enter


def install() -> None:
    """Register the methods and replace mergekit's functions; a second call changes nothing."""
    registry.register()
    for owner, name, replacement in _REPLACEMENTS:
        setattr(owner, name, replacement)
    if "mergekit.merge" in sys.modules:  # it may have imported the function before
        sys.modules["mergekit.merge"].generate_card = mergekit.card.generate_card  # type: ignore[attr-defined]


# Models


@replaces(MergeConfiguration, "referenced_models", "self")
def referenced_models(stock: Callable[..., Any], self: MergeConfiguration) -> list[ModelReference]:
    """List a recipe's models in the recipe's order.

    mergekit lists a set, whose order changes between processes, and with it cards, and tokenizers made of several.
    """
    named = [*([self.base_model] if self.base_model else []), *(entry.model for entry in model_inputs(self))]
    return list(dict.fromkeys(named))


@replaces(ModelReference, "merged", "self", "cache_dir", "trust_remote_code", "lora_merge_dtype")
def merged(stock: Callable[..., Any], self: ModelReference, *arguments: Any, **named: Any) -> ModelReference:
    """Merge an adapter into a folder that is named by content.

    mergekit names it by the two paths, and reuses it when the adapter has been trained again.
    """
    return merge_adapter(self, *arguments, **named)


@replaces(auto, "get_model_tensor_names", "model", "options")
def get_model_tensor_names(stock: Callable[..., Any], model: ModelReference, options: MergeOptions) -> list[str]:
    """List the tensors of the model that an adapter is merged into.

    mergekit asks for them before it merges adapters, and fails, where it does not define the architecture itself.
    """
    if model.lora is not None:
        LoaderCache().setup(options)  # which mergekit does next: adapters are merged by its settings
        model = model.merged(options.lora_merge_cache, options.trust_remote_code, options.lora_merge_dtype)
    names: list[str] = stock(model, options)
    return names


# The plan


class PrepareMerge(Task[Merge]):
    """Runs the models before mergekit reads a tensor; the tasks of all tensors wait for it.

    The first tensors that mergekit reads are often the embeddings of all models, which take more memory than the
    layers that run.

    Attributes:
        merge: the merge.
        adapt: lets mergekit's loaders find what the models call otherwise.
        aligned: a task that aligns the rows of a tensor to the merged model's tokenizer, if there is one.
    """

    merge: Any
    adapt: Any
    aligned: Any

    def arguments(self) -> dict[str, Task[Any]]:
        return {}

    def priority(self) -> int:
        return 1_000_000

    def main_thread_only(self) -> bool:
        return True

    def execute(self, **_: Any) -> Merge:
        experiment = self.merge.opened
        LoaderCache().setup(experiment.options)  # another plan may have been made since, with other options
        for model in (experiment.base, *experiment.experts):
            model.open()  # from now on changes of its files are noticed
        self.adapt()
        if self.aligned is not None:  # so that an unusable tokenizer is said before the models run
            for _result in Executor([self.aligned]).run(quiet=True):
                pass
            LoaderCache().flush_all()  # a pickled shard stays in memory whole
        self.merge.prepare()
        merge: Merge = self.merge
        return merge


class MergedTensor(ExecuteMergeMethodTask):
    """mergekit's task for a tensor, which waits for the merge to be prepared."""

    prepared: PrepareMerge

    def arguments(self) -> dict[str, Task[Any]]:
        return {**super().arguments(), "prepared": self.prepared}


class FinishMerge(Task[None]):
    """Completes the output folder after mergekit has written the weights, before it writes the rest."""

    merge: Any
    weights: FinalizeModel

    def arguments(self) -> dict[str, Task[Any]]:
        return {"weights": self.weights, "writer": self.weights.writer_task}

    def main_thread_only(self) -> bool:
        return True

    def execute(self, writer: TensorWriter, **_: Any) -> None:
        folder, experiment = Path(self.weights.writer_task.out_path), self.merge.experiment
        name = WEIGHT_FILES[0 if writer.safe_serialization else 1]
        set_aside(folder, name if writer.shards_written == 1 else f"{name}.index.json")
        card.clear_beside(folder, self.merge.solution)
        copy_companions(experiment, folder)
        renew_loaders(())  # what was adapted is of this merge alone
        for model in (experiment.base, *experiment.experts):
            model.refuse_changes()
        self.merge.finish()
        _WRITTEN.set((self.merge, folder))


_WRITTEN: ContextVar[tuple[Merge, Path] | None] = ContextVar("written", default=None)  # what the next card is about


@replaces(MergePlanner, "_plan", "self")
def plan(stock: Callable[..., Any], self: MergePlanner) -> None:
    """Read all models anew, and bind a merge by one of our methods to its plan.

    mergekit keeps a loader of each model for the whole process, which goes on reading files that were replaced.
    """
    renew_loaders(self.config.referenced_models())
    if self.config.merge_method not in registry.METHODS:
        stock(self)
        return
    context = click.get_current_context(silent=True)  # of a command of mergekit's: let it end in a sentence
    if context is not None:
        context.with_resource(files_named("mend that and run the command again"))
    merge = registry.begin(self.config, self.options)
    experiment = merge.opened
    base = experiment.model(experiment.recipe.base)
    adapt = functools.partial(adapt_loaders, base, experiment.recipe.references, self.arch_info)
    merge.adapted = adapt()
    self._tensors = []  # mergekit keeps those of a plan that the same planner made before
    recipe, self.config = self.config, copy.deepcopy(self.config)  # mergekit rewrites it
    try:
        stock(self)
    finally:
        self.config = recipe
    gathered = (task.gather_tensors for _, task in self._tensors)
    aligned = next((task for task in gathered if not isinstance(task, GatherTensors)), None)
    prepared = PrepareMerge(merge=merge, adapt=adapt, aligned=aligned)
    for index, (weight, task) in enumerate(self._tensors):
        parameters = ImmutableMap(data={**dict(task.parameters.items()), "merge": merge})
        bound = MergedTensor.model_construct(**{**vars(task), "parameters": parameters}, prepared=prepared)
        self._tensors[index] = (weight, bound)


@replaces(MergePlanner, "plan_to_disk", "self", "out_path")
def plan_to_disk(stock: Callable[..., Any], self: MergePlanner, out_path: str) -> list[Task[Any]]:
    """Add the last task of a merge by one of our methods."""
    tasks: list[Task[Any]] = stock(self, out_path)
    weights = next(task for task in tasks if isinstance(task, FinalizeModel))
    merges = {task.prepared.merge for _, task in self._tensors if isinstance(task, MergedTensor)}
    return [*tasks, *(FinishMerge(merge=merge, weights=weights) for merge in merges)]


# The model card


@replaces(mergekit.card, "is_hf", "path")
def is_hf(stock: Callable[..., Any], path: str) -> bool:
    """Take a folder for a folder.

    mergekit looks a relative path such as ``models/base`` up on the Hub, which fails without a network when the weights
    are written.
    """
    return not os.path.exists(path) and bool(stock(path))


@replaces(mergekit.card, "generate_card", "config", "config_yaml", "name")
def generate_card(
    stock: Callable[..., str], config: MergeConfiguration, config_yaml: str, name: str | None = None
) -> str:
    """Write our part of the card of a merge by one of our methods, and the files that it shows, into its folder."""
    written = _WRITTEN.get()
    _WRITTEN.set(None)
    if written is None or config.merge_method not in registry.METHODS:
        return stock(config, config_yaml, name)
    merge, folder = written
    try:
        recipe = merge.opened.recipe
        card.write_beside(folder, recipe, merge.solution, plain=not merge.adapted)
        return card.merge_card(stock(config, card.published_recipe(recipe), name), folder, recipe, merge.solution)
    except Exception as error:  # the model is written: nothing about its card may make the merge fail
        LOG.warning("The model card says only what mergekit knows (%s).", one_line(error))
        LOG.debug("Why the model card says no more:", exc_info=True)
        return stock(config, config_yaml, name)


install()
