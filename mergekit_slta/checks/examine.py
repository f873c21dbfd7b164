"""Check a recipe for everything that can be known to be wrong before weights are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import click

from mergekit_slta.checks import adapters, data, models, space, tensors, tokenizers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError, all_of
from mergekit_slta.featcal.solvable import require_solvable
from mergekit_slta.layers.submodules import fallbacks
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.options import ModelOptions
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import CalibrationSettings, FeatcalSettings, SltaSettings
from mergekit_slta.recipe.text import ignored

HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Findings:
    """The findings of the checks, one sentence each.

    Attributes:
        problems: what keeps the recipe from being merged.
        notes: what the user should know before the merge.
        seen: whether the tensors of all models could be checked without a download.
    """

    problems: list[str]
    notes: list[str]
    seen: bool = True

    @property
    def listed_problems(self) -> str:
        count = len(self.problems)
        return "\n- ".join([f"{count} problem{'s' * (count > 1)} found.", *self.problems])

    def __str__(self) -> str:
        found = self.listed_problems if self.problems else "No problem found."
        return "\n".join([found, *(f"Note: {note}" for note in self.notes)])

    def refuse_problems(self) -> Findings:
        """Return these findings if they hold no problem.

        Raises:
            SltaError: all problems.
        """
        if self.problems:
            raise SltaError(*self.problems)
        return self

    def say_notes(self) -> None:
        for note in self.notes:
            click.echo(f"Note: {note}", err=True)


def check(recipe: Recipe, out_path: str | os.PathLike[str] | None = None, **options: Unpack[ModelOptions]) -> Findings:
    """Find out what is wrong with a recipe; read configurations, file headers and calibration data, but no weights.

    Args:
        recipe: a recipe for ``slta``, ``featcal``, ``actmat`` or ``sftm``.
        out_path: the folder of the merged model, to check that there is room for it.
        options: where to compute, and how to get models; see ``ModelOptions``.

    Returns:
        Problems, which keep the recipe from being merged, and notes; ``print`` shows them as sentences.

    Raises:
        SltaError: the recipe is for another method.
    """
    experiment = Experiment(recipe, **options)
    found = examine(experiment, out_path=out_path)
    if not found.problems and isinstance(recipe.settings, SltaSettings):  # a run logs it when it measures
        coarser = fallbacks(experiment.decoder, recipe.settings.level)
        found = replace(found, notes=[*map(str, coarser), *found.notes])
    return found


def examine(
    experiment: Experiment, *, out_path: str | os.PathLike[str] | None = None, merging: bool = True
) -> Findings:
    """Run all checks of a recipe, and collect the sentences of the errors that they raise.

    If the recipe's text is wrong, nothing else is looked at. Models are compared only if each can be merged, and notes
    are taken only if there is no problem.

    Args:
        experiment: the opened recipe; a run after the checks need not open it again.
        out_path: the folder of the merged model, to check that there is room for it.
        merging: whether the recipe is to be merged, not only measured.

    Raises:
        SltaError: the recipe is for another method.
    """
    recipe, out = experiment.recipe, None if out_path is None else Path(out_path)
    method, said = recipe.method, dict[str, None]()

    def passes(*checks: Callable[[], object]) -> bool:
        try:
            all_of(checks)
        except SltaError as error:
            said.update(dict.fromkeys(error.sentences))
            return False
        return True

    if passes(recipe.require_sound):
        experts = [expert.reference for expert in recipe.experts]
        each = [partial(models.one_model, experiment, reference) for reference in recipe.references]
        if passes(*each, *(partial(models.one_family, experiment, expert) for expert in experts)):
            passes(*_of_all_models(experiment, out, merging))
        passes(partial(space.device, experiment), partial(space.folders, experiment, out if merging else None))
        if method.runs_models:
            drawing = passes(partial(experiment.model, recipe.base))
            passes(partial(data.calibration, experiment, drawing))
    if said:
        return Findings(list(said), [])
    notes = list(ignored(recipe.config, method))
    notes += [note for kind in (NOTES + MERGE_NOTES if merging else NOTES) for note in kind(experiment)]
    seen = all(experiment.model(reference).tensors is not None for reference in recipe.references)
    return Findings([], notes, seen)


def _of_all_models(experiment: Experiment, out: Path | None, merging: bool) -> Iterator[Callable[[], object]]:
    """The checks that need all models, and that each of these can be merged by itself."""
    settings = experiment.recipe.settings
    if isinstance(settings, SltaSettings):
        yield partial(experiment.require_levels, [settings.level])
    if isinstance(settings, FeatcalSettings):
        yield partial(require_solvable, experiment)
    if merging:
        yield partial(tensors.mergeable_tensors, experiment)
        for expert in experiment.recipe.experts:
            yield partial(tokenizers.vocabularies, experiment, expert.reference)
        yield partial(space.disk_space, experiment, out)


def _half_precision(experiment: Experiment) -> Iterator[str]:
    """Merges in half precision, unless the method solves its tensors in float32 beforehand."""
    config, method = experiment.recipe.config, experiment.recipe.method
    given = (config.dtype or "").removeprefix("torch.")
    opened = map(experiment.model, experiment.recipe.references)
    stored = {str(getattr(model.config, "dtype", None)).removeprefix("torch.") for model in opened}
    half = next((name for name in HALF if name == given or (not given and name in stored)), None)
    if half and not method.solves_layers:
        yield (
            f"Merging in {half} rounds at every step: set 'dtype: float32' and 'out_dtype: {config.out_dtype or half}' "
            "to round only once."
        )


# A note is a sentence about something that is no mistake.
Note = Callable[[Experiment], Iterator[str]]
NOTES: tuple[Note, ...] = (
    models.unseen_tensors,
    adapters.adapted_ends,
    models.other_configurations,
)
MERGE_NOTES: tuple[Note, ...] = (
    tensors.lost_tensors,
    space.solving,
    _half_precision,
    tokenizers.no_tokenizer,
)


def sound_experiment(recipe: Recipe, ranks: Ranks | None = None, **options: Any) -> Experiment:
    """Check a recipe for a measurement and download its models; all processes wait until each has checked it.

    Raises:
        SltaError: everything that is wrong with the recipe.
    """
    experiment = Experiment(recipe, ranks=ranks, **options)

    def checked() -> Findings:
        recipe.method_of(CalibrationSettings)  # for another method there is nothing to measure
        return examine(experiment, merging=False).refuse_problems()

    open_models(experiment, experiment.ranks.together(checked))
    return experiment


def open_models(experiment: Experiment, found: Findings) -> None:
    """Download the models of a checked recipe, and check what only their download shows.

    Raises:
        SltaError: a model cannot be opened, or has a problem.
    """
    experiment.open()
    if not found.seen:
        experiment.ranks.together(lambda: examine(experiment, merging=False).refuse_problems())
