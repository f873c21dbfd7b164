"""An adapter's own tokenizer and chat template come before those of its base model."""

from __future__ import annotations

import json
from pathlib import Path

from mergekit.common import ModelReference
from support import families
from support.examining import swap_ids
from support.families import Family
from transformers import AutoTokenizer

from mergekit_slta.recipe.recipe import Task
from mergekit_slta.recipe.samples import Samples
from mergekit_slta.recipe.settings import CalibrationSettings

SETTINGS = CalibrationSettings(samples=3, max_tokens=12, seed=1)


def samples_of(base: Path) -> Samples:
    return Samples(ModelReference.parse(str(base)), SETTINGS)


CHAT = "{% for turn in messages %}{{ turn['content'] }}.{% endfor %}"


def test_an_adapters_own_chat_template_is_used(llama: Family, tmp_path: Path) -> None:
    families.write_tokenizer(tmp_path, CHAT)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "abc"}]}))
    expert = Task(ModelReference.parse(f"{llama.base}+{tmp_path}"), str(tmp_path / "chats.jsonl"))
    (row,) = samples_of(llama.base).of(expert).token_ids
    assert row == tuple(AutoTokenizer.from_pretrained(llama.base)("abc.", add_special_tokens=False)["input_ids"])


def test_an_adapters_own_tokenizer_is_used(llama: Family, tmp_path: Path) -> None:
    families.write_tokenizer(tmp_path)
    swap_ids(tmp_path)
    own = samples_of(llama.base).tokenizer(ModelReference.parse(f"{llama.base}+{tmp_path}"))
    base = AutoTokenizer.from_pretrained(llama.base)
    assert own("ab", add_special_tokens=False)["input_ids"] == base("ba", add_special_tokens=False)["input_ids"]
