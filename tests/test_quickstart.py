"""The quickstart's family: what its calibration records hold, that it is trained once, and how the models score."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import family
import pytest
from support.calibration_samples import source_of
from transformers import AutoTokenizer


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family that was trained, as far as its settings say; training it again fails."""
    settings = family._settings(0, family.Training(), family.CONFIG)
    family.write_bytes(tmp_path / family.SETTINGS, json.dumps(settings).encode())
    monkeypatch.setattr(family, "_train", None)
    return tmp_path


def test_a_family_that_is_there_is_used_again_which_is_said(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = family.train_family(trained, 0)
    assert found.base == trained / "base"
    assert f"{trained} are of an earlier run and are used again" in capsys.readouterr().out
    with pytest.raises(TypeError):
        family.train_family(trained, 1, progress=False)


@pytest.mark.parametrize("task", list(family.TASKS))
def test_a_shipped_record_is_a_prompt_and_its_answer(task: str, tmp_path: Path) -> None:
    shipped = family.family_in(family.SHIPPED)
    family.write_calibration(tmp_path / "again.jsonl", task, 0)
    assert filecmp.cmp(shipped.calibration[task], tmp_path / "again.jsonl", shallow=False)
    tokenizer = AutoTokenizer.from_pretrained(shipped.base)
    drawn = source_of(str(shipped.calibration[task]), tokenizer, max_tokens=64).draw(family.CALIBRATION_RECORDS)
    assert len(set(drawn.token_ids)) == family.CALIBRATION_RECORDS
    for row, answer in zip(drawn.token_ids, drawn.answers, strict=True):
        prompt, _, said = str(tokenizer.decode(list(row))).removeprefix("<bos>").removesuffix("\n").rpartition("=")
        assert answer and tokenizer.decode(list(row[slice(*answer)])) == said == family.TASKS[task].answer(prompt)


def test_the_shipped_models_score_as_in_the_findings() -> None:
    """Training rounds differently on every processor, scoring hardly: one prompt is 0.005."""
    shipped = family.family_in(family.SHIPPED)
    for folder, scores in {shipped.base: [0.19, 0.24, 0.35], shipped.experts["words"]: [0.17, 0.14, 0.98]}.items():
        assert list(family.evaluate(folder).values()) == pytest.approx(scores, abs=0.011)
