"""The base model plus weighted task vectors, tensor by tensor, against whole state dicts."""

from __future__ import annotations

import torch

from mergekit_slta.layers.blend import blend
from mergekit_slta.models.checkpoint import ExpertStack, stack_of


def test_numbers_that_are_no_weights_stay_the_base_models() -> None:
    """Such as buffers that count."""
    base, expert = {"count": torch.tensor([1, 2])}, {"count": torch.tensor([5, 5])}
    assert torch.equal(blend(base, [expert], torch.ones(1, dtype=torch.float64))["count"], base["count"])


def test_a_mixtures_experts_are_blended_one_by_one() -> None:
    """To the same values as all at once."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(4, 6, 5, generator=generator) for _ in range(3)]
    stacks = [stack_of(tensor, torch.device("cpu")) for tensor in whole]
    alpha = torch.tensor([0.3, 0.9], dtype=torch.float64)
    found, expected = (
        blend({"w": base}, [{"w": expert} for expert in experts], alpha)["w"] for base, *experts in (stacks, whole)
    )
    assert isinstance(found, ExpertStack)
    assert torch.equal(found, expected)
