"""Experts whose embeddings have rows that stand for no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mergekit.io.tasks import LoaderCache
from safetensors.torch import load_file, save_file
from support import families
from support.examining import add_token, edit_config, look, problems
from support.families import Family

from mergekit_slta.models.headers import open_model
from mergekit_slta.models.padding import highest_token, padded_tensors

MORE = 8
VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


def pad(folder: Path, value: float = 7.0) -> None:
    """Give a model rows for tokens that its tokenizer does not have."""
    tensors = load_file(folder / "model.safetensors")
    for name in VOCABULARY_TENSORS:
        rows = torch.full((MORE, tensors[name].shape[1]), value)
        tensors[name] = torch.cat([tensors[name], rows])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, vocab_size=families.VOCABULARY + MORE)


def opened(folder: Path) -> Any:
    return open_model(families.checkpoints([folder])[0].reference)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("slta", {"level": "model"}),
        ("slta", {"edges": "mean"}),
        ("featcal", {}),
        ("actmat", {}),
    ],
    ids=str,
)
def test_the_merge_is_that_of_the_expert_without_them(
    method: str, settings: dict[str, Any], family: Family, tmp_path: Path
) -> None:
    recipe = families.recipe(family, method, calibration=method != "actmat", **settings)
    expected = load_file(next(families.merge(recipe, tmp_path / "plain").glob("*.safetensors")))
    LoaderCache.loaders.clear()
    pad(family.experts[0])
    found = load_file(next(families.merge(recipe, tmp_path / "padded").glob("*.safetensors")))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_one_line_says_so(family: Family) -> None:
    pad(family.experts[1])
    findings = look(families.recipe(family))
    assert findings.problems == []
    (note,) = findings.notes
    assert note == (
        f"The expert {family.experts[1]} has 72 embedding rows, the base model {family.base} 64: the rows beyond stand "
        "for no token of its tokenizer and are left out."
    )


def test_rows_that_stand_for_a_token_are_no_padding(family: Family) -> None:
    pad(family.experts[0])
    add_token(family.experts[0], families.VOCABULARY + 1)
    assert highest_token(opened(family.experts[0])) == families.VOCABULARY + 1
    (problem,) = problems(families.recipe(family))
    assert "has a vocabulary of 72 tokens" in problem


def test_only_rows_of_the_vocabulary_are_padding(family: Family) -> None:
    pad(family.experts[0])
    models = opened(family.base), opened(family.experts[0])
    assert padded_tensors(*models) == dict.fromkeys(VOCABULARY_TENSORS, families.VOCABULARY)
    assert padded_tensors(*reversed(models)) == {}


@pytest.mark.parametrize("damage", ["", "[]", '{"model": {"vocab": 3}}', "{", "[" * 100_000], ids=lambda text: text[:9])
def test_a_damaged_tokenizer_tells_nothing(damage: str, family: Family) -> None:
    (family.experts[0] / "tokenizer.json").write_text(damage)
    assert highest_token(opened(family.experts[0])) is None


def test_cutting_the_base_models_rows_is_refused(family: Family) -> None:
    pad(family.base)
    (problem,) = problems(families.recipe(family, experts=[0]), options={"unsafe_truncate_embeddings": True})
    assert "cuts the merged embeddings to the 64 rows" in problem
    assert "would not load" in problem
