"""Embeddings with more rows than the tokenizer has tokens, which training libraries add for the hardware's sake."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub

from mergekit_slta.errors import SltaError, refuse
from mergekit_slta.models import hub
from mergekit_slta.models.headers import Model, TensorHeader

TOKENIZER = "tokenizer.json"


def both_have(base: Model, expert: Model) -> Iterator[tuple[str, TensorHeader, TensorHeader]]:
    """The base model's tensors that an expert has too: name, the base model's and the expert's."""
    for name, stored in (base.tensors or {}).items():
        other = expert.tensor(name)
        if other is not None:
            yield name, stored, other


def is_vocabulary(base: Model, expert: Model, shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a tensor's rows are tokens, in both models, and all else about it is equal."""
    sizes = (base.vocabulary, expert.vocabulary)
    return (*shape[:1], *other[:1]) == sizes and shape[1:] == other[1:]


def padded_tensors(base: Model, expert: Model) -> Mapping[str, int]:
    """The expert's tensors, by its own names, that have rows for no token, with how many rows the base model's have.

    There are some if the expert has more rows than the base model, and its tokenizer no token for any of these.
    """
    unequal = {
        expert.stored_name(name) or name: own.shape[0]
        for name, own, other in both_have(base, expert)
        if own.shape != other.shape and is_vocabulary(base, expert, own.shape, other.shape)
    }
    if not unequal or expert.vocabulary < base.vocabulary:
        return {}
    highest = highest_token(expert)
    return unequal if highest is not None and highest < base.vocabulary else {}


def other_vocabularies(pairs: Iterable[tuple[Model, Model]], aligned: bool) -> list[str]:
    """One clause for each expert whose vocabulary size differs from its base model's.

    Args:
        pairs: the base model with each expert.
        aligned: whether the recipe has mergekit align the vocabularies, so that rows for no token are not left out.
    """
    return [
        f"expert {expert} has a vocabulary of {expert.vocabulary} tokens and the base model one of {base.vocabulary}"
        for base, expert in pairs
        if expert.vocabulary != base.vocabulary and (aligned or not padded_tensors(base, expert))
    ]


def require_equal_logits(pairs: Iterable[tuple[Model, Model]], aligned: bool) -> None:
    """Refuse to compare the logits of models whose vocabularies differ in size; the arguments are the same.

    Raises:
        SltaError: the experts with another vocabulary size.
    """
    others = other_vocabularies(pairs, aligned)
    refuse(f"'level: model' compares logits, but the {other}: choose another level." for other in others)


def highest_token(model: Model) -> int | None:
    """The highest id that a model's tokenizer gives; None where its file is not at hand or damaged."""
    path = model.reference.model
    try:
        if model.folder is None:
            with hub.asking(path):
                file = Path(huggingface_hub.hf_hub_download(path.path, TOKENIZER, revision=path.revision))
        else:
            file = model.folder / TOKENIZER
        content = json.loads(file.read_text(encoding="utf-8"))
        added = [token["id"] for token in content.get("added_tokens") or ()]
        return int(max([*tokens_of(content).values(), *added]))
    except (SltaError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def tokens_of(content: Any) -> dict[str, int]:
    """The tokens of a ``tokenizer.json`` but those added later."""
    tokens = content["model"]["vocab"]
    return tokens if isinstance(tokens, dict) else {token: index for index, (token, *_) in enumerate(tokens)}
