"""Checks of vocabularies: whether token ids, and with them the rows of embeddings, mean the same in two models."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

from mergekit_slta.errors import SltaError, reading
from mergekit_slta.models.headers import Model, other_vocabularies

TOKENIZER = "tokenizer.json"


def same_vocabulary(base: Model, expert: Model, *, aligned: bool, cut: bool, runs_experts: bool) -> None:
    """Refuse an expert whose vocabulary differs in size or in the token ids, unless mergekit makes them alike.

    Args:
        base: the base model.
        expert: the expert.
        aligned: whether the recipe has mergekit align the vocabularies.
        cut: whether mergekit cuts the embeddings to the smallest model's.
        runs_experts: whether the expert is run on the base model's token ids.
    """
    moved = moved_tokens(base, expert)
    if moved and runs_experts:
        raise SltaError(f"{moved}, on which this method runs it: choose experts with the same ids.")
    cut_to_base = cut and expert.vocabulary >= base.vocabulary
    sizes = [] if cut_to_base else [f"The {clause}" for clause in other_vocabularies([(base, expert)])]
    if (moved or sizes) and not aligned:
        raise SltaError(
            f"{moved or sizes[0]}: add 'tokenizer: {{source: base}}' to the recipe, so that mergekit aligns them."
        )


def moved_tokens(base: Model, expert: Model) -> str | None:
    """How an expert's token ids differ from the base model's, where both tokenizers are on this machine."""
    own, other = (model.folder / TOKENIZER if model.folder else Path() for model in (base, expert))
    if not (own.is_file() and other.is_file()) or filecmp.cmp(own, other, shallow=False):
        return None
    known, theirs = known_tokens(own), known_tokens(other)
    moved = [token for token, index in known.items() if theirs.get(token, index) != index]
    if not moved:
        return None
    return (
        f"The tokenizer of the expert {expert} has other ids than that of the base model {base} for "
        f"{len(moved)} tokens (such as {moved[0]!r})"
    )


def known_tokens(file: Path) -> dict[str, int]:
    """The ids of the tokens in a ``tokenizer.json``, without those added later."""
    with reading(file):
        tokens = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
        return tokens if isinstance(tokens, dict) else {token: index for index, (token, *_) in enumerate(tokens)}
