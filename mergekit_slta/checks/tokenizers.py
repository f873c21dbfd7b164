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
from mergekit_slta.data.sources import end_of_turn, is_dataset, probe
from mergekit_slta.errors import SltaError, reading, refuse
from mergekit_slta.models import hub
from mergekit_slta.models.headers import folder_with
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Task
from mergekit_slta.recipe.settings import FeatcalSettings, SltaSettings, are_adapters
from mergekit_slta.words import enumerated, listed

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
    given = (settings and settings.tokens) or {}
    rows = {model: torch.empty(experiment.model(model).vocabulary, 0) for model in places}
    for token, source in given.items():
        with reading(f"The token {token!r} of the recipe's 'tokenizer'", "gets no row", "name a model that has one"):
            PermutedVocabulary.compute_default_embedding(None, aligned, rows, places, token, ids[token], source)
    refuse(
        f"The tokenizer of {model} has {listed(lost)} beyond the model's {experiment.model(model).vocabulary} "
        "embeddings: write 'chat_template: auto' instead of 'tokenizer', name another tokenizer, such as 'union', or "
        "save the model with an embedding for each token."
        for model, known in places.items()
        if (lost := [token for token, index in ids.items() if index not in known])
    )
    found = {index for own in places.values() for index, row in own.items() if row >= 0}
    if nowhere := sorted(token for token, index in ids.items() if index not in found and token not in given):
        raise SltaError(
            f"mergekit finds no row for {listed(nowhere)} of the recipe's 'tokenizer' (it passes over an adapter's): "
            "name a model that was saved with this tokenizer, its adapter merged, or give rows in 'tokens'."
        )


def _cure(experiment: Experiment, model: ModelReference, chats: bool) -> str:
    """What gives the merge a model's tokens or, if it lacks only the end of its ``chats``, this end."""
    recipe, owner, own = experiment.recipe, model.lora or model.model, experiment.tokenizer(model)
    known, entry = experiment.tokenizer(recipe.tokenizer_owner).get_vocab(), f"tokenizer: {{source: {owner}}}"
    if model.lora and not own.get_vocab().keys() <= known.keys():
        return f"merge the adapter {owner} by peft, save it with its tokenizer, and name that model"
    if chats and not model.lora and (end := end_of_turn(own)) in known:
        ends = set[str | None]()
        for reference in recipe.references:
            with suppress(*hub.HUB_ERRORS, SltaError):  # some folders lack a tokenizer
                ends.add(end_of_turn(experiment.tokenizer(reference)))
        if ends <= {end, None}:
            entry = "chat_template: auto"  # which changes no tensor
        if isinstance(recipe.settings, SltaSettings) and recipe.settings.level != "model":
            # The method takes the base model's rows, which it may never have trained.
            entry = f'tokenizer: {{source: {owner}, tokens: {{"{end}": {{source: {owner}, force: true}}}}}}'
    return f"add '{entry}' to the recipe"


def endless(experiment: Experiment) -> Iterator[str]:
    """Experts with tokens of their own, above all to end their turns, that a merge with another model's ids lacks."""
    recipe, base, keeper = experiment.recipe, experiment.recipe.base, experiment.recipe.tokenizer_owner
    alike = dict[tuple[str | None, str], list[Task]]()  # experts by their end, and where the merge stops

    @cache
    def ending(reference: ModelReference) -> tuple[str | None, list[int]]:
        tokenizer = experiment.tokenizer(reference)
        settings = folder_with((GENERATION, "config.json"), reference.model, experiment.options.transformers_cache)
        return end_of_turn(tokenizer) or tokenizer.eos_token, stop_ids(settings)

    for expert in recipe.experts:
        try:
            ours, theirs, tokenizer = ending(keeper), ending(expert.reference), experiment.tokenizer(keeper)
        except (*hub.HUB_ERRORS, SltaError):  # a model without text has no tokenizer
            continue
        end, known, own = theirs[0], tokenizer.get_vocab(), experiment.tokenizer(expert.reference)
        stops = [*tokenizer.convert_ids_to_tokens(ours[1] or ending(base)[1]), *[ours[0]] * (keeper != base)]
        brought = known if recipe.config.chat_template else ()
        if stops and ours != theirs and end not in [*stops, *brought, None]:
            alike.setdefault((end, " and ".join(map(str, stops))), []).append(expert)
            continue
        added, rows = own.get_added_vocab(), experiment.model(expert.reference).vocabulary or 0
        # No answer needs the padding's token, nor one without a row.
        lost = sorted(token for token in added if token not in known and added[token] < rows and token != own.pad_token)
        if lost and recipe.tokenizer_source is None:
            fix = _cure(experiment, expert.reference, chats=False)
            yield (
                f"The merge has the tokenizer of {base}, which lacks {listed(lost)} of {expert}: if the merge needs "
                f"them, {fix}."
            )
    for (end, stops_at), experts in alike.items():
        fix = "no tokenizer serves both: merge experts that end their turns alike"
        if keeper == base:
            fix = _cure(experiment, experts[0].reference, chats=True)
        who = f"The expert {experts[0]} ends its turns"
        if len(experts) > 1:
            who = f"The experts {enumerated([*map(str, experts)])} end their turns"
        yield f"{who} with {end}, but the merged model stops at {stops_at}, like {keeper}: {fix}."


def other_templates(experiment: Experiment) -> Iterator[str]:
    """Experts with chat templates, where the merge has none or one that writes their prompts otherwise."""
    recipe, keeper, others, alone = experiment.recipe, experiment.recipe.tokenizer_owner, list[str](), list[Task]()
    drawn = {task: data.has_chats for (task, _), data in experiment.drawn.items()}
    for task in recipe.experts:
        # Answers that are still to be written will be chats, if their model has a template.
        is_chat = drawn.get(task, task.calibration and not is_dataset(task.calibration))
        with suppress(*hub.HUB_ERRORS, SltaError):  # some folders lack a tokenizer
            ours, theirs = (probe(experiment.tokenizer(model)) for model in (keeper, task.reference))
            if theirs and not ours:
                alone.append(task)
            elif theirs and is_chat and probe(experiment.samples_tokenizer) not in ("", theirs):
                others.append(str(task))
    auto = recipe.config.chat_template == "auto"  # mergekit asks the models, not their adapters
    if alone and ((auto and are_adapters(*recipe.references)) or not recipe.config.chat_template):
        fix = _cure(experiment, alone[0].reference, chats=True)
        yield f"The merge has no chat template, because {keeper} has none: {fix}."
    if others:
        also, fix = ", also in the merge", ", or write the expert's as the recipe's 'chat_template'"
        if recipe.config.chat_template:
            also = fix = ""
        yield (
            f"The chat template of {keeper} writes the chats of {listed(others)}{also}, not their own, which "
            f"differ{'s' * (len(others) == 1)}: where an expert answers badly in it, give it a 'template'{fix}."
        )


def stop_ids(folder: Path) -> list[int]:
    """The ids of the tokens at which a model stops to generate."""
    generation, config = json_file(folder / GENERATION), json_file(folder / "config.json")
    entries = [part.get("eos_token_id") for part in (generation, config, config.get("text_config") or {})]
    eos: Any = next((value for value in entries if value is not None), [])
    return [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int) and token >= 0]


def json_file(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none."""
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return content
