"""The scores of one model: those of a dense reference, whatever the batches."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support import families
from support.reference import forget
from support.rounding import state_rounding

from mergekit_slta.evaluation import scores as module
from mergekit_slta.evaluation.scores import Sample, score_model


def reference(model: torch.nn.Module, samples: Sequence[Sample]) -> list[tuple[float, tuple[int, ...], bool]]:
    """Loss, likeliest tokens and exact answer, by record without padding; answers are decoded token by token."""
    found: list[tuple[float, tuple[int, ...], bool]] = []
    for row, begin, end, *_ in samples:
        forget(model)
        with torch.no_grad():
            logs = model(torch.tensor([row])).logits[0].log_softmax(-1)
            loss = -sum(float(logs[position - 1, row[position]]) for position in range(begin, end))
            likeliest = tuple(logs[begin - 1 : end].argmax(-1).tolist())
            decoded = list(row[:begin])
            while len(decoded) < end:
                decoded.append(int(model(torch.tensor([decoded])).logits[0, -1].argmax()))
        found.append((loss, likeliest, decoded == list(row[:end])))
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
        found.append(Sample(tuple(ids), len(ids) - 2, len(ids), known=True, whole=True))
    return found


@pytest.mark.parametrize(
    ("architecture", "positions"),
    [
        *(("llama", positions) for positions in (1, 24, 1024)),
        # Where padding matters: a context beyond the original, states that layers share, tokens that see later ones.
        *((name, 1024) for name in ("phi3_longrope", "gemma4", "gemma3")),
    ],
)
def test_scores_are_those_of_the_whole_model(
    architecture: str, positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIT_POSITIONS", positions)
    changes = {"use_bidirectional_attention": True} if architecture == "gemma3" else {}
    model = families.random_model(families.config_of(architecture, **changes))
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path)
    groups = [drawn() if changes else with_answers(model, drawn()), drawn((4, 9)), drawn((7,))]
    found = score_model(families.checkpoints([tmp_path])[0], groups)
    for group, scores in zip(groups, found, strict=True):
        expected = reference(model, group)
        assert [score.likeliest for score in scores] == [likeliest for _, likeliest, _ in expected]
        right = [score.right(sample) for score, sample in zip(scores, group, strict=True)]
        lengths = [sample.end - sample.begin for sample in group]
        assert changes or [number == length for number, length in zip(right, lengths, strict=True)] == [
            exact for *_, exact in expected
        ]
        rounded = [state_rounding() * (sample.end - sample.begin) for sample in group]  # in the sum over an answer
        for score, (loss, *_), most in zip(scores, expected, rounded, strict=True):
            assert score.loss == pytest.approx(loss, abs=most)
    answers = zip(found[0], groups[0], strict=True)
    assert changes or {score.right(sample) == 2 for score, sample in answers} == {True, False}
