"""Check a recipe for everything that can be known to be wrong before weights are read.

A check is a function that raises an ``SltaError``; here they are called, and their sentences collected.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import click
import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from transformers import PreTrainedTokenizerBase

from mergekit_slta.checks import models, space, tokenizers
from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import CalibrationData, is_dataset, parse_dataset, source_key
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError, all_of, as_note, printable
from mergekit_slta.evaluation.evaluate import MORE
from mergekit_slta.featcal.groups import find_groups, uncorrected
from mergekit_slta.layers.trace import of_each_layer
from mergekit_slta.models.hub import HUB_ERRORS, reason
from mergekit_slta.recipe.experiment import Experiment, Options, require_device
from mergekit_slta.recipe.new import ADAPTERS
from mergekit_slta.recipe.recipe import Recipe, RecipeOrFile, Task, loaded, plain, published_names, require_calibration
from mergekit_slta.recipe.settings import (
    ActmatSettings,
    CalibrationSettings,
    FeatcalSettings,
    SltaSettings,
    are_adapters,
    base_parameters,
)
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.statistics_file import resolve_statistics
from mergekit_slta.slta.weights import fallbacks
from mergekit_slta.words import counted

HALF = ("bfloat16", "float16")
SHOWN = 150  # characters at the beginning and at the end of a sample


@dataclass(frozen=True, repr=False)
class Findings:
    """The findings of the checks, one sentence each."""

    problems: list[str]  # what prevents the merge
    notes: list[str]  # what the user should know before the merge; with problems, at most that they hide others
    verdict: str = ""  # what the recipe is ready for; empty if there are problems
    needs: space.Needs | None = None  # download, disk and memory of the merge; None if there are problems
    exit_code: int = 0  # of ``check``: 3 if all problems are of the machine or the network, 1 if others are

    def __str__(self) -> str:
        first = f"{counted(len(self.problems), 'problem')} found." if self.problems else self.verdict
        problems, notes = (f"- {printable(problem)}" for problem in self.problems), map(as_note, self.notes)
        return "\n".join([first, *problems, *notes, *([str(self.needs)] if self.needs else [])])

    __repr__ = __str__


def check(recipe: RecipeOrFile, out_path: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> Findings:
    """Find everything that is wrong with a recipe, from configurations, file headers and prompts; read no tensors.

    Args:
        recipe: a recipe for ``slta``, ``featcal``, ``actmat`` or ``sftm``, or its file.
        out_path: the folder of the merged model, to check that there is room for it.
        options: see ``Options``.

    Returns:
        Problems, which keep the recipe from being merged, or notes and the merge's download, disk and
        memory; ``print`` shows them as sentences.
    """
    experiment = Experiment(loaded(recipe), **plain(options))  # a device that cannot compute is one of the problems
    try:
        experiment.recipe.require_sound()
    except SltaError as error:
        notes = ["Models, data and disk are checked once the recipe is correct."]
        return Findings(list(error.sentences), notes, exit_code=error.exit_code)
    try:
        notes = examine(experiment, out_path=out_path)
    except SltaError as error:
        return Findings(list(error.sentences), [], exit_code=error.exit_code)
    settings = experiment.recipe.settings
    coarser = fallbacks(experiment.decoder, settings.level) if isinstance(settings, SltaSettings) else []
    shown = [first_sample(drawn, experiment.samples_tokenizer) for drawn in experiment.drawn.values()]
    notes = [*map(str, coarser), *notes, *shown]  # a run logs the coarser levels when it measures
    return Findings([], notes, _verdict(recipe, experiment), space.needs(experiment))


def first_sample(data: CalibrationData, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first sample that was drawn from a source, as the model sees it."""
    (row, *others), answer, known = data.token_ids, data.answers[0], len(data.answers) - data.answers.count(None)

    def shown(begin: int, end: int) -> str:
        text = str(tokenizer.decode([*row[begin:end]], clean_up_tokenization_spaces=False))
        return repr(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} … {text[-SHOWN:]}")

    ends = f"its answer is {shown(*answer)}" if answer else "no answer is known in it"
    some = f" An answer is known in {known} of {1 + len(others)} prompts." if 0 < known <= len(others) else ""
    return f"Row {data.records[0] + 1} of {data.source!r} as the model sees it: {shown(0, len(row))}; {ends}.{some}"


def _verdict(source: RecipeOrFile, experiment: Experiment) -> str:
    recipe = experiment.recipe
    numbers = sum(header.shape.numel() for header in experiment.model(recipe.base).tensors.values())
    size = f"{numbers / 1e9:.3g} billion" if numbers >= 1e9 else f"{numbers / 1e6:.3g} million"
    keeping = ", with prompts for the base model" if recipe.keep else ""
    options = [*experiment.same_options()]
    out = f"./merged-{recipe.config.merge_method}"
    command = f"merge(recipe, '{out}')" + " with the same options" * bool(options)
    if isinstance(source, (str, os.PathLike)):
        command = shlex.join(["mergekit-yaml", os.fspath(source), out, *options])
    return (
        f"Ready: merges {counted(len(recipe.experts), 'expert')} of {size} parameters with {recipe.config.merge_method}"
        f"{keeping}; next: {command}"
    )


def examine(
    experiment: Experiment,
    *,
    out_path: str | os.PathLike[str] | None = None,  # of the merged model, to check that there is room for it
    merging: bool = True,  # whether the recipe is to be merged, not only measured
    unwritten: Collection[str] = (),  # calibration files that will be written before the merge
    downloading: bool = False,  # whether datasets may be downloaded, before the hours that models take
) -> list[str]:
    """Run all checks of a recipe, first those of its text, and return notes; refuse with a sentence for each fault."""
    recipe, out = experiment.recipe, Path(out_path) if out_path is not None and merging else None
    checks: list[Callable[[], object]] = [
        *([partial(_more_than_a_copy, recipe)] if merging else []),
        partial(_check_models, experiment, out, merging),
        partial(require_device, experiment.device),
        partial(space.folders, experiment, out),
    ]
    all_of([*checks, partial(_data, experiment, unwritten, downloading)] if recipe.settings.runs_models else checks)
    notes = list(_notes(experiment, merging))
    experiment.sources.clear()  # from now on memory is for models
    return notes


def _more_than_a_copy(recipe: Recipe) -> None:
    """Refuse to solve a whole model for what a copy of its only expert does better."""
    if isinstance(recipe.settings, FeatcalSettings) and len(recipe.tasks) == 1:
        raise SltaError(
            f"'featcal' would only approach {recipe.experts[0]}, the one model with prompts: list the base model with "
            "a 'calibration' of its own, to keep its abilities, or copy the expert instead of merging."
        )


def _check_models(experiment: Experiment, out: Path | None, merging: bool) -> None:
    """Check each model and whether it is of the base model's family; if all are, check them together."""
    base, *experts = experiment.recipe.references
    checks = [partial(models.one_model, experiment, model) for model in (base, *experts)]
    all_of([*checks, *(partial(models.same_family, experiment, model) for model in experts)])
    all_of(_of_all_models(experiment, out, merging))


def _of_all_models(experiment: Experiment, out: Path | None, merging: bool) -> Iterator[Callable[[], object]]:
    """The checks of models that can each be opened and are of one family."""
    recipe, settings = experiment.recipe, experiment.recipe.settings
    if isinstance(settings, SltaSettings):
        yield partial(experiment.require_levels, [settings.level])
    if isinstance(settings, FeatcalSettings):
        yield partial(of_each_layer, experiment.decoder, find_groups)  # which refuses layers that cannot run alone
    if not merging:
        return
    opened = [*map(experiment.model, recipe.references)]
    yield partial(models.complete_checkpoints, opened, recipe.tokenizer_source is not None)
    for expert in recipe.experts:
        yield partial(tokenizers.same_vocabulary, experiment, expert.reference)
    yield partial(tokenizers.aligned_rows, experiment)
    if out is not None:
        yield partial(space.not_overwritten, opened, out)
    yield partial(space.room, experiment, out)


def sound_experiment(recipe: RecipeOrFile, ranks: Ranks | None = None, **options: Any) -> Experiment:
    """Check a recipe for a measurement and download its models; all processes wait until each has checked it."""
    with (ranks or Ranks()).one_refusal():
        experiment = Experiment(loaded(recipe), ranks=ranks, **options)
        experiment.recipe.settings_class(CalibrationSettings)  # for another method there is nothing to measure
        notes = examine(experiment, merging=False, downloading=True)
    for note in notes if ranks and not experiment.quiet else ():  # `evaluate` follows a merge, which has printed them
        click.echo(as_note(note), err=True)
    experiment.open()
    return experiment


# Calibration data and statistics


def _data(experiment: Experiment, unwritten: Collection[str], downloading: bool) -> None:
    """Refuse data that cannot be used, or a statistics file that cannot be used or written.

    Without ``downloading``, and where the Hub can be reached, it is only asked whether it has a dataset. Otherwise a
    merge reads the cache, and so does this check.
    """
    recipe, settings = experiment.recipe, experiment.recipe.settings_of(CalibrationSettings)
    name = settings.statistics if isinstance(settings, SltaSettings) else ""
    file = resolve_statistics(name, experiment.options.transformers_cache) if name else None
    measured = file is not None and file.exists()
    tasks = [task for task in recipe.tasks if task.calibration and task.calibration not in unwritten]
    checks: list[Callable[[], object]] = [partial(_require_samples, experiment, task, downloading) for task in tasks]
    if file is not None and not (measured or tasks):
        fix = "correct its name, or give each expert a 'calibration' to measure it"
        raise SltaError(f"There is no statistics file {file} (the current directory is {os.getcwd()!r}): {fix}.")
    checks.append(partial(require_calibration, recipe, statistics=measured))
    if file is not None and not measured:
        checks.append(partial(space.require_writable, f"The statistics file {file}", file))
    if file is not None and measured and isinstance(settings, SltaSettings):
        checks.append(lambda: Statistics.load(file).submodules(settings.level))  # the run compares all else
    if isinstance(settings, SltaSettings) and not measured:
        checks.append(partial(published_names, recipe))
    all_of(checks)
    experiment.load_data([task for task in tasks if _is_seen(experiment, task)])


def _require_samples(experiment: Experiment, task: Task, downloading: bool) -> None:
    """Refuse a source of no samples that the models can read, a dataset that is misspelt, or a wrong template."""
    if task.template:
        template_fields(task.template)
    if downloading or not is_dataset(task.calibration) or not _on_hub(task.calibration):
        experiment.draw(task)


def _on_hub(source: str) -> bool:
    """Whether the Hub has a dataset, False for a folder or without a network; refuse one that it does not have."""
    name, _, _ = parse_dataset(source)
    try:
        return not os.path.isdir(name) and bool(huggingface_hub.dataset_info(name, timeout=10))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SltaError(f"Calibration source {source!r} cannot be used: on the Hub, {reason(error)}.") from error
    except HUB_ERRORS:
        return False


def _is_seen(experiment: Experiment, task: Task) -> bool:
    """Whether a task's prompts were drawn; a dataset's are only if it need not be downloaded."""
    return (task, task.samples) in experiment.drawn


# Notes


def _notes(experiment: Experiment, merging: bool) -> Iterator[str]:
    recipe, settings = experiment.recipe, experiment.recipe.settings
    (base, *experts), config = map(experiment.model, recipe.references), recipe.config
    if not settings.runs_models and (parameters := base_parameters(config)):
        yield (
            f"'{settings.method}' ignores {', '.join(parameters)} of the base model under 'models': "
            "only 'featcal' and 'slta' keep the base model's abilities."
        )
    for expert in experts:
        yield from models.other_entries(base, expert, settings.runs_models)
        yield from models.other_base(base, expert, experiment.options.transformers_cache)
    of_keep = source_key(recipe.keep.calibration) if recipe.keep and recipe.keep.calibration else None
    if same := [e for e in recipe.experts if e.calibration and source_key(e.calibration) == of_keep]:
        yield (
            f"The base model and {same[0]} have the same prompts, on which the merge cannot keep both models' behavior "
            "(with one expert, every weight of slta is 1 / (1 + κ)): give the base model prompts of its own."
        )
    for task in recipe.tasks if settings.runs_models else ():
        if is_dataset(task.calibration) and not _is_seen(experiment, task):
            yield f"The prompts of {task.calibration} are read when the merge begins: this check has not seen them."
    if isinstance(settings, FeatcalSettings) and (layers := uncorrected(experiment.decoder)):
        yield layers
    if isinstance(settings, ActmatSettings) and are_adapters(*recipe.references):
        yield (
            "The changes of adapters do not show which inputs their tasks have, so actmat is about as good as a "
            "weighted sum there: take 'merge_method: featcal' with a few prompts for each (`ask` writes answers), or, "
            f"without prompts, 'task_arithmetic' with a 'weight' of about {ADAPTERS / len(recipe.experts):.1g}."
        )
    if settings.runs_models and base.text_config is not base.config:
        yield f"What {base} has beside its language model, such as vision, stays as it is, even if experts changed it."
    if settings.runs_models and not experiment.options.lazy_unpickle:
        yield from models.pickled(base, *experts)
    has_prompts = any(task.calibration for task in recipe.tasks)
    if has_prompts and experiment.device == "cpu" and torch.accelerator.is_available():
        yield "This machine has a GPU, which this run does not use: add --cuda, or on a Mac --device mps."
    if not merging:
        return
    if len(recipe.experts) == 1 and not recipe.keep and isinstance(settings, SltaSettings):
        yield (
            "With one expert and no prompts for the base model, the merge is nearly a copy of the expert: list the "
            "base model with a 'calibration' of its own."
        )
    for task in recipe.tasks if settings.runs_models else ():
        yield from none_to_evaluate(experiment, task)
    yield from models.outside_the_model(base, *experts)
    yield from tokenizers.endless(experiment)
    yield from tokenizers.other_templates(experiment)
    dtype = (config.dtype or base.dtype).removeprefix("torch.")
    of_adapters = experiment.options.lora_merge_dtype or base.dtype
    rounded = any(one.lora for one in recipe.references) and of_adapters.removeprefix("torch.") in (*HALF, "")
    if dtype in HALF and (rounded or not isinstance(settings, FeatcalSettings)):
        yield (
            f"Merging in {dtype} rounds at every step: to round only once, set 'dtype: float32' and 'out_dtype: "
            f"{config.out_dtype or dtype}'."
        )


def none_to_evaluate(experiment: Experiment, task: Task) -> Iterator[str]:
    """Say that calibration leaves a task no prompt for ``evaluate``, or what is wrong with its test data.

    No merge needs these, so they are no problem. Datasets are not downloaded.
    """
    source = task.evaluation or task.calibration
    if not _is_seen(experiment, task) or is_dataset(task.evaluation):
        return
    try:
        left = experiment.held_out(task, 1).records
    except SltaError as error:
        yield from error.sentences
        return
    if not left:
        has = "only prompts that calibrate"
        if source == task.calibration:
            usable = experiment.source(task, source).draw(sys.maxsize, quiet=True)  # also by other tasks
            has = f"only {counted(len(usable.records), 'prompt')}, which all calibrate"
        yield f"Calibration source {source!r} of {task} has {has}: none is left for `evaluate`. {MORE}."
