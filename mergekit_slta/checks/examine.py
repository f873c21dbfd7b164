"""Everything about a recipe that can be known to be wrong before weights are read, all at once."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergekit.config import MergeConfiguration
from mergekit.merge_methods import MergeMethodSpec
from mergekit.options import MergeOptions

from mergekit_slta.checks.adapters import adapters
from mergekit_slta.checks.case import Case, Check, of_decoder, of_models, of_siblings
from mergekit_slta.checks.compatibility import quantization_problem, shape_problem, tied_problem
from mergekit_slta.checks.data import (
    calibration_data,
    calibration_sources,
    few_records,
    same_samples,
    statistics_file,
)
from mergekit_slta.checks.models import (
    anchor_branches,
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
from mergekit_slta.errors import SltaError

LOG = logging.getLogger(__name__)

# In the order in which problems are listed.
CHECKS: tuple[Check, ...] = (
    recipe_text,
    openable_models,
    one_architecture,
    of_siblings(shape_problem),
    of_siblings(tied_problem),
    of_models(quantization_problem),
    adapters,
    known_decoder,
    of_decoder(whole_depth),
    of_decoder(compared_outputs),
    of_decoder(head_rows),
    of_decoder(compared_logits),
    solvable_layers,
    of_decoder(level_submodules),
    of_decoder(anchor_branches),
    calibration_sources,
    same_samples,
    calibration_data,
    statistics_file,
)
MERGE_CHECKS: tuple[Check, ...] = (tensor_types, planned_tensors, vocabularies, folders, disk_space)
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


def examine(
    config: MergeConfiguration,
    options: MergeOptions,
    spec: MergeMethodSpec,
    *,
    source: Any = None,
    out_path: str | os.PathLike[str] | None = None,
    merging: bool = True,
    running: bool = True,
) -> Findings:
    """Look at a recipe, its models' configurations and file headers, and its calibration data; read no weights.

    Args:
        config: the recipe.
        options: mergekit's options.
        spec: the merge method's.
        source: the recipe as YAML gives it, for keys that ``config`` has no place for.
        out_path: where the merged model goes, for the space that it needs.
        merging: a merge is meant, rather than a measurement alone.
        running: the recipe is run next, which has its own words for some of what is worth knowing.
    """
    case = Case(config, options, spec, source, None if out_path is None else Path(out_path))
    checks = [*CHECKS, *(MERGE_CHECKS if merging else ())]
    notes = [*(() if running else (few_records,)), *NOTES, *(MERGE_NOTES if merging else ())]
    seen = all(model.tensors is not None for model in case.models)
    return Findings(_sentences(checks, case), _sentences(notes, case), seen)


def _sentences(checks: Sequence[Check], case: Case) -> list[str]:
    """What checks have to say, each sentence once."""
    return list(dict.fromkeys(sentence for check in checks for sentence in check(case)))


_EXAMINED: ContextVar[tuple[MergeConfiguration, Findings] | None] = ContextVar("examined", default=None)


@contextlib.contextmanager
def examined(config: MergeConfiguration, findings: Findings) -> Iterator[None]:
    """Merge a recipe, the same object, whose findings have been said: they are not said again.

    It is looked at again only if a download now shows what did not show before.
    """
    token = _EXAMINED.set((config, findings))
    try:
        yield
    finally:
        _EXAMINED.reset(token)


def refuse_problems(config: MergeConfiguration, options: MergeOptions, spec: MergeMethodSpec) -> None:
    """Look at a recipe before mergekit plans its merge, and log what is worth knowing, unless it is ``examined``.

    Raises:
        SltaError: everything that is wrong with it.
    """
    known = _EXAMINED.get()
    said = known[1] if known and known[0] is config else None
    if said is not None and said.seen:
        return
    findings = examine(config, options, spec)
    if findings.problems:
        raise SltaError("\n".join(findings.problems))
    for note in findings.notes if said is None and not options.quiet else ():
        LOG.warning(note)
