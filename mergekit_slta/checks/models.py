"""Checks of the models: each alone, against each other, and the layers that are run.

They read configurations and file headers, no weights.
"""

from __future__ import annotations

from mergekit_slta.checks.case import Case, attempt, failures
from mergekit_slta.checks.compatibility import dropped_tensors, missing_tensors, other_settings, unknown_tensors
from mergekit_slta.checks.tokenizers import solves_head
from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.groups import groups_by_layer
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import tail_problem
from mergekit_slta.layers.submodules import fallbacks, layer_submodules
from mergekit_slta.models.headers import listed
from mergekit_slta.recipe.problems import slice_problems
from mergekit_slta.recipe.settings import SltaSettings


def openable_models(case: Case) -> list[str]:
    """Models that do not exist, whose configuration cannot be read, or whose files are missing or damaged."""
    return failures(case.opened.values())


def one_architecture(case: Case) -> list[str]:
    """Experts of another architecture, depth or width than the base model."""
    return [problem for base, expert in case.pairs if (problem := case.architecture_problem(base, expert))]


def planned_tensors(case: Case) -> list[str]:
    """Tensors that mergekit needs and a checkpoint lacks, or that a checkpoint has and mergekit would drop."""
    models = [*filter(None, [case.base]), *(expert for _, expert in case.siblings)]
    return missing_tensors(models) or (dropped_tensors(case.base) if case.base else [])


def lost_tensors(case: Case) -> list[str]:
    """Tensors of the base model that the merged model will not have, because transformers does not know them."""
    lost = unknown_tensors(case.base) if case.base else []
    if not lost:
        return []
    return [
        f"{listed(lost)} of {case.base} will be missing from the merged model, because mergekit writes only tensors "
        "that transformers knows: copy them yourself if a program needs them, such as for multi-token prediction."
    ]


def unseen_tensors(case: Case) -> list[str]:
    """Models whose tensors can be checked only after a download."""
    return [
        f"The weights of {model} are pickled on the Hub: they can be checked only after their download."
        for model in case.models
        if model.tensors is None
    ]


def other_configurations(case: Case) -> list[str]:
    """Experts whose configuration makes them compute something else from the same weights."""
    measured = ", and the expert is measured with it too" if case.method.runs_models else ""
    return [
        f"The configuration of the expert {expert} differs from that of the base model {base} in {', '.join(names)}: "
        f"the merged model gets the base model's configuration{measured}."
        for base, expert in case.siblings
        if (names := other_settings(base, expert))
    ]


# The layers that are run


def known_decoder(case: Case) -> list[str]:
    """A base model that is not a decoder-only language model."""
    return failures([case.decoder])


def whole_depth(case: Case, decoder: Decoder) -> list[str]:
    """A slice that leaves layers out."""
    return slice_problems(case.config, len(decoder))


def solvable_layers(case: Case, decoder: Decoder) -> list[str]:
    """Layers that a feature merge cannot solve because they cannot be run one at a time, and such a head."""
    found = attempt(groups_by_layer, decoder)
    problem = tail_problem(decoder) if solves_head(case, decoder) and not isinstance(found, SltaError) else None
    return [*failures([found]), *filter(None, [problem])]


def level_submodules(case: Case, decoder: Decoder) -> list[str]:
    """Layers that do not have the submodules of the recipe's level."""
    level = case.settings(SltaSettings).level
    return failures(attempt(layer_submodules, decoder, level, layer) for layer in decoder.one_of_each_kind())


def coarser_submodules(case: Case, decoder: Decoder) -> list[str]:
    """Layers that are measured at a coarser level, because their parts cannot be told apart."""
    settings = case.reading.settings
    found = attempt(fallbacks, decoder, settings.level) if isinstance(settings, SltaSettings) else []
    return [str(fallback) for fallback in found] if isinstance(found, list) else []
