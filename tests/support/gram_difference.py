"""How far Gram matrices of feature deltas are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def gram_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |dG_bc| / sqrt(G_bb G_cc) of Gram matrices [N, T, T]; where that is 0 / 0, zero."""
    power = expected.diagonal(dim1=1, dim2=2).sqrt()
    scale = power[:, :, None] * power[:, None, :]
    return float(((found - expected).abs() / scale.clamp_min(torch.finfo(scale.dtype).tiny)).max())


def largest_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest ``gram_difference`` of the same submodules' Gram matrices."""
    assert found.keys() == expected.keys()
    return max(gram_difference(found[name], gram) for name, gram in expected.items())
