"""The published formulas, as ``published.py`` computes them, minimize what the papers say on random matrices."""

import torch
from published import RIDGE, SHRINK, TEACHER, featcal_map, regmean_map

DRAW = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def gradient(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, weight)[0]


def test_the_published_maps_are_where_their_papers_losses_are_least() -> None:
    given, own, maps, anchor = (
        [random(40, 6), 2 * random(30, 6)],
        [random(40, 6), random(30, 6)],
        random(2, 3, 6),
        random(3, 6),
    )
    weight = regmean_map(given, list(maps)).requires_grad_()
    loss = torch.zeros(())
    for x, expert in zip(given, maps, strict=True):
        error, energy = weight - expert, x.square().sum(0)
        loss = loss + SHRINK * (x @ error.T).square().sum() + (1 - SHRINK) * (energy * error.square()).sum()
    assert gradient(loss, weight).abs().max() < 1e-10
    weight = featcal_map(list(zip(given, own, strict=True)), list(maps), anchor).requires_grad_()
    loss = RIDGE * (weight - anchor).square().sum()
    for x, teacher, expert in zip(given, own, maps, strict=True):
        target = (TEACHER * teacher + (1 - TEACHER) * x) @ expert.T
        loss = loss + (x @ weight.T - target).square().sum() / (x.T @ x).norm()
    assert gradient(loss, weight).abs().max() < 1e-10
