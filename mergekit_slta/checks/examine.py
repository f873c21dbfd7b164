"""Check a recipe for everything that can be known to be wrong before weights are read.

A check is a function that raises an ``SltaError``; here they are called, and their sentences collected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from mergekit_slta.checks import data, models, space, tensors, tokenizers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError, all_of
from mergekit_slta.featcal.solved import require_solvable
from mergekit_slta.layers.submodules import fallbacks
from mergekit_slta.models.architecture import left_out_by_mergekit
from mergekit_slta.models.headers import listed
from mergekit_slta.models.merged_adapters import adapter_option
from mergekit_slta.recipe.experiment import Experiment, Options, require_device
from mergekit_slta.recipe.recipe import RecipeOrFile
from mergekit_slta.recipe.settings import CalibrationSettings, FeatcalSettings, SltaSettings
from mergekit_slta.recipe.text import ignored
from mergekit_slta.tables import Paragraphs
from mergekit_slta.words import counted

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, repr=False)
class Findings(Paragraphs):
    """The findings of the checks, one sentence each.

    Attributes:
        problems: what keeps the recipe from being merged.
        notes: what the user should know before the merge; with problems, at most that they hide others.
        verdict: what the recipe is ready for; empty if there are problems.
        needs: download, disk and memory of the merge; None if there are problems.
    """

    problems: list[str]
    notes: list[str]
    verdict: str = ""
    needs: space.Needs | None = None

    def columns(self) -> dict[str, list[str]]:
        """The columns of ``to_frame``: a row for each sentence, a problem, the verdict, a note or a need."""
        rows = [("problem", problem) for problem in self.problems]
        rows += [("verdict", self.verdict)] if self.verdict else []
        rows += [("note", note) for note in self.notes]
        rows += [("need", need) for need in str(self.needs or "").splitlines()]
        return {"kind": [kind for kind, _ in rows], "sentence": [sentence for _, sentence in rows]}

    def __str__(self) -> str:
        first = f"{counted(len(self.problems), 'problem')} found." if self.problems else self.verdict
        problems, notes = (f"- {problem}" for problem in self.problems), (f"Note: {note}" for note in self.notes)
        return "\n".join([first, *problems, *notes, *([str(self.needs)] if self.needs else [])])


def check(
    recipe: RecipeOrFile,
    out_path: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Findings:
    """Find out what is wrong with a recipe; read configurations, file headers and calibration data, but no weights.

    Args:
        recipe: a recipe for ``slta``, ``featcal``, ``actmat`` or ``sftm``, or its file.
        out_path: the folder of the merged model, to check that there is room for it.
        options: see ``Options``.

    Returns:
        Problems, which keep the recipe from being merged, or notes and the merge's download, disk and
        memory; ``print`` shows them as sentences.
    """
    experiment = Experiment(recipe, **options)  # a device that cannot compute is one of the problems
    try:
        experiment.recipe.require_sound()
    except SltaError as error:
        return Findings(list(error.sentences), ["Models and data are checked once these are mended."])
    try:
        notes = examine(experiment, out_path=out_path)
    except SltaError as error:
        return Findings(list(error.sentences), [])
    settings = experiment.recipe.settings
    coarser = fallbacks(experiment.decoder, settings.level) if isinstance(settings, SltaSettings) else []
    shown = [drawn.example for drawn in experiment.drawn.values()]
    notes = [*map(str, coarser), *notes, *shown]  # a run logs the coarser levels when it measures
    return Findings([], notes, _verdict(recipe, experiment), space.needs(experiment))


def _verdict(given: RecipeOrFile, experiment: Experiment) -> str:
    recipe = experiment.recipe
    numbers = sum(header.count for header in experiment.model(recipe.base).tensors.values())
    size = f"{numbers / 1e9:.3g} billion" if numbers >= 1e9 else f"{numbers / 1e6:.3g} million"
    keeping = ", and keeps what the base model does on its prompts" if recipe.keep else ""
    file = os.fspath(given) if isinstance(given, (str, os.PathLike)) else "RECIPE"
    return (
        f"Ready: merges {counted(len(recipe.experts), 'expert')} of {size} parameters by {recipe.config.merge_method}"
        f"{keeping}; next: mergekit-yaml {file} ./merged{adapter_option(recipe.references)}"
    )


def examine(
    experiment: Experiment, *, out_path: str | os.PathLike[str] | None = None, merging: bool = True
) -> list[str]:
    """Run all checks of a recipe: first those of its text, then all of its models, data, folders and disks.

    Args:
        experiment: the opened recipe; a run after the checks need not open it again.
        out_path: the folder of the merged model, to check that there is room for it.
        merging: whether the recipe is to be merged, not only measured.

    Returns:
        Notes: sentences about something that is no mistake.

    Raises:
        SltaError: everything that is wrong, a sentence each.
    """
    recipe, out = experiment.recipe, Path(out_path) if out_path is not None and merging else None
    recipe.require_sound()
    checks: list[Callable[[], object]] = [
        partial(_check_models, experiment, out, merging),
        partial(require_device, experiment.device),
        partial(space.folders, recipe.settings, out),
    ]
    all_of([*checks, partial(data.calibration, experiment)] if recipe.method.runs_models else checks)
    return [*ignored(recipe.config, recipe.method), *_notes(experiment, merging)]


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
        yield partial(require_solvable, experiment)
    if not merging:
        return
    every = [experiment.model(reference) for reference in recipe.references]
    yield partial(tensors.complete_checkpoints, every, recipe.tokenizer_source is not None)
    for expert in recipe.experts:
        yield partial(tokenizers.same_vocabulary, experiment, expert.reference)
    yield partial(tokenizers.aligned_rows, experiment)
    if out is not None:
        yield partial(space.not_overwritten, every, out)
    yield partial(space.room, experiment, out)


def _notes(experiment: Experiment, merging: bool) -> Iterator[str]:
    recipe, settings = experiment.recipe, experiment.recipe.settings
    base, config = experiment.model(recipe.base), recipe.config
    for _, expert in experiment.pairs:
        yield from models.other_computation(base, expert, settings.runs_models)
        yield from models.adapted_ends(expert, experiment.options.transformers_cache)
        if clause := models.left_over(expert):
            yield f"{clause}: the entry 'quantization_config' is ignored."
    if (keep := recipe.keep) and (same := [e for e in recipe.experts if e.calibration == keep.calibration != ""]):
        yield (
            f"The base model has the prompts of {same[0]}, on which the merge cannot do what both do (every weight of "
            "slta is 1 / (1 + κ) with one expert): give it prompts of what is to be kept."
        )
    if not merging:
        return
    for task in recipe.tasks if settings.runs_models else ():
        yield from data.none_to_evaluate(experiment, task)
    if experiment.in_slices and (lost := left_out_by_mergekit(base)):
        yield f"mergekit plans a merge of slices by itself, and leaves {listed(lost)} of the base model {base} out."
    else:
        yield from tensors.outside_the_model(base, [expert for _, expert in experiment.pairs])
    yield from tokenizers.endless(experiment)
    dtype = (config.dtype or str(getattr(base.config, "dtype", None))).removeprefix("torch.")
    if dtype in HALF and not isinstance(settings, FeatcalSettings):
        yield (
            f"Merging in {dtype} rounds at every step: set 'dtype: float32' and 'out_dtype: "
            f"{config.out_dtype or dtype}' to round only once."
        )


def sound_experiment(recipe: RecipeOrFile, ranks: Ranks | None = None, **options: Any) -> Experiment:
    """Check a recipe for a measurement and download its models; all processes wait until each has checked it.

    Raises:
        SltaError: everything that is wrong with the recipe, or a model cannot be opened.
    """
    experiment = (ranks or Ranks()).together(lambda: Experiment(recipe, ranks=ranks, **options))

    def checked() -> None:
        experiment.recipe.method_of(CalibrationSettings)  # for another method there is nothing to measure
        examine(experiment, merging=False)

    experiment.ranks.together(checked)
    experiment.open()
    return experiment
