"""The base model plus weighted task vectors, tensor by tensor, against whole state dicts."""

from __future__ import annotations

import torch
from support import families
from support.families import Family

from mergekit_slta.layers.blend import Blend, blend
from mergekit_slta.models.checkpoint import ExpertStack, stack_of
from mergekit_slta.models.layout import meta_model

State = dict[str, torch.Tensor]


def states(family: Family) -> list[State]:
    return [model.state_dict() for model in family.models()]


def test_weights_are_asked_for_by_the_models_name_of_a_tensor(llama: Family) -> None:
    """Not by what the tensor is called in the answer, which differs from layer to layer."""
    names = {"own": "model.layers.1.mlp.up_proj.weight", "other": "model.layers.2.mlp.up_proj.weight"}
    weights = {full: torch.randn(3, dtype=torch.float64) for full in names.values()}
    found = Blend(families.checkpoints(llama.folders), weights.__getitem__).read(names, meta_model(llama.config))
    base, *experts = states(llama)
    for key, full in names.items():
        expected = base[full] + sum(w * (own[full] - base[full]) for w, own in zip(weights[full], experts, strict=True))
        assert (found[key] - expected).norm() < 1e-6 * expected.norm()


def test_numbers_that_are_no_weights_stay_the_base_models() -> None:
    """Such as buffers that count."""
    base, expert = {"count": torch.tensor([1, 2])}, {"count": torch.tensor([5, 5])}
    anchor = Blend([], lambda name: torch.ones(1, dtype=torch.float64))
    assert torch.equal(anchor.of({"count": "count"}, [base, expert])["count"], base["count"])


def test_a_mixtures_experts_are_blended_one_by_one() -> None:
    """To the same values, whether their weights are the same or not."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(4, 6, 5, generator=generator) for _ in range(3)]
    stacks = [stack_of(tensor, torch.device("cpu")) for tensor in whole]
    for weights in (torch.tensor([0.3, 0.9]), torch.randn(2, 4, 1, 1, generator=generator)):
        alpha = {"w": weights.double()}.__getitem__
        found, expected = (
            blend({"w": base}, [{"w": own} for own in experts], alpha)["w"] for base, *experts in (stacks, whole)
        )
        assert isinstance(found, ExpertStack)
        assert torch.equal(found, expected)
