"""``merge_method: slta`` in mergekit: every tensor, against merges written out in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import MakeFamily
from support import families, reference
from support.families import Family
from support.merging import merged_state, worst_error

from mergekit_slta.slta.statistics import Statistics


def solved(path: Path, level: str) -> dict[str, torch.Tensor]:
    return dict(Statistics.load(path).solve(level).alpha)


@pytest.mark.parametrize(
    ("architecture", "dtype", "level"),
    [
        ("llama", torch.float32, "model"),
        ("llama", torch.bfloat16, "attn_mlp"),
        ("gemma2", torch.float32, "attn_mlp"),
        ("falcon_new", torch.float32, "layer"),
    ],
    ids=str,
)
def test_every_tensor_is_the_base_plus_the_weighted_task_vectors(
    architecture: str, dtype: torch.dtype, level: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    changes = {"tie_word_embeddings": False} if architecture == "falcon_new" else {}
    family = make_family(families.config_of(architecture, **changes), dtype=dtype)
    stats = tmp_path / "stats.safetensors"
    out = families.merge(families.recipe(family, level=level, statistics=str(stats)), tmp_path / "out")
    alpha = solved(stats, level)
    expected = reference.merged(family.models(), alpha, level, reference.SPLITS[architecture])
    assert worst_error(merged_state(out), expected) < 1e-6


@pytest.mark.parametrize("settings", [{}, {"balance": "false", "ridge": "0.3"}], ids=str)
def test_the_whole_way_equals_the_naive_one(settings: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    """Also with settings as strings, which YAML makes of quoted values."""
    models, split = llama.models(), reference.SPLITS["llama"]
    deltas = reference.deltas(models, llama.token_ids(), "layer", split)
    out = families.merge(families.recipe(llama, level="layer", **settings), tmp_path / "out")
    values = {name: yaml.safe_load(str(value).lower()) for name, value in settings.items()}
    expected = reference.merged(models, reference.solve(deltas, **values), "layer", split)
    assert worst_error(merged_state(out), expected) < 1e-6
