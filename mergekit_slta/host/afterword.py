"""The words after a merge: what is kept of each model, and the next command to run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from mergekit_slta.checks.tokenizers import endless
from mergekit_slta.host.method import Merge
from mergekit_slta.output.card import RECIPE
from mergekit_slta.recipe.experiment import Experiment


def afterword(experiment: Experiment, merge: Merge, out: str) -> Iterator[str]:
    """What is kept of each model, if the method knows it, the report's page, and the command that says more."""
    if merge.kept:
        yield merge.kept
    if merge.page:
        yield f"Report: {merge.page}"
    yield from (f"Note: {note}" for note in endless(experiment))
    if (recipe := _recipe_file(out)) is not None:
        has_data = experiment.recipe.method.runs_models and all(task.calibration for task in experiment.recipe.tasks)
        command = ["mergekit-slta", "evaluate" if has_data else "verify", recipe, out, *_options(experiment)]
        yield f"Next: {shlex.join(command)}"


def _recipe_file(out: str) -> str | None:
    """The recipe that this process's command was given, or else mergekit's copy in the output folder, if any."""
    context = click.get_current_context(silent=True)
    given = context.params if context is not None and context.command.name in ("mergekit-yaml", "merge") else {}
    if recipe := given.get("config_file") or given.get("recipe"):  # the command "merge" may be another program's
        return str(recipe)
    copy = Path(out) / RECIPE
    return str(copy) if copy.is_file() else None


def _options(experiment: Experiment) -> Iterator[str]:
    """The merge's options that another command needs to find and run the same models."""
    options = experiment.options
    given = {"--transformers-cache": options.transformers_cache}
    if any(reference.lora for reference in experiment.recipe.references):
        given["--lora-merge-cache"] = options.lora_merge_cache
    if options.device != "cpu":
        given["--device"] = options.device
    for name, value in given.items():
        if value:
            yield from (name, value)
    if options.trust_remote_code:
        yield "--trust-remote-code"
