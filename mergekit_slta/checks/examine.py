"""Everything about a recipe that can be known to be wrong before weights are read, all at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mergekit_slta.checks.adapters import adapters
from mergekit_slta.checks.case import Case, Check, of_decoder, of_models, of_siblings
from mergekit_slta.checks.compatibility import quantization_problem, shape_problem, silenced, tied_problem
from mergekit_slta.checks.data import (
    calibration_data,
    calibration_sources,
    few_records,
    same_samples,
    statistics_file,
)
from mergekit_slta.checks.models import (
    coarser_submodules,
    compared_logits,
    compared_outputs,
    head_rows,
    known_decoder,
    level_submodules,
    no_tokenizer,
    one_architecture,
    openable_models,
    other_configurations,
    planned_tensors,
    solvable_layers,
    unseen_tensors,
    vocabularies,
    whole_depth,
)
from mergekit_slta.checks.space import disk_space, feature_merge_needs, folders
from mergekit_slta.checks.text import card_lookup, precision, recipe_text, tensor_types
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import ActmatSettings, FeatcalSettings, MethodSettings, SftmSettings, SltaSettings

# In the order in which problems are listed.
MODELS: tuple[Check, ...] = (
    recipe_text,
    openable_models,
    one_architecture,
    of_siblings(shape_problem),
    of_siblings(tied_problem),
    of_models(quantization_problem),
    adapters,
)
LAYERS: tuple[Check, ...] = (known_decoder, of_decoder(whole_depth))
DATA: tuple[Check, ...] = (calibration_sources, same_samples, calibration_data)
# What each method has checked beyond the models. A new merge method is entered here.
CHECKS: dict[type[MethodSettings], tuple[Check, ...]] = {
    SltaSettings: (*LAYERS, of_decoder(compared_logits), of_decoder(level_submodules), *DATA, statistics_file),
    FeatcalSettings: (
        *LAYERS,
        of_decoder(compared_outputs),
        of_decoder(head_rows),
        solvable_layers,
        *DATA,
    ),
    ActmatSettings: (),
    SftmSettings: (),
}
MERGE: tuple[Check, ...] = (tensor_types, planned_tensors, vocabularies, folders, disk_space)
NOTES: tuple[Check, ...] = (unseen_tensors, other_configurations)
MERGE_NOTES: tuple[Check, ...] = (feature_merge_needs, precision, no_tokenizer, card_lookup)


@dataclass(frozen=True)
class Findings:
    """What there is to say about a recipe, one sentence each.

    Attributes:
        problems: what keeps it from being merged.
        notes: what is worth knowing before it is.
        seen: whether the tensors of all models could be looked at without a download.
    """

    problems: list[str]
    notes: list[str]
    seen: bool = True

    @property
    def listed_problems(self) -> str:
        """How many problems there are, and a line for each."""
        count = len(self.problems)
        return "\n- ".join([f"{count} problem{'s' * (count > 1)} found.", *self.problems])

    def __str__(self) -> str:
        found = self.listed_problems if self.problems else "No problem found."
        return "\n".join([found, *(f"Note: {note}" for note in self.notes)])

    def refuse_problems(self) -> Findings:
        """Go on without problems.

        Raises:
            SltaError: all problems, if there are any.
        """
        if self.problems:
            raise SltaError("\n".join(self.problems))
        return self

    def say_notes(self) -> None:
        """Print the notes on standard error."""
        for note in self.notes:
            click.echo(f"Note: {note}", err=True)


def check(recipe: Recipe, out_path: str | os.PathLike[str] | None = None, **options: Any) -> Findings:
    """Find out what is wrong with a recipe, from configurations, file headers and calibration data alone.

    Args:
        recipe: a recipe for ``slta``, ``featcal``, ``actmat`` or ``sftm``.
        out_path: where the merged model is to go, to check that there is room for it.
        options: ``device`` ("cpu"), ``trust_remote_code`` (False), ``lora_merge_cache`` (None), ``transformers_cache``
            (None), ``quiet`` (False), and whatever else mergekit has options for.

    Returns:
        Problems, which keep the recipe from being merged, and notes; printed, they are sentences.

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
    """Look at a recipe, its models' configurations and file headers, and its calibration data; read no weights.

    Args:
        experiment: the recipe; what the checks open of it is there for the run.
        out_path: where the merged model goes, for the space that it needs.
        merging: a merge is meant, rather than a measurement alone.
        running: the recipe is run next, which has its own words for some of what is worth knowing.
    """
    method = experiment.recipe.method
    case = Case(experiment, None if out_path is None else Path(out_path))
    checks = [*MODELS, *CHECKS[method], *(MERGE if merging else ())]
    few = [few_records, of_decoder(coarser_submodules)] if method.runs_models and not running else []
    notes = [*few, *NOTES, *(MERGE_NOTES if merging else ())]
    with contextlib.nullcontext() if running else silenced("mergekit_slta.data.draw"):  # which says what a note says
        problems = _sentences(checks, case)
    seen = all(model.tensors is not None for model in case.models)
    return Findings(problems, _sentences(notes, case), seen)


def _sentences(checks: Sequence[Check], case: Case) -> list[str]:
    """What checks have to say, each sentence once."""
    return list(dict.fromkeys(sentence for check in checks for sentence in check(case)))


def sound_experiment(recipe: Recipe, ranks: Ranks | None = None, **options: Any) -> Experiment:
    """Open a recipe for a measurement, with its models here; no process goes on before all have found it sound.

    Raises:
        SltaError: everything that is wrong with the recipe.
    """
    experiment = Experiment(recipe, ranks=ranks, **options)
    found = experiment.ranks.together(lambda: _sound(experiment))
    open_models(experiment, found)
    return experiment


def _sound(experiment: Experiment) -> Findings:
    if experiment.recipe.method.runs_models:
        return examine(experiment, merging=False).refuse_problems()
    experiment.settings  # noqa: B018  says which methods there is something to measure for
    raise AssertionError


def open_models(experiment: Experiment, found: Findings) -> None:
    """Have the models of an examined recipe here, and examine what only their download shows.

    Raises:
        SltaError: a model cannot be opened, or has a problem.
    """
    experiment.open()
    if not found.seen:
        experiment.ranks.together(lambda: examine(experiment, merging=False).refuse_problems())
