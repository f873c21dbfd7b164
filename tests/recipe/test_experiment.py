"""A recipe's models and data are opened as it says, and what is wrong outside the layers is found."""

import json
from pathlib import Path
from typing import Any

import pytest
from mergekit.common import ModelReference
from support import families
from support.examining import MARKERS, add_tokens, chat_model, swap_ids, with_data
from support.families import Family
from transformers import AutoTokenizer

from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Task


def experiment_of(base: Path) -> Experiment:
    return Experiment(families.recipe_of(str(base), {"expert": "x.jsonl"}, samples=3))


CHAT = "{% for turn in messages %}{{ turn['content'] }}.{% endfor %}"


def test_an_adapters_own_chat_template_and_tokenizer_are_used(llama: Family, tmp_path: Path) -> None:
    families.write_tokenizer(tmp_path, CHAT)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "abc"}]}))
    expert = Task(ModelReference.parse(f"{llama.base}+{tmp_path}"), str(tmp_path / "chats.jsonl"), samples=1)
    base = AutoTokenizer.from_pretrained(llama.base)
    (row,) = experiment_of(llama.base).draw(expert).token_ids
    assert row == tuple(base("abc.", add_special_tokens=False)["input_ids"])
    swap_ids(tmp_path)
    tokenizer = experiment_of(llama.base).tokenizer(expert.reference)
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == base("ba", add_special_tokens=False)["input_ids"]


def rename(folder: Path) -> None:
    """Put another token in the place of one."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"d":', '"D":'))


def name_reserved(folder: Path) -> None:
    """The base model reserves the ids of the expert's markers for other added tokens."""
    add_tokens(folder.parent / "base", "<|reserved_0|>", "<|reserved_1|>", special=True)


@pytest.mark.parametrize(
    ("changes", "moved", "whole"),
    [
        (lambda expert: {}, None, False),
        (lambda expert: {"tokenizer": {"source": "base"}}, None, False),
        (lambda expert: {"tokenizer": {"source": expert}}, None, True),
        (lambda expert: {"tokenizer_source": expert}, None, True),
        (lambda expert: {"tokenizer_source": "union"}, None, True),
        # Rows of the tokenizer are those of other tokens in the base model.
        (lambda expert: {"tokenizer": {"source": expert}}, swap_ids, False),
        (lambda expert: {"tokenizer": {"source": expert}}, rename, False),
        (lambda expert: {"tokenizer": {"source": expert}}, name_reserved, True),
    ],
)
@pytest.mark.parametrize("method", ["slta", "featcal"])
def test_samples_have_the_tokens_of_the_merged_models_tokenizer(
    method: str, changes: Any, moved: Any, whole: bool, family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The markers of the expert's chats are tokens of its own, or in pieces, which is said once."""
    if moved:
        moved(family.experts[0])
    ids = chat_model(family.experts[0])
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    recipe = with_data(family, tmp_path / "chats.jsonl", samples=3) | {"merge_method": method}
    experiment = families.experiment(recipe | changes(str(family.experts[0])))
    rows = experiment.load_data(experiment.recipe.tasks)[0].token_ids
    letters = AutoTokenizer.from_pretrained(family.experts[0])
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    assert (rows == (tuple(letters(text, add_special_tokens=False)["input_ids"]),) * 3) == whole
    assert {*ids}.isdisjoint(rows[0]) != whole
    said = [message for message in caplog.messages if "into pieces" in message]
    assert len(said) == (not whole) and all(marker in message for marker in MARKERS for message in said)
