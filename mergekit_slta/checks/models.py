"""The checks of models: one by one, beside each other, their vocabularies, and the layers that are run.

They go by configurations and by the headers of files.
"""

from __future__ import annotations

from mergekit_slta.checks.case import Case, attempt, failures
from mergekit_slta.checks.compatibility import (
    brings_tokenizer,
    dropped_tensors,
    missing_tensors,
    moved_tokens_problem,
    other_settings,
    size,
    vocabulary_problem,
)
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import output_head
from mergekit_slta.layers.submodules import fallbacks, layer_submodules
from mergekit_slta.recipe.problems import slice_problems
from mergekit_slta.recipe.settings import FeatcalSettings, SltaSettings


def openable_models(case: Case) -> list[str]:
    """Models that are not there, whose configuration cannot be read, or whose files are missing or damaged."""
    return failures(case.opened.values())


def one_architecture(case: Case) -> list[str]:
    """Experts of another architecture, depth or width than the base model."""
    return [problem for base, expert in case.pairs if (problem := case.architecture_problem(base, expert))]


def planned_tensors(case: Case) -> list[str]:
    """Tensors that mergekit will ask for and a checkpoint lacks, or that it will not ask for."""
    models = [*filter(None, [case.base]), *(expert for _, expert in case.siblings)]
    missing = missing_tensors(models, case.options.trust_remote_code)
    return missing or (dropped_tensors(case.base, case.options.trust_remote_code) if case.base else [])


def unseen_tensors(case: Case) -> list[str]:
    """Models whose tensors are only seen after a download."""
    return [
        f"The weights of {model} are pickled on the Hub: whether they fit shows after their download."
        for model in case.models
        if model.tensors is None
    ]


def other_configurations(case: Case) -> list[str]:
    """Experts whose configuration makes them compute something else from the same weights."""
    measured = ", and the expert is measured with that too" if case.method.runs_models else ""
    return [
        f"The configuration of the expert {expert} differs from that of the base model {base} in {', '.join(names)}: "
        f"the merged model gets the base model's{measured}."
        for base, expert in case.siblings
        if (names := other_settings(base, expert))
    ]


def no_tokenizer(case: Case) -> list[str]:
    """A base model without a tokenizer to copy, over which mergekit prints a traceback after the merge."""
    base, copies = case.base, case.options.copy_tokenizer and not case.aligns_vocabularies
    if not copies or base is None or base.folder is None or any(base.folder.glob("tokenizer*")):
        return []
    return [
        f"{base} has no tokenizer, so the merged model gets none: mergekit says so with a traceback, which is harmless."
    ]


# Whether the rows of embeddings, token ids and logits mean the same in all models


def vocabularies(case: Case) -> list[str]:
    """Vocabularies that differ in size or in what an id stands for, where the recipe does not have them aligned."""
    if case.aligns_vocabularies:
        return moved_ids(case)
    if case.options.unsafe_truncate_embeddings:
        return []
    fix = "add 'tokenizer: {source: base}' to the recipe, so that mergekit aligns them."
    return [
        f"{problem}: {NOT_ALIGNED if brings_tokenizer(expert) else fix}"
        for base, expert in case.siblings
        if (problem := vocabulary_problem(base, expert))
    ]


NOT_ALIGNED = (
    "mergekit reads only the tokenizer of the adapter's base model, so merge the adapter into that model yourself and "
    "save the result with the adapter's tokenizer."
)


def changes_rows(case: Case) -> bool:
    """Whether mergekit gives the models' embeddings other rows than they have."""
    config, base = case.config, case.base
    made = config.tokenizer
    if base is None or (made.source if made else config.tokenizer_source) != "base":
        return True
    if made and (made.tokens or made.pad_to_multiple_of):
        return True
    tokenizer = attempt(case.experiment.samples.tokenizer, base.reference)
    return isinstance(tokenizer, SltaError) or len(tokenizer) != size(base, "vocab_size")


def moved_ids(case: Case) -> list[str]:
    """Experts that would misread the base model's token ids, or whose tensors mergekit cannot align."""
    fix = f"'{case.method.method}' runs every expert on the base model's ids, choose experts that have these."
    return [
        f"{problem}: {fix if case.method.runs_experts else NOT_ALIGNED}"
        for base, expert in case.siblings
        if (case.method.runs_experts or brings_tokenizer(expert)) and (problem := moved_tokens_problem(base, expert))
    ]


def compared_outputs(case: Case, decoder: Decoder) -> list[str]:
    """Experts with another vocabulary, whose output head or embeddings cannot be compared with the base model's."""
    averaged, solved = case.settings(FeatcalSettings).averages_edges, solves_head(case, decoder)
    fix = "choose another 'anchor'" if averaged else "set 'head: false'"
    return [f"The {other}: {fix}." for other in other_vocabularies(case) if averaged or solved]


def head_rows(case: Case, decoder: Decoder) -> list[str]:
    """An output head that is solved and that mergekit gives other rows."""
    if not (solves_head(case, decoder) and case.aligns_vocabularies and changes_rows(case)):
        return []
    return ["mergekit gives the output head the rows of the recipe's 'tokenizer': set 'head: false', or leave it out."]


def solves_head(case: Case, decoder: Decoder) -> bool:
    """Whether the output head is solved."""
    return case.settings(FeatcalSettings).head and output_head(decoder) is not None


def compared_logits(case: Case, decoder: Decoder) -> list[str]:
    """Experts with another vocabulary, whose logits cannot be compared with the base model's."""
    if case.settings(SltaSettings).level != "model":
        return []
    others = other_vocabularies(case)
    return [f"'level: model' compares logits, but the {other}: choose another level." for other in others]


def other_vocabularies(case: Case) -> list[str]:
    """Experts with a vocabulary of another size than the base model's, in words."""
    sizes = [(expert, size(expert, "vocab_size"), size(base, "vocab_size")) for base, expert in case.siblings]
    return [
        f"expert {expert} has a vocabulary of {others} tokens and the base model one of {own}"
        for expert, others, own in sizes
        if others != own
    ]


# The layers that are run: whether the recipe takes all, and how they split


def known_decoder(case: Case) -> list[str]:
    """Models that are no decoder."""
    return failures([case.decoder])


def whole_depth(case: Case, decoder: Decoder) -> list[str]:
    """Slices that are not all of the layers."""
    return slice_problems(case.config, len(decoder))


def solvable_layers(case: Case) -> list[str]:
    """Layers that cannot be run one at a time, where a feature merge is to solve them."""
    return failures([case.needs])


def level_submodules(case: Case, decoder: Decoder) -> list[str]:
    """Layers without the submodules of the level that is to be measured."""
    level = case.settings(SltaSettings).level
    return failures(attempt(layer_submodules, decoder, level, layer) for layer in decoder.one_of_each_kind())


def coarser_submodules(case: Case, decoder: Decoder) -> list[str]:
    """Layers that are measured at a coarser level, because their parts cannot be told apart."""
    settings = case.reading.settings
    found = attempt(fallbacks, decoder, settings.level) if isinstance(settings, SltaSettings) else []
    return found if isinstance(found, list) else []
