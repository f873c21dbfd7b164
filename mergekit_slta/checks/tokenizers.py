"""Checks of tokenizers: whether ids, and with them rows of embeddings, mean the same, and where models stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.tokenizer.embed import PermutedVocabulary

from mergekit_slta.checks.folder import beside_weights, refuse_links
from mergekit_slta.data.sources import end_of_turn, probe
from mergekit_slta.errors import SltaError, reading, refuse
from mergekit_slta.models import hub
from mergekit_slta.models.headers import folder_with
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.words import listed

GENERATION = "generation_config.json"


def same_vocabulary(experiment: Experiment, expert: ModelReference) -> None:
    """Refuse an expert whose vocabulary differs in size or in the token ids, unless mergekit makes them alike."""
    base, model = experiment.model(experiment.recipe.base), experiment.model(expert)
    others, sizes = experiment.other_tokens(expert), model.vocabulary != base.vocabulary
    if sizes and isinstance(experiment.recipe.settings, FeatcalSettings):
        raise SltaError(
            f"The {others[0]}: if the expert can do without its added tokens, save it with {base.vocabulary} "
            f"embeddings ('resize_token_embeddings') and the base model's tokenizer; else use 'merge_method: slta' "
            f"with 'tokenizer: {{source: {expert}}}', which keeps their embeddings."
        )
    if others and experiment.recipe.settings.runs_experts:
        raise SltaError(f"The {others[0]}, but this method gives both the same ids: choose experts with the same ids.")
    if experiment.options.unsafe_truncate_embeddings and model.vocabulary > base.vocabulary:
        others = others[1:]  # mergekit cuts the other rows off
    if others and experiment.recipe.tokenizer_source is None:
        fix = "add 'tokenizer: {source: base}' to the recipe, so that mergekit aligns them"
        raise SltaError(f"The {others[-1]}: {fix}.")


def aligned_rows(experiment: Experiment) -> None:
    """Refuse a tokenizer of the merged model with a token for which a model has no row, where mergekit fails."""
    if (aligned := experiment.aligned) is None:
        return
    if (owner := Path(experiment.recipe.tokenizer_owner.model.path)).is_dir():
        refuse_links(owner, beside_weights(owner))
    ids, base = aligned.tokenizer.get_vocab(), experiment.model(experiment.recipe.base)
    if max(ids.values()) >= len(ids):
        raise SltaError(
            f"The recipe's tokenizer has {len(ids)} tokens with ids up to {max(ids.values())}, and mergekit makes a "
            "row for each token, none for the gaps: leave 'tokenizer' and 'tokenizer_source' out."
        )
    has_second = getattr(base.text_config, "vocab_size_per_layer_input", None)
    if has_second and any(not own.items() <= ids.items() for own in aligned.original_vocabs.values()):
        raise SltaError(
            f"The recipe's 'tokenizer' changes token ids, but of the two embeddings of {base} mergekit reorders one "
            "(not embed_tokens_per_layer): leave 'tokenizer' out, or merge experts with the base model's ids."
        )
    settings, places = experiment.recipe.config.tokenizer, aligned.permutations
    rows = {model: torch.empty(experiment.model(model).vocabulary, 0) for model in places}
    for token, source in ((settings and settings.tokens) or {}).items():
        with reading(f"The token {token!r} of the recipe's 'tokenizer'", "gets no row", "name a model that has one"):
            PermutedVocabulary.compute_default_embedding(None, aligned, rows, places, token, ids[token], source)
    refuse(
        f"The tokenizer of {model} has {listed(lost)} beyond the model's {experiment.model(model).vocabulary} "
        "embeddings: name another tokenizer, such as 'union', or save the model with an embedding for each token."
        for model, known in places.items()
        if (lost := [token for token, index in ids.items() if index not in known])
    )


def endless(experiment: Experiment) -> Iterator[str]:
    """Experts with tokens of their own, above all to end their turns, that a merge with the base's ids lacks."""
    recipe, base = experiment.recipe, experiment.recipe.base

    @cache
    def ending(reference: ModelReference) -> tuple[str | None, list[int]]:
        tokenizer = experiment.tokenizer(reference)
        settings = folder_with((GENERATION, "config.json"), reference.model, experiment.options.transformers_cache)
        return end_of_turn(tokenizer) or tokenizer.eos_token, stop_ids(settings)

    for expert in recipe.experts if recipe.tokenizer_owner == base else ():
        try:
            ours, theirs, tokenizer = ending(base), ending(expert.reference), experiment.tokenizer(base)
            owner = expert.reference.lora or expert.reference.model
        except (*hub.HUB_ERRORS, SltaError):  # a model without text has no tokenizer
            continue
        stops, end = tokenizer.convert_ids_to_tokens(ours[1]), theirs[0]
        brought = tokenizer.get_vocab() if recipe.config.chat_template else ()
        if stops and ours != theirs and end not in [*stops, *brought, None]:
            yield (
                f"The expert {expert} ends its turns with {end}, but the merged model stops at "
                f"{' and '.join(map(str, stops))}, like the base model {base}: add 'tokenizer: {{source: "
                f"{owner}}}' to the recipe."
            )
            continue
        own, rows = experiment.tokenizer(expert.reference), experiment.model(expert.reference).vocabulary or 0
        known, added = tokenizer.get_vocab(), own.get_added_vocab()
        # No answer needs the padding's token, nor one without a row.
        lost = sorted(token for token in added if token not in known and added[token] < rows and token != own.pad_token)
        if lost and recipe.tokenizer_source is None:
            yield (
                f"The merge has the tokenizer of {base}, which lacks {listed(lost)} of {expert}: if the merge needs "
                f"them, add 'tokenizer: {{source: {owner}}}' to the recipe."
            )


def other_templates(experiment: Experiment) -> Iterator[str]:
    """Experts whose own chat templates would write their conversations otherwise, where the recipe chooses none."""
    recipe, others, alone = experiment.recipe, list[str](), list[str]()
    chats = [task for (task, _), drawn in experiment.drawn.items() if drawn.has_chats]
    for task in chats if recipe.tokenizer_source is None else ():
        with suppress(*hub.HUB_ERRORS, SltaError):  # some folders lack a tokenizer
            ours, theirs = (probe(experiment.tokenizer(model)) for model in (recipe.base, task.reference))
            if theirs not in ("", ours):
                (others if ours else alone).append(str(task if ours else task.reference.lora or task.reference.model))
    if alone and not recipe.config.chat_template:
        yield (
            f"The merge has no chat template, because {recipe.base} has none: add to the recipe 'tokenizer: {{source: "
            f"{alone[0]}}}', or a 'chat_template' whose control tokens the tokenizer of the base model has."
        )
    if others:
        yield (
            f"The chat template of {recipe.base} writes the chats of {listed(others)}, not their own, which "
            f"differ{'s' * (len(others) == 1)}: for another one in the merge, add 'tokenizer: {{source: EXPERT}}' to "
            "the recipe."
        )


def stop_ids(folder: Path) -> list[int]:
    """The ids of the tokens at which a model stops to generate."""
    generation, config = json_file(folder / GENERATION), json_file(folder / "config.json")
    entries = [part.get("eos_token_id") for part in (generation, config, config.get("text_config") or {})]
    eos: Any = next((value for value in entries if value is not None), [])
    return eos if isinstance(eos, list) else [eos]


def json_file(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none."""
    with reading(path):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return content
