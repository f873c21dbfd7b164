"""Check a recipe for everything that can be known to be wrong before weights are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mergekit_slta.checks import adapters, compatibility, data, models, space, text, tokenizers
from mergekit_slta.checks.case import Case, Check, of_decoder, of_models, of_siblings
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import (
    ActmatSettings,
    CalibrationSettings,
    FeatcalSettings,
    MethodSettings,
    SftmSettings,
    SltaSettings,
)

# In the order in which problems are listed.
MODELS: tuple[Check, ...] = (
    text.recipe_text,
    models.openable_models,
    models.one_architecture,
    of_siblings(compatibility.shape_problem),
    of_siblings(compatibility.tied_problem),
    of_models(compatibility.quantization_problem),
    adapters.adapters,
    space.device,
)
LAYERS: tuple[Check, ...] = (models.known_decoder, of_decoder(models.whole_depth))
DATA: tuple[Check, ...] = (data.calibration_sources, data.same_samples, data.calibration_data)
# What each method has checked beyond the models. A new merge method is entered here.
CHECKS: dict[type[MethodSettings], tuple[Check, ...]] = {
    SltaSettings: (
        *LAYERS,
        of_decoder(tokenizers.compared_logits),
        of_decoder(models.level_submodules),
        *DATA,
        data.statistics_file,
    ),
    FeatcalSettings: (
        *LAYERS,
        of_decoder(tokenizers.compared_outputs),
        of_decoder(tokenizers.head_rows),
        of_decoder(models.solvable_layers),
        *DATA,
    ),
    ActmatSettings: (),
    SftmSettings: (),
}
MERGE: tuple[Check, ...] = (
    text.tensor_types,
    text.chat_template,
    data.same_names,
    models.planned_tensors,
    tokenizers.vocabularies,
    space.folders,
    space.disk_space,
)
NOTES: tuple[Check, ...] = (
    models.unseen_tensors,
    adapters.adapted_ends,
    models.other_configurations,
    tokenizers.padded_vocabularies,
)
MERGE_NOTES: tuple[Check, ...] = (
    models.lost_tensors,
    of_decoder(space.solving),
    text.precision,
    tokenizers.no_tokenizer,
)


@dataclass(frozen=True)
class Findings:
    """What the checks have found, one sentence each.

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


def check(recipe: Recipe, out_path: str | os.PathLike[str] | None = None, **options: Any) -> Findings:
    """Find out what is wrong with a recipe; read configurations, file headers and calibration data, but no weights.

    Args:
        recipe: a recipe for ``slta``, ``featcal``, ``actmat`` or ``sftm``.
        out_path: the folder of the merged model, to check that there is room for it.
        options: ``device`` ("cpu"), ``trust_remote_code`` (False), ``lora_merge_cache`` (None), ``transformers_cache``
            (None), ``quiet`` (False), and whatever else mergekit has options for.

    Returns:
        Problems, which keep the recipe from being merged, and notes; ``print`` shows them as sentences.

    Raises:
        SltaError: the recipe is for another method.
    """
    return examine(Experiment(recipe, **options), out_path=out_path, running=False)


def examine(
    experiment: Experiment,
    *,
    out_path: str | os.PathLike[str] | None = None,
    merging: bool = True,
    running: bool = True,
) -> Findings:
    """Run the checks on a recipe, its models' configurations and file headers, and its calibration data.

    Args:
        experiment: the opened recipe; a run after the checks need not open it again.
        out_path: the folder of the merged model, to check that there is room for it.
        merging: whether the recipe is to be merged, not only measured.
        running: whether the recipe is run next. The run logs some notes itself, so they are left out here.
    """
    method = experiment.recipe.method
    case = Case(experiment, None if out_path is None else Path(out_path))
    checks = [*MODELS, *CHECKS[method], *(MERGE if merging else ())]
    sound = not experiment.recipe.problems  # else defaults stand for wrong values, and notes would speak of them
    said_by_run = [data.few_records, of_decoder(models.coarser_submodules)] if method.runs_models and sound else []
    notes = [*(() if running else said_by_run), *NOTES, *(MERGE_NOTES if merging else ())]

    def sentences(checks: Sequence[Check]) -> list[str]:
        """Everything that the checks say, each sentence once."""
        return list(dict.fromkeys(sentence for check in checks for sentence in check(case)))

    # What it logs, a note says.
    with contextlib.nullcontext() if running and sound else compatibility.silenced("mergekit_slta.data.draw"):
        problems = sentences(checks)
    return Findings(problems, sentences(notes), seen=all(model.tensors is not None for model in case.models))


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
