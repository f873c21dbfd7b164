"""Checks of tokenizers: whether ids, and with them rows of embeddings, mean the same, and where models stop."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference

from mergekit_slta.errors import SltaError, reading, refuse
from mergekit_slta.models import hub
from mergekit_slta.models.headers import Model, listed, other_vocabularies
from mergekit_slta.recipe.experiment import Experiment

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
MARK = "\ue000"  # a character for private use, which chat templates do not write themselves


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


def aligned_rows(experiment: Experiment) -> None:
    """Refuse a tokenizer of the merged model with a token for which a model has no row, where mergekit fails."""
    if (aligned := experiment.aligned) is None:
        return
    ids = aligned.tokenizer.get_vocab()
    refuse(
        f"The tokenizer of {model} has {listed(lost)} beyond the model's {experiment.model(model).vocabulary} "
        "embeddings: name another tokenizer in the recipe, or save the model with an embedding for each token."
        for model, rows in aligned.permutations.items()
        if (lost := [token for token, index in ids.items() if index not in rows])
    )


def endless(experiment: Experiment) -> Iterator[str]:
    """Experts that end their turns with a token at which the merged model with the base model's ids does not stop."""
    recipe, base = experiment.recipe, experiment.recipe.base

    def ending(reference: ModelReference) -> tuple[str | None, list[int]]:
        tokenizer = experiment.tokenizer(reference)
        settings = hub.folder_with((GENERATION, "config.json"), reference.model, experiment.transformers_cache)
        return end_of_turn(tokenizer) or tokenizer.eos_token, stop_ids(settings)

    for expert in recipe.experts if recipe.tokenizer_owner == base else ():
        try:
            ours, theirs, tokenizer = ending(base), ending(expert.reference), experiment.tokenizer(base)
        except (*hub.HUB_ERRORS, SltaError):  # a model without text has no tokenizer
            continue
        stops, end = tokenizer.convert_ids_to_tokens(ours[1]), theirs[0]
        brought = tokenizer.get_vocab() if recipe.config.chat_template else ()
        if stops and ours != theirs and end not in [*stops, *brought, None]:
            yield (
                f"The expert {expert} ends its turns with {end}, but the merged model stops at "
                f"{' and '.join(map(str, stops))}, as the base model {base}: add these two lines to the recipe.\n"
                f"  tokenizer:\n    source: {expert.reference.lora or expert.reference.model}"
            )


def end_of_turn(tokenizer: Any) -> str | None:
    """The token that a tokenizer's chat template writes after an assistant's turn; None if it shows none."""
    turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # without a template, or of any kind that the template raises
        return None
    after = text.partition(MARK)[2].lstrip()
    return max((token for token in tokenizer.get_added_vocab() if after.startswith(token)), key=len, default=None)


def stop_ids(folder: Path) -> list[int]:
    """The ids of the tokens at which a model stops to generate."""
    generation, config = json_file(folder / GENERATION), json_file(folder / "config.json")
    given = [part.get("eos_token_id") for part in (generation, config, config.get("text_config", {}))]
    eos: Any = next((value for value in given if value is not None), [])
    return eos if isinstance(eos, list) else [eos]


def json_file(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none."""
    with reading(path):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return content
