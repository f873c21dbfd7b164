"""Tokenizers and vocabularies that do not fit each other or the models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from conftest import MakeFamily
from safetensors.torch import load_file
from support import families
from support.adapters import write_adapter
from support.examining import add_tokens, chat_model, chat_tokenizer, feature_recipe, look, only, problems, swap_ids
from support.families import Family

from mergekit_slta.featcal.merge import head_to_solve


@pytest.mark.parametrize("source", ["base", "expert", "union"])
@pytest.mark.parametrize("beyond", ["base", "expert"])
def test_a_token_beyond_the_embeddings_in_the_merged_models_tokenizer(
    beyond: str, source: str, family: Family, tmp_path: Path
) -> None:
    """mergekit fails with a KeyError if it is in the expert that gives the tokenizer, and else leaves it out."""
    folder = family.base if beyond == "base" else family.experts[0]
    known = len(transformers.AutoTokenizer.from_pretrained(folder))
    add_tokens(folder, *(f"<{number}>" for number in range(families.VOCABULARY - known + 1)))
    named = str(family.experts[0]) if source == "expert" else source
    recipe = families.recipe(family, "sftm", calibration=False) | {"tokenizer": {"source": named}}
    if source == beyond == "expert":
        assert "has <16> beyond the model's 64 embeddings: write 'chat_template: auto'" in only(recipe)
        return
    assert problems(recipe) == []
    merged = families.merge(recipe, tmp_path / "out")
    made = transformers.AutoTokenizer.from_pretrained(merged)
    assert len(load_file(merged / "model.safetensors")["model.embed_tokens.weight"]) >= len(made.get_vocab())


@pytest.mark.parametrize(("source", "force"), [("union", True), ("union", False), ("base", False)])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"source": {"kind": "zero"}}, ""),
        ({"source": {"kind": "model_token", "model": "EXPERT", "token": "a"}}, ""),
        ({"source": {"kind": "model_token", "model": "EXPERT", "token_id": 7}}, ""),
        ({"source": "EXPERT"}, "Token '<new>' not found in model EXPERT"),
        ({"source": "org/other"}, "Token '<new>' requires a vocabulary weight from model org/other, but that"),
        ({"source": {"kind": "model_token", "model": "EXPERT", "token": "<no>"}}, "Token '<no>' not found in model"),
        ({"source": {"kind": "model_token", "model": "EXPERT", "token_id": 640}}, "Token ID 640 out of range for"),
        ({}, "source=None"),
    ],
)
def test_a_new_token_gets_the_row_that_the_recipe_names_or_is_refused(
    row: dict[str, Any], why: str, source: str, force: bool, family: Family, tmp_path: Path
) -> None:
    """mergekit fails when it writes the embedding, after the models have run."""
    row = json.loads(json.dumps(row | {"force": force}).replace("EXPERT", str(family.experts[0])))
    recipe = families.recipe(family, "sftm", calibration=False)
    recipe["tokenizer"] = {"source": source, "tokens": {"<new>": row}}
    if why:
        expected = f"The token '<new>' of the recipe's 'tokenizer' gets no row ({why}"
        assert only(recipe).startswith(expected.replace("EXPERT", str(family.experts[0])))
        return
    assert problems(recipe) == []
    ids = transformers.AutoTokenizer.from_pretrained(families.merge(recipe, tmp_path / "out")).get_vocab()
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert bool(rows[ids["<new>"]].any()) == ("zero" not in str(row))


@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma3_vision"])
def test_a_union_has_the_added_tokens_of_a_multimodal_models_experts(
    architecture: str, make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mergekit looks for the vocabulary's size at the top of the configuration alone."""
    family = make_family(architecture)
    add_tokens(family.experts[0], "<think>")
    recipe = families.recipe(family, "sftm", calibration=False) | {"tokenizer": {"source": "union"}}
    assert problems(recipe) == []
    made = transformers.AutoTokenizer.from_pretrained(families.merge(recipe, tmp_path / "out"))
    assert "<think>" in made.get_vocab() and "Unable to get vocab size" not in caplog.text


def test_ids_of_a_model_with_two_embeddings_cannot_change(make_family: MakeFamily) -> None:
    family = make_family("gemma4")
    recipe = families.recipe(family, "sftm", calibration=False) | {"tokenizer": {"source": "base"}}
    assert problems(recipe) == []
    swap_ids(family.experts[0])
    assert "mergekit reorders one (not embed_tokens_per_layer): leave 'tokenizer' out" in only(recipe)


@pytest.mark.parametrize(
    ("known", "changes", "said"),
    [
        (False, {}, True),
        (True, {}, True),
        (False, {"tokenizer_source": "union"}, True),
        (False, {"chat_template": "chatml"}, True),  # whose tokens the base model lacks
        (True, {"chat_template": "auto"}, False),
        (False, {"tokenizer": {"source": "expert"}}, False),
    ],
)
def test_an_expert_that_ends_its_turns_where_the_base_model_does_not_stop(
    known: bool, changes: dict[str, Any], said: bool, family: Family
) -> None:
    """The note's two lines are YAML that corrects it."""
    expert = family.experts[0]
    chat_model(expert)
    if known:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(expert / name, family.base / name)
    recipe = families.recipe(family, "sftm", calibration=False)
    recipe |= json.loads(json.dumps(changes).replace('"expert"', json.dumps(str(expert))))
    notes = [note for note in look(recipe).notes if "ends its turns" in note]
    assert len(notes) == said
    for note in notes:
        assert f"ends its turns with <|im_end|>, but the merged model stops at </s>, like {family.base}: add" in note
        line = note.split("'")[1]
        corrected = {key: value for key, value in recipe.items() if key != "tokenizer_source"} | yaml.safe_load(line)
        assert not [note for note in look(corrected).notes if "ends its turns" in note]


def test_the_most_common_template_is_not_advised_where_the_models_end_differently(family: Family) -> None:
    expert = family.experts[0]
    chat_model(expert)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(expert / name, family.base / name)
    (family.base / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn.content }}</s>{% endfor %}")
    (note,) = [
        note for note in look(families.recipe(family, "sftm", calibration=False)).notes if "ends its turns" in note
    ]
    assert f"add 'tokenizer: {{source: {expert}}}' to the recipe." in note


def test_tokens_of_an_expert_that_the_merge_would_lack_are_named(family: Family) -> None:
    expert = family.experts[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(expert)
    tokenizer.add_tokens(["<tool>", "[PAD]"], special_tokens=True)
    tokenizer.pad_token = "[PAD]"
    tokenizer.save_pretrained(expert)
    recipe = families.recipe(family, "sftm", calibration=False)
    (note,) = [note for note in look(recipe).notes if "lacks" in note]
    assert note.startswith(f"The merge has the tokenizer of {family.base}, which lacks <tool> of {expert}:")
    recipe["tokenizer"] = {"source": str(expert)}
    assert not [note for note in look(recipe).notes if "lacks" in note]


def test_an_expert_whose_chats_another_template_writes_is_named(family: Family) -> None:
    rows = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    chat_model(family.base)
    for number, (folder, file) in enumerate(zip(family.experts, family.data, strict=True), 1):
        chat_model(folder)
        file.write_text(rows.replace('"b"', json.dumps("b" * number)))
    template = family.experts[0] / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ '' if messages[0].role == 'system' else 'a' }}")
    recipe = families.recipe(family)
    (note,) = [note for note in look(recipe).notes if "The chat template of" in note]
    assert note.startswith(f"The chat template of {family.base} writes the chats of {family.experts[0]}, also in")
    (family.base / "chat_template.jinja").unlink()
    (note,) = [note for note in look(recipe).notes if "has no chat template" in note]
    assert f"{family.base} has none: add 'tokenizer: {{source: {family.experts[0]}, tokens: " in note
    assert "because" in str(look(families.recipe(family, "actmat", calibration=False)).notes)
    recipe["tokenizer"] = {"source": str(family.experts[0])}
    (note,) = [note for note in look(recipe).notes if "chat template" in note]
    assert note.startswith(f"The chat template of {family.experts[0]} writes the chats of {family.experts[1]}")


def test_rows_of_chat_tokens_that_only_an_expert_has_trained_reach_the_merge(family: Family, tmp_path: Path) -> None:
    """``slta`` has the base model's rows, for which a pretrained model may have had no use; the note says how."""
    ids = [chat_model(family.experts[0]), chat_model(family.base)][0]
    (family.base / "chat_template.jinja").unlink()
    recipe = families.recipe(family, level="layer")
    (note,) = [note for note in look(recipe).notes if "has no chat template" in note]
    recipe |= yaml.safe_load(note.split("'")[1])
    assert problems(recipe) == []
    folders = families.merge(recipe, tmp_path / "out"), family.experts[0]
    assert torch.equal(*(load_file(folder / "model.safetensors")["lm_head.weight"][ids[1]] for folder in folders))


def test_an_expert_that_stops_as_little_as_the_base_model_is_no_fault_of_the_merge(family: Family) -> None:
    for folder in family.folders:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [families.PAD, "</s>", -1]}))
    assert not [
        note for note in look(families.recipe(family, "sftm", calibration=False)).notes if "ends its turns" in note
    ]


@pytest.mark.parametrize("source", ["base", "union"])
def test_a_head_that_mergekit_gives_other_rows_stays_the_mean(
    source: str, family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has a row for each token of the new tokenizer, without those that pad the models' own to a round number."""
    recipe = feature_recipe(family) | {"tokenizer": {"source": source}}
    assert problems(recipe) == []
    merged = load_file(next(families.merge(recipe, tmp_path / "out").glob("*.safetensors")))
    assert merged["lm_head.weight"].shape == merged["model.embed_tokens.weight"].shape
    assert caplog.text.count("because mergekit reorders its rows for the recipe's 'tokenizer'") == 1


def test_a_head_is_solved_if_the_base_models_tokenizer_changes_no_row(make_family: MakeFamily) -> None:
    tokens = len(transformers.AutoTokenizer.from_pretrained(make_family().base))
    recipe = feature_recipe(make_family(families.config_of("llama", vocab_size=tokens)))
    base: dict[str, Any] = {"source": "base"}
    for more in ({"tokenizer_source": "base"}, {"tokenizer": base}, {"tokenizer_source": "union"}):
        assert head_to_solve(families.experiment(recipe | more)) is not None
    for more in (
        {"tokenizer": {"source": "union", "tokens": {"a": {"force": True}}}},
        {"tokenizer": base | {"pad_to_multiple_of": 64}},
    ):
        assert head_to_solve(families.experiment(recipe | more)) is None


@pytest.mark.parametrize("changes", [{"source": "base"}, {"source": "union"}, {"pad_to_multiple_of": 64}], ids=str)
def test_ids_with_gaps_cannot_be_aligned(changes: dict[str, Any], family: Family) -> None:
    """mergekit makes as many rows as there are tokens."""
    for folder in family.folders:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"] |= {"one": 52, "two": 56}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    recipe = families.recipe(family, "sftm", calibration=False)
    assert problems(recipe) == []
    said = only(recipe | {"tokenizer": {"source": "base"} | changes})
    assert "mergekit makes a row for each token, none for the gaps: leave 'tokenizer' and 'tokenizer_source' " in said


def test_an_adapters_new_tokens_need_a_saved_model(family: Family, tmp_path: Path) -> None:
    """mergekit asks the base model for an adapter's tokenizer, and would give these tokens rows of zeros."""
    adapter = write_adapter(family.base, tmp_path / "adapter")
    families.write_tokenizer(adapter)
    chat_tokenizer(adapter)
    recipe = families.recipe(family, "sftm", experts=[0], calibration=False)
    recipe["models"][0]["model"] = f"{family.base}+{adapter}"
    options = {"lora_merge_cache": str(tmp_path / "lora")}
    notes = look(recipe, options=options).notes
    assert sum(f"merge the adapter {adapter} by peft, save it with its tokenizer" in note for note in notes) == 2
    assert f"source: {adapter}" not in str(notes)
    recipe["tokenizer"] = {"source": str(adapter)}
    assert "finds no row for <|im_end|>, <|im_start|> of the recipe's 'tokenizer'" in only(recipe, options=options)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_a_folder_without_a_tokenizer_has_none(architecture: str, make_family: MakeFamily) -> None:
    """transformers would make one up, with the token 0 as its only word."""
    family = make_family(architecture)
    for file in family.experts[0].glob("*token*"):
        file.unlink()
    recipe = families.recipe(family, "actmat", calibration=False) | {"tokenizer": {"source": "base"}}
    assert f"{family.experts[0]} has no usable tokenizer" in str(problems(recipe))


@pytest.mark.parametrize("source", ["base", "union"])
def test_a_misspelt_model_is_one_sentence_without_mergekits_log(
    source: str, family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = families.recipe(family) | {"tokenizer_source": source}
    recipe["models"][0]["model"] += "s"
    assert f"{family.experts[0]}s cannot be used: there is no such folder, did you mean 'expert0'" in only(recipe)
    assert not [record for record in caplog.records if record.name.startswith("mergekit.")]
