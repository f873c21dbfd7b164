"""Checks of tokenizers and vocabularies: whether token ids, and with them the rows of embeddings, mean the same.

They read configurations, file headers and ``tokenizer.json``, no weights.
"""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import torch
from mergekit.architecture.auto import infer_vocabulary_axes

from mergekit_slta.checks.case import Case, attempt
from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import output_head
from mergekit_slta.models.headers import Model, listed
from mergekit_slta.models.padding import (
    TOKENIZER,
    both_have,
    logits_problems,
    other_vocabularies,
    padded_tensors,
    tokens_of,
)
from mergekit_slta.recipe.recipe import Expert
from mergekit_slta.recipe.settings import FeatcalSettings, SltaSettings

NOT_ALIGNED = (
    "mergekit reads only the tokenizer of the adapter's base model, so merge the adapter into that model yourself and "
    "save the result with the adapter's tokenizer."
)


def no_tokenizer(case: Case) -> list[str]:
    """A base model without a tokenizer to copy, for which mergekit prints a traceback after the merge."""
    base, copies = case.base, case.options.copy_tokenizer and not case.aligns_vocabularies
    if not copies or base is None or base.folder is None or any(base.folder.glob("tokenizer*")):
        return []
    return [f"{base} has no tokenizer, so the merged model gets none: mergekit prints a harmless traceback about it."]


def unknown_ids(case: Case, expert: Expert, drawn: CalibrationData) -> list[str]:
    """Samples with tokens that the base model, or an expert that runs on them itself, has no embedding for."""
    base, model, highest = case.base, case.opened.get(expert.reference), max(map(max, drawn.token_ids))
    problems = []
    if base is not None and isinstance(case.decoder, Decoder) and highest >= base.vocabulary:
        problems.append(
            f"The tokenizer of {base} gives the token id {highest}, but the model has only {base.vocabulary} "
            "embeddings: put the tokenizer that it was trained with into its folder."
        )
    if case.method.runs_experts and isinstance(model, Model) and highest >= model.vocabulary:
        problems.append(
            f"The tokenizer of the base model gives the token id {highest}, but the expert {model} has only "
            f"{model.vocabulary} embeddings: choose an expert with the base model's vocabulary."
        )
    return problems


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
    if not (averaged or solved):
        return []
    fix = "set 'anchor: base'" if averaged else "set 'head: false'"
    return [f"The {other}: {fix}." for other in other_vocabularies(case.siblings, case.aligns_vocabularies)]


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
    return logits_problems([case.settings(SltaSettings).level], case.siblings, case.aligns_vocabularies)


# Two models


def vocabulary_problem(base: Model, expert: Model) -> str | None:
    """How the sizes of the vocabularies of an expert and the base model differ."""
    if expert.vocabulary == base.vocabulary or padded_tensors(base, expert):
        return None
    return (
        f"The expert {expert} has a vocabulary of {expert.vocabulary} tokens, the base model {base} one of "
        f"{base.vocabulary}"
    )


def moved_tokens_problem(base: Model, expert: Model) -> str | None:
    """How an expert's token ids differ from the base model's."""
    known, theirs = token_ids(base, expert)
    moved = [token for token, index in known.items() if theirs.get(token, index) != index]
    if moved:
        return (
            f"The tokenizer of the expert {expert} has other ids than that of the base model {base} for "
            f"{len(moved)} tokens (such as {moved[0]!r})"
        )
    return None


def unaligned_embeddings(base: Model, expert: Model, moved: bool) -> list[str]:
    """The tensors with rows for tokens whose vocabulary axis mergekit does not know, where the models' rows differ.

    Such as Gemma 4's embeddings for each layer: mergekit knows those that the model declares as input and output.

    Args:
        moved: whether the models' token ids differ, and so the rows of every such tensor.
    """
    if base.built is None:
        return []
    known = infer_vocabulary_axes(base.built)
    embeddings = [f"{name}.weight" for name, own in base.built.named_modules() if isinstance(own, torch.nn.Embedding)]
    unknown = {base.stored_name(name) for name in embeddings if name not in known}
    rows = {base.vocabulary, base.size("vocab_size_per_layer_input")}
    return [
        name
        for name, own, other in both_have(base, expert)
        if name in unknown and own.shape[0] in rows and (moved or own.shape != other.shape)
    ]


def token_ids(base: Model, expert: Model) -> tuple[dict[str, int], dict[str, int]]:
    """The tokens of two models' tokenizers but those added later; none where files are equal or not at hand."""
    own, theirs = tokenizer_file(base), tokenizer_file(expert)
    if own is None or theirs is None or filecmp.cmp(own, theirs, shallow=False):
        return {}, {}
    return known_tokens(own), known_tokens(theirs)


def tokenizer_file(model: Model) -> Path | None:
    """The ``tokenizer.json`` of a model, if it is on this machine."""
    if model.reference.lora and brings_tokenizer(model):
        return Path(model.reference.lora.path) / TOKENIZER
    return model.folder / TOKENIZER if model.folder and (model.folder / TOKENIZER).is_file() else None


def brings_tokenizer(model: Model) -> bool:
    """Whether a model is an adapter whose folder holds a tokenizer."""
    return model.reference.lora is not None and (Path(model.reference.lora.path) / TOKENIZER).is_file()


def known_tokens(file: Path) -> dict[str, int]:
    """The vocabulary in a ``tokenizer.json``; empty if the file is damaged, which loading the tokenizer reports."""
    try:
        return tokens_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
