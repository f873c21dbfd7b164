"""The analysis of a merge by its statistics, against dense features and against solving anew."""

from __future__ import annotations

import math

import pytest
import torch
from support import reference, synthetic

from mergekit_slta.reports.analysis import intervals, kept_by_layer
from mergekit_slta.slta.solver import pooled
from mergekit_slta.slta.statistics import Statistics


def random_deltas(experts: int, samples: int, seed: int) -> reference.Deltas:
    generator = torch.Generator().manual_seed(seed)
    found = reference.Deltas()
    for task in range(experts):
        for sample in range(samples):
            size = 5 * (sample + 2)
            common = torch.randn(size, generator=generator, dtype=torch.float64)
            found.samples.append(torch.randn(experts, size, generator=generator).double() + (seed % 3) * common)
            found.task.append(task)
    return found


@pytest.fixture(scope="module")
def measured() -> tuple[Statistics, dict[str, reference.Deltas]]:
    """Statistics of three experts, and the features that they come from."""
    names = synthetic.submodules(["attn_mlp"], 3)
    deltas = {name: random_deltas(3, 4, seed) for seed, name in enumerate(names)}
    return synthetic.statistics(grams={name: found.grams() for name, found in deltas.items()}), deltas


def dense_kept(deltas: list[reference.Deltas], alpha: list[torch.Tensor], task: int) -> float:
    """1 - sum J(alpha) / sum J(0) of one task over submodules, every sample balanced."""
    lost = before = 0.0
    for found, weights in zip(deltas, alpha, strict=True):
        for delta, own in zip(found.samples, found.task, strict=True):
            if own == task:
                power = delta.square().sum(1).mean()
                lost += float((weights @ delta - delta[task]).square().sum() / power)
                before += float(delta[task].square().sum() / power)
    return 1 - lost / before


def test_what_is_kept_is_the_share_of_the_squared_feature_change(
    measured: tuple[Statistics, dict[str, reference.Deltas]],
) -> None:
    statistics, deltas = measured
    solution = statistics.solve("attn_mlp")
    alpha = {name: reference.merging_weights(own) for name, own in deltas.items()}
    by_layer = kept_by_layer(solution)
    assert list(by_layer) == [0, 1, 2]
    for task in range(3):
        expected = dense_kept(list(deltas.values()), list(alpha.values()), task)
        assert solution.kept[task].item() == pytest.approx(expected, abs=1e-9)
        for layer, of_layer in by_layer.items():
            names = [f"layer.{layer}.attn", f"layer.{layer}.mlp"]
            expected = dense_kept([deltas[name] for name in names], [alpha[name] for name in names], task)
            assert of_layer[task].item() == pytest.approx(expected, abs=1e-9)


def test_a_submodule_that_an_expert_hardly_changes_counts_for_little() -> None:
    retained = torch.tensor([[0.9], [-1e3], [math.nan]]).double()
    share = torch.tensor([[2.0], [1e-6], [0.0]]).double()
    assert pooled(retained, share).item() == pytest.approx(0.9, abs=1e-3)
    assert pooled(retained[2:], share[2:]).isnan()


def test_intervals_hold_the_weights_and_narrow_with_more_samples() -> None:
    few, many = (synthetic.statistics(samples=samples).solve("attn_mlp") for samples in (5, 60))
    alpha, (low, high) = torch.stack(list(few.alpha.values())), intervals(few)
    assert ((low <= alpha) & (alpha <= high)).double().mean() > 0.9
    assert intervals(many).diff(dim=0).mean() < 0.6 * (high - low).mean()
