"""What a feature merge is said to take, against what it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from support import families

from mergekit_slta.engine.partial import Partial
from mergekit_slta.featcal.scratch import needs
from mergekit_slta.layers.decoder import Decoder


def test_the_disk_space_is_what_was_said(
    make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family(families.config_of("llama", hidden_size=128, intermediate_size=256))
    tasks = families.wide_tasks(2, samples=3)
    finish_layer = Partial.finish_layer
    sizes: list[int] = []

    def look(self: Partial, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        """While the hidden states before the layer and those after it are there."""
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        finish_layer(self, layer, tensors)

    monkeypatch.setattr(Partial, "finish_layer", look)
    families.feature_merge(family, tmp_path, tasks=tasks, compare=True)
    sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    said = needs(Decoder(family.config), 2, sum(len(ids) for task in tasks for ids in task), True, True).disk
    assert 0.7 * said < max(sizes) < 1.02 * said
