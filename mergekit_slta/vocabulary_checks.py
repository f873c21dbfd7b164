"""The checks of vocabularies: whether the rows of embeddings, token ids and logits mean the same in all models."""

from __future__ import annotations

from mergekit_slta.case import Case, attempt
from mergekit_slta.compatibility import moved_tokens_problem, size, vocabulary_problem
from mergekit_slta.decoder import Decoder
from mergekit_slta.errors import SltaError
from mergekit_slta.maps import output_head


def vocabularies(case: Case) -> list[str]:
    """Vocabularies that differ in size or in what an id stands for, where the recipe does not have them aligned."""
    if case.aligns_vocabularies:
        return moved_ids(case) if case.runs_experts else []
    if case.options.unsafe_truncate_embeddings:
        return []
    problems = (vocabulary_problem(base, expert) for base, expert in case.siblings)
    fix = "add 'tokenizer: {source: base}' to the recipe, so that mergekit aligns them."
    return [f"{problem}: {fix}" for problem in problems if problem]


def changes_rows(case: Case) -> bool:
    """Whether mergekit gives the models' embeddings other rows than they have."""
    config, base = case.config, case.base
    made = config.tokenizer
    if base is None or (made.source if made else config.tokenizer_source) != "base":
        return True
    if made and (made.tokens or made.pad_to_multiple_of):
        return True
    tokenizer = attempt(case.tokenizer, base.reference)
    return isinstance(tokenizer, SltaError) or len(tokenizer) != size(base, "vocab_size")


def moved_ids(case: Case) -> list[str]:
    """Experts that would misread the base model's token ids, which no alignment of tensors changes."""
    problems = (moved_tokens_problem(base, expert) for base, expert in case.siblings)
    fix = f"'{case.spec.name}' runs every expert on the base model's ids, choose experts that have these."
    return [f"{problem}: {fix}" for problem in problems if problem]


def compared_outputs(case: Case, decoder: Decoder) -> list[str]:
    """Experts with another vocabulary, whose output head or embeddings cannot be compared with the base model's."""
    averaged, solved = case.shared("anchor") == "average", solves_head(case, decoder)
    fix = "choose another 'anchor'" if averaged else "set 'head: false'"
    return [f"The {other}: {fix}." for other in other_vocabularies(case) if averaged or solved]


def head_rows(case: Case, decoder: Decoder) -> list[str]:
    """An output head that is solved and that mergekit gives other rows."""
    if not (solves_head(case, decoder) and case.aligns_vocabularies and changes_rows(case)):
        return []
    return ["mergekit gives the output head the rows of the recipe's 'tokenizer': set 'head: false', or leave it out."]


def solves_head(case: Case, decoder: Decoder) -> bool:
    """Whether the output head is solved."""
    return bool(case.shared("head")) and output_head(decoder) is not None


def compared_logits(case: Case, decoder: Decoder) -> list[str]:
    """Experts with another vocabulary, whose logits cannot be compared with the base model's."""
    if case.shared("level") != "model":
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
