"""The quickstart's family: what its calibration records hold, and that it is trained once."""

from __future__ import annotations

import json
from pathlib import Path

import family
import pytest
import quickstart
from support.calibration_samples import source_of


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family that was trained, as far as its settings say; training it again fails."""
    settings = family._settings(0, family.SHORT, family.CONFIG)
    family.write_bytes(tmp_path / family.SETTINGS, json.dumps(settings).encode())
    monkeypatch.setattr(family, "_train", None)
    return tmp_path


def test_a_family_that_is_there_is_used_again_which_is_said(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = family.train_family(trained, 0, short=True)
    assert found.base == trained / "base"
    assert f"{trained} are of an earlier run and are used again" in capsys.readouterr().out
    with pytest.raises(TypeError):
        family.train_family(trained, 1, short=True, progress=False)


@pytest.mark.parametrize("task", list(family.TASKS))
def test_the_template_gives_the_text_and_its_last_answer(task: str, tmp_path: Path) -> None:
    path, length = tmp_path / "task.jsonl", family.Training.length
    family.write_calibration(path, task, length, 0)
    tokenizer = family.build_tokenizer()
    whole = source_of(str(path), tokenizer, max_tokens=length).draw(30)
    parts = source_of(str(path), tokenizer, max_tokens=length, template=quickstart.ANSWERED).draw(30)
    assert parts.token_ids == whole.token_ids
    for row, answer in zip(parts.token_ids, parts.answers, strict=True):
        assert answer is not None
        line = str(tokenizer.decode(list(row))).removeprefix("<bos>").splitlines()[-1]
        prompt, _, said = line.rpartition("=")
        assert tokenizer.decode(list(row[slice(*answer)])) == said == family.TASKS[task].answer(prompt)
