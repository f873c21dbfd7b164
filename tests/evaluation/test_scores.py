"""The scores of one model: those of a dense reference, whatever the batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support import families
from support.families import Family

from mergekit_slta.evaluation import scores as module
from mergekit_slta.evaluation.scores import Sample, score_model


def reference(model: torch.nn.Module, samples: Sequence[Sample]) -> list[tuple[float, bool | None]]:
    """Loss and exact answer, record by record without padding; answers are decoded greedily, token by token."""
    found: list[tuple[float, bool | None]] = []
    for row, begin, end, short in samples:
        with torch.no_grad():
            logs = model(torch.tensor([row])).logits[0].log_softmax(-1)
            loss = -sum(float(logs[position - 1, row[position]]) for position in range(begin, end))
            exact = None
            if short:
                decoded = list(row[:begin])
                while len(decoded) < end:
                    decoded.append(int(model(torch.tensor([decoded])).logits[0, -1].argmax()))
                exact = decoded == list(row[:end])
        found.append((loss, exact))
    return found


def drawn(lengths: Sequence[int] = (30, 3, 12, 12, 6)) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, families.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [Sample(tuple(row), 1, len(row)) for row in rows]


def with_answers(model: torch.nn.Module, samples: Sequence[Sample]) -> list[Sample]:
    """The records with an answer of two tokens, which every other one gets from the model itself."""
    found = []
    for number, (row, *_) in enumerate(samples):
        ids = list(row)
        for position in range(len(ids) - 2, len(ids)):
            if number % 2:
                with torch.no_grad():
                    ids[position] = int(model(torch.tensor([ids[:position]])).logits[0, -1].argmax())
        found.append(Sample(tuple(ids), len(ids) - 2, len(ids), short=True))
    return found


@pytest.mark.parametrize("positions", [1, 24, 1024])
def test_streamed_scores_are_those_of_the_whole_model(
    llama: Family, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIT_POSITIONS", positions)
    dense = llama.model(1)
    groups = [with_answers(dense, drawn()), drawn((4, 9)), drawn((7,))]
    checkpoint = families.checkpoints(llama.folders)[1]
    found = score_model(checkpoint, groups)
    for group, scores in zip(groups, found, strict=True):
        expected = reference(dense, group)
        assert [score.exact for score in scores] == [exact for _, exact in expected]
        assert [score.loss for score in scores] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert {score.exact for score in found[0]} == {True, False}


@pytest.mark.parametrize("architecture", ["phi3_longrope", "gemma4", "gemma3"])
def test_scores_equal_the_reference_where_padding_matters(architecture: str, tmp_path: Path) -> None:
    """Beyond the original context, with states that layers share, and where tokens see later ones."""
    changes = {"use_bidirectional_attention": True} if architecture == "gemma3" else {}
    model = families.random_model(families.config_of(architecture, **changes))
    model.config.architectures = [type(model).__name__]
    samples = drawn()
    expected = [reference(copy.deepcopy(model), [sample])[0][0] for sample in samples]
    model.save_pretrained(tmp_path)
    (found,) = score_model(families.checkpoints([tmp_path])[0], [samples])
    assert [score.loss for score in found] == pytest.approx(expected, rel=1e-5)
