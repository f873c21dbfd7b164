"""An expert's samples are drawn once, with the base model's tokenizer, and what is held out is none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mergekit.common import ModelReference
from support import families
from support.examining import swap_ids
from support.families import Family
from transformers import AutoTokenizer

from mergekit_slta.data.draw import CalibrationData, CalibrationSource
from mergekit_slta.recipe.recipe import Task
from mergekit_slta.recipe.samples import Samples
from mergekit_slta.recipe.settings import CalibrationSettings

SETTINGS = CalibrationSettings(samples=3, max_tokens=12, seed=1)


def samples_of(base: Path) -> Samples:
    return Samples(ModelReference.parse(str(base)), SETTINGS)


def experts_of(family: Family) -> list[Task]:
    pairs = zip(family.experts, family.data, strict=True)
    return [Task(ModelReference.parse(str(folder)), str(file)) for folder, file in pairs]


def test_samples_are_drawn_once(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[str] = []
    draw = CalibrationSource.draw

    def counted(source: CalibrationSource, samples: int) -> CalibrationData:
        draws.append(source.source)
        return draw(source, samples)

    monkeypatch.setattr(CalibrationSource, "draw", counted)
    samples, (first, second, _) = samples_of(llama.base), experts_of(llama)
    drawn = samples.of(first)
    assert samples.of(first) is drawn
    assert len(drawn.token_ids) == 3 and max(map(len, drawn.token_ids)) <= 12
    assert samples.of(first, 2).token_ids == drawn.token_ids[:2]
    samples.of(second)
    assert draws == [first.calibration, first.calibration, second.calibration]


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
