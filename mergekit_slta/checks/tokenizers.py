"""Checks of tokenizers and vocabularies: whether token ids, and with them the rows of embeddings, mean the same.

They read configurations, file headers and ``tokenizer.json``, no weights.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from mergekit.architecture.auto import infer_vocabulary_axes
from mergekit.common import ModelReference

from mergekit_slta.errors import SltaError
from mergekit_slta.models.headers import Model, both_have, listed
from mergekit_slta.recipe.experiment import Experiment

TOKENIZER = "tokenizer.json"
NOT_ALIGNED = (
    "mergekit reads only the tokenizer of the adapter's base model, so merge the adapter into that model yourself and "
    "save the result with the adapter's tokenizer."
)


def vocabularies(experiment: Experiment, reference: ModelReference) -> None:
    """Refuse an expert whose vocabulary differs in size or in the token ids, unless mergekit makes them alike."""
    base, expert = experiment.model(experiment.recipe.base), experiment.model(reference)
    aligned, options = experiment.recipe.tokenizer_source is not None, experiment.options
    moved = moved_tokens(base, expert)
    difference = other_size(base, expert) or moved
    if difference is None:
        return
    if brings_tokenizer(expert):
        raise SltaError(f"{difference}: {NOT_ALIGNED}")
    if moved and aligned and experiment.recipe.method.runs_experts:
        method = experiment.recipe.method.method
        raise SltaError(
            f"{moved}: '{method}' runs every expert on the base model's token ids, choose experts with the same ids."
        )
    if unknown := unaligned_embeddings(base, expert, bool(moved)):
        raise SltaError(
            f"{difference}: mergekit can align or cut the embeddings, but not {listed(unknown)}, whose rows it does "
            "not know to be tokens. Choose experts with the base model's tokenizer."
        )
    if aligned:
        return
    fix = "add 'tokenizer: {source: base}' to the recipe"
    if not options.unsafe_truncate_embeddings:
        raise SltaError(f"{difference}: {fix}, so that mergekit aligns them.")
    if expert.vocabulary < base.vocabulary:
        raise SltaError(
            f"--unsafe-truncate-embeddings cuts the merged embeddings to the {expert.vocabulary} rows of the expert "
            f"{expert}, but the configuration of the base model {base} says {base.vocabulary}, so the merged model "
            f"would not load: {fix} instead."
        )
    if moved:
        raise SltaError(f"{moved}: --unsafe-truncate-embeddings needs the same ids, {fix} instead.")


# Notes


def no_tokenizer(experiment: Experiment) -> Iterator[str]:
    """A base model without a tokenizer to copy, for which mergekit prints a traceback after the merge."""
    base = experiment.model(experiment.recipe.base)
    copies = experiment.options.copy_tokenizer and experiment.recipe.tokenizer_source is None
    if copies and base.folder is not None and not any(base.folder.glob("tokenizer*")):
        yield f"{base} has no tokenizer, so the merged model gets none: mergekit prints a harmless traceback about it."


# Two models


def other_size(base: Model, expert: Model) -> str | None:
    """How the sizes of the vocabularies of an expert and the base model differ."""
    if expert.vocabulary == base.vocabulary:
        return None
    return (
        f"The expert {expert} has a vocabulary of {expert.vocabulary} tokens, the base model {base} one of "
        f"{base.vocabulary}"
    )


def moved_tokens(base: Model, expert: Model) -> str | None:
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
        tokens = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
        return tokens if isinstance(tokens, dict) else {token: index for index, (token, *_) in enumerate(tokens)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
