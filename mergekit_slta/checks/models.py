"""Checks of the models: each alone, against each other, their vocabularies, and the layers that are run.

They read configurations and file headers, no weights.
"""

from __future__ import annotations

from mergekit_slta.checks.case import Case, attempt, failures
from mergekit_slta.checks.compatibility import (
    brings_tokenizer,
    dropped_tensors,
    missing_tensors,
    moved_tokens_problem,
    other_settings,
    unaligned_embeddings,
    vocabulary_problem,
)
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import output_head
from mergekit_slta.layers.submodules import fallbacks, layer_submodules
from mergekit_slta.models.headers import Model, listed
from mergekit_slta.models.padding import padded_tensors
from mergekit_slta.recipe.problems import slice_problems
from mergekit_slta.recipe.settings import FeatcalSettings, SltaSettings


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


def no_tokenizer(case: Case) -> list[str]:
    """A base model without a tokenizer to copy, for which mergekit prints a traceback after the merge."""
    base, copies = case.base, case.options.copy_tokenizer and not case.aligns_vocabularies
    if not copies or base is None or base.folder is None or any(base.folder.glob("tokenizer*")):
        return []
    return [f"{base} has no tokenizer, so the merged model gets none: mergekit prints a harmless traceback about it."]


# Whether token ids, and with them the rows of embeddings and logits, mean the same in all models


def vocabularies(case: Case) -> list[str]:
    """Vocabularies that differ in size or in the token ids, unless mergekit makes them alike."""
    return [said for base, expert in case.siblings if (said := differing_vocabulary(case, base, expert))]


def differing_vocabulary(case: Case, base: Model, expert: Model) -> str | None:
    """What is wrong with an expert's vocabulary, and what to do about it."""
    moved = moved_tokens_problem(base, expert)
    problem = vocabulary_problem(base, expert) or moved
    if problem is None:
        return None
    if brings_tokenizer(expert):
        return f"{problem}: {NOT_ALIGNED}"
    if moved and case.aligns_vocabularies and case.method.runs_experts:
        method = case.method.method
        return f"{moved}: '{method}' runs every expert on the base model's token ids, choose experts with the same ids."
    if unknown := unaligned_embeddings(base, expert, bool(moved)):
        return (
            f"{problem}: mergekit can align or cut the embeddings, but not {listed(unknown)}, whose rows it does not "
            "know to be tokens. Choose experts with the base model's tokenizer."
        )
    if case.aligns_vocabularies:
        return None
    fix = "add 'tokenizer: {source: base}' to the recipe"
    if not case.options.unsafe_truncate_embeddings:
        return f"{problem}: {fix}, so that mergekit aligns them."
    if expert.vocabulary < base.vocabulary:
        return (
            f"--unsafe-truncate-embeddings cuts the merged embeddings to the {expert.vocabulary} rows of the expert "
            f"{expert}, but the configuration of the base model {base} says {base.vocabulary}, so the merged model "
            f"would not load: {fix} instead."
        )
    return f"{moved}: --unsafe-truncate-embeddings needs the same ids, {fix} instead." if moved else None


def padded_vocabularies(case: Case) -> list[str]:
    """Experts whose embeddings have rows beyond the base model's that stand for no token."""
    if case.aligns_vocabularies:
        return []
    return [
        f"The expert {expert} has {expert.vocabulary} embedding rows, the base model {base} "
        f"{base.vocabulary}: the rows beyond stand for no token of its tokenizer and are left out."
        for base, expert in case.siblings
        if padded_tensors(base, expert)
    ]


NOT_ALIGNED = (
    "mergekit reads only the tokenizer of the adapter's base model, so merge the adapter into that model yourself and "
    "save the result with the adapter's tokenizer."
)


def changes_rows(case: Case) -> bool:
    """Whether mergekit changes the rows of the models' embeddings."""
    base, made = case.base, case.config.tokenizer
    if base is None or case.experiment.recipe.tokenizer_source != "base":
        return True
    if made and (made.tokens or made.pad_to_multiple_of):
        return True
    tokenizer = attempt(case.experiment.samples.tokenizer, base.reference)
    return isinstance(tokenizer, SltaError) or len(tokenizer) != base.vocabulary


def compared_outputs(case: Case, decoder: Decoder) -> list[str]:
    """Experts with another vocabulary size, whose output head or embeddings cannot be merged with the base model's."""
    averaged, solved = case.settings(FeatcalSettings).averages_edges, solves_head(case, decoder)
    fix = "choose another 'anchor'" if averaged else "set 'head: false'"
    return [f"The {other}: {fix}." for other in other_vocabularies(case) if averaged or solved]


def head_rows(case: Case, decoder: Decoder) -> list[str]:
    """A solved output head whose rows mergekit changes."""
    if not (solves_head(case, decoder) and case.aligns_vocabularies and changes_rows(case)):
        return []
    return [
        "mergekit changes the rows of the output head to those of the recipe's 'tokenizer': set 'head: false', or "
        "leave 'tokenizer' and 'tokenizer_source' out."
    ]


def solves_head(case: Case, decoder: Decoder) -> bool:
    return case.settings(FeatcalSettings).head and output_head(decoder) is not None


def compared_logits(case: Case, decoder: Decoder) -> list[str]:
    """Experts with another vocabulary size, whose logits cannot be compared with the base model's."""
    if case.settings(SltaSettings).level != "model":
        return []
    others = other_vocabularies(case)
    return [f"'level: model' compares logits, but the {other}: choose another level." for other in others]


def other_vocabularies(case: Case) -> list[str]:
    """One clause for each expert whose vocabulary size differs from the base model's."""
    return [
        f"expert {expert} has a vocabulary of {expert.vocabulary} tokens and the base model one of {base.vocabulary}"
        for base, expert in case.siblings
        if expert.vocabulary != base.vocabulary and (case.aligns_vocabularies or not padded_tensors(base, expert))
    ]


# The layers that are run


def known_decoder(case: Case) -> list[str]:
    """A base model that is not a decoder-only language model."""
    return failures([case.decoder])


def whole_depth(case: Case, decoder: Decoder) -> list[str]:
    """A slice that leaves layers out."""
    return slice_problems(case.config, len(decoder))


def solvable_layers(case: Case) -> list[str]:
    """Layers that a feature merge cannot solve because they cannot be run one at a time."""
    return failures([case.needs])


def level_submodules(case: Case, decoder: Decoder) -> list[str]:
    """Layers that do not have the submodules of the recipe's level."""
    level = case.settings(SltaSettings).level
    return failures(attempt(layer_submodules, decoder, level, layer) for layer in decoder.one_of_each_kind())


def coarser_submodules(case: Case, decoder: Decoder) -> list[str]:
    """Layers that are measured at a coarser level, because their parts cannot be told apart."""
    settings = case.reading.settings
    found = attempt(fallbacks, decoder, settings.level) if isinstance(settings, SltaSettings) else []
    return [str(fallback) for fallback in found] if isinstance(found, list) else []
