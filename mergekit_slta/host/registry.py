"""Register this package's merge methods with mergekit, and check their recipes before mergekit plans a merge."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from mergekit import merge_methods
from mergekit.architecture import ModelArchitecture, auto
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.io.tasks import FinalizeModel, GatherTensors, LoaderCache, ReturnTensor, SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions

from mergekit_slta.checks import examine
from mergekit_slta.checks.space import full_disk_said
from mergekit_slta.errors import files_named, logger, one_line
from mergekit_slta.host.actmat import ActmatMethod
from mergekit_slta.host.base import CalibratedMethod, FiniteMethod
from mergekit_slta.host.featcal import FeatcalMethod
from mergekit_slta.host.sftm import SftmMethod
from mergekit_slta.host.slta import SltaMethod
from mergekit_slta.models.headers import WEIGHT_FILES
from mergekit_slta.models.merged_adapters import merge_adapter
from mergekit_slta.models.spellings import adapt_loader, other_names, renew_loaders
from mergekit_slta.output import card
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe

if TYPE_CHECKING:
    from mergekit.plan import MergePlanner

LOG = logger(__name__)

# A new merge method is entered here.
METHODS: dict[str, FiniteMethod] = {
    method.spec.name: method for method in (SltaMethod(), FeatcalMethod(), ActmatMethod(), SftmMethod())
}
WATCHED = "_watched_by_mergekit_slta"  # marks a planner that passes its recipe to the methods
CHECKED = "_checked_by_mergekit_slta"  # a planner's checked recipe


def register() -> None:
    """Make the merge methods known to mergekit; a second call changes nothing."""
    known = {method.spec.name for method in merge_methods.registered_methods()}
    for name, method in METHODS.items():
        if name not in known:
            merge_methods.register(method)


def watch_planner() -> None:
    """Register the methods, let them see the recipe and run the models before a merge, and merge adapters by content.

    mergekit itself shows a method only one tensor at a time, and fails on adapters of architectures that it does not
    define, because it lists their tensors before it merges the adapters. A second call changes nothing.
    """
    from mergekit.plan import MergePlanner

    register()
    ModelReference.merged = merge_adapter
    if hasattr(MergePlanner.plan_to_disk, WATCHED):
        return
    names = auto.get_model_tensor_names

    @functools.wraps(names)
    def tensor_names(model: ModelReference, options: MergeOptions) -> list[str]:
        if model.lora is not None:
            LoaderCache().setup(options)  # which mergekit does next: adapters are merged by its settings
            model = model.merged(options.lora_merge_cache, options.trust_remote_code, options.lora_merge_dtype)
        found: list[str] = names(model, options)
        return found

    auto.get_model_tensor_names = tensor_names
    MergePlanner.plan_to_disk = _watched(MergePlanner.plan_to_disk)
    MergePlanner.plan_in_memory = _watched(MergePlanner.plan_in_memory)
    finalize = FinalizeModel.execute

    @functools.wraps(finalize)
    def execute(self: FinalizeModel, writer: TensorWriter, **more: Any) -> None:
        finalize(self, writer, **more)
        folder = Path(self.writer_task.out_path)
        weights = WEIGHT_FILES[0 if writer.safe_serialization else 1]
        _OUTPUT.set(folder)
        for method in METHODS.values():
            method.written(folder, weights if writer.shards_written == 1 else f"{weights}.index.json")

    FinalizeModel.execute = execute


def _watched(plan: Callable[..., list[Task[Any]]]) -> Callable[..., list[Task[Any]]]:
    """Show the recipe to its method before a planner plans the merge, and have the method run the models afterwards.

    A planner keeps its own recipe until then, so that a program may make several before it plans; what is merged is the
    merge that was planned last.
    """

    @functools.wraps(plan)
    def plan_watched(self: MergePlanner, *arguments: Any, **more: Any) -> list[Task[Any]]:
        config, options = self.config, self.options
        renew_loaders(config.referenced_models())
        for known in METHODS.values():
            known.forget()
        method = METHODS.get(config.merge_method)
        if method is None:
            return plan(self, *arguments, **more)
        _explain_file_errors(config, options)
        if not hasattr(self, CHECKED):
            setattr(self, CHECKED, sound_experiment(config, options))  # once, because a planner rewrites its recipe
        experiment = getattr(self, CHECKED)
        method.begin(experiment)
        adapt_loaders(experiment, self.arch_info)
        _watch_card()
        tasks = plan(self, *arguments, **more)
        if isinstance(method, CalibratedMethod):
            _try_vocabulary(tasks)
            method.prepare()
        return tasks

    setattr(plan_watched, WATCHED, True)
    return plan_watched


def _try_vocabulary(tasks: Sequence[Task[Any]]) -> None:
    """Have mergekit align the rows of one tensor, if it aligns any, so that it fails before the models are run."""
    merged = (task.tensor_task for task in tasks if isinstance(task, (SaveTensor, ReturnTensor)))
    gathered = (task.gather_tensors for task in merged if isinstance(task, ExecuteMergeMethodTask))
    if aligned := next((task for task in gathered if not isinstance(task, GatherTensors)), None):
        for _ in Executor([aligned]).run(quiet=True):
            pass
        LoaderCache().flush_all()  # a pickled shard stays in memory whole


def _explain_file_errors(config: MergeConfiguration, options: MergeOptions) -> None:
    """Let a command of mergekit's end in a sentence if a file cannot be read or written, also by mergekit itself."""
    context = click.get_current_context(silent=True)
    if context is None:
        return
    context.with_resource(files_named("mend that and run the command again"))
    if out := context.params.get("out_path"):
        experiment = Experiment(Recipe.from_config(config), **options.model_dump())
        context.with_resource(full_disk_said(experiment, Path(out)))


_OUTPUT: ContextVar[Path] = ContextVar("output")  # where the last merge was written to


def _watch_card() -> None:
    """Have our part added to the card that mergekit writes after the merge of a method of ours.

    ``run_merge`` looks its function for cards up in its own module, which is there by the time that it plans. Where it
    is not, or a card cannot be told more, mergekit's own is written.
    """
    run = sys.modules.get("mergekit.merge")
    generate = getattr(run, "generate_card", None)
    if generate is None or hasattr(generate, WATCHED):
        return

    @functools.wraps(generate)
    def generate_card(config: MergeConfiguration, config_yaml: str, name: str | None = None) -> str:
        written: str = generate(config=config, config_yaml=config_yaml, name=name)
        method, folder = METHODS.get(config.merge_method), _OUTPUT.get(None)
        if method is None or folder is None:
            return written
        try:
            content = yaml.safe_load(config_yaml)
            recipe = Recipe.from_config(MergeConfiguration.model_validate(content), content)
            card.write_beside(folder, recipe, method.solution)
            return card.merge_card(written, folder, recipe, method, method.solution)
        except Exception as error:  # the model is written: nothing about its card may make the merge fail
            LOG.warning("The model card says only what mergekit knows (%s).", one_line(error))
            LOG.debug("Why the model card says no more:", exc_info=True)
            return written

    setattr(generate_card, WATCHED, True)
    run.generate_card = generate_card  # type: ignore[union-attr]


def adapt_loaders(experiment: Experiment, arch_info: ModelArchitecture) -> None:
    """Let mergekit find what the models call otherwise than it asks for it, and leave out the rows of no token."""
    base = experiment.model(experiment.recipe.base)
    asked = {weight.name for weight in arch_info.all_weights(base.config)}
    for reference in experiment.recipe.references:
        stored = LoaderCache().get(reference).index.tensor_paths
        missing = [name for name in asked if name not in stored]
        names = other_names(base.built, stored, missing) if missing and base.built else {}
        adapt_loader(reference, names, experiment.padded_tensors(reference))


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
    context = click.get_current_context(silent=True)
    # mergekit-multi, which has folders between its steps, names only the folder of its last one.
    given = context.params if context and "intermediate_dir" not in context.params else {}
    found = examine.examine(experiment, out_path=given.get("out_path")).refuse_problems()
    for note in found.notes if not options.quiet else ():
        LOG.warning(note)
    return experiment
