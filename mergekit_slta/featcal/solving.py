"""Solve linear maps from the tokens that reach them: functions of tensors, which run no model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from mergekit_slta.actmat.covariance import covariance, merge_by_covariance
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.featcal.regression import Change, RidgeRegression
from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.maps import LinearMap
from mergekit_slta.numerics.symmetric import with_ridge
from mergekit_slta.recipe.settings import ActmatSettings


class Tokens(NamedTuple):
    """Tokens of one task that reach some maps.

    Attributes:
        inputs: the merged model's [n, in].
        outputs: what the expert's own maps return, without their biases [n, out].
        samples, weights: each token's sample and weight [n].
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    samples: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Setting:
    """How a merge solves its maps.

    Attributes:
        ridge: how strongly the solution is drawn towards W_n of ``merge.py``; None to choose it by left-out samples.
        counts: how much each task counts: 1 for an expert's, kappa for the base model's.
        weights: the weights [S] of the tokens of every sample.
        ranks: the processes that share the batches.
        folder: where the matrices of a mixture's experts are while they are solved.
    """

    ridge: float | None
    counts: Sequence[float]
    weights: Sequence[torch.Tensor]
    ranks: Ranks
    folder: Path


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer by their names in it.

    Attributes:
        base: the base model's.
        experts: those of each task's own model, an expert or the base model.
        anchor: the anchor's.
        later: the weights that the anchor still has to solve as ``actmat`` does, when their group is solved.
    """

    base: Weights
    experts: Sequence[Weights]
    anchor: dict[str, torch.Tensor]
    later: Collection[str] = ()


def solve_maps(
    near: torch.Tensor,
    tasks: Iterable[Iterable[Tokens]],
    setting: Setting,
    *,
    expected: int,
    prior: torch.Tensor | None = None,
    least: float = 0,
) -> Change | int:
    """The change of a matrix [out, in] that the solution stays near, or how many tokens there are if too few.

    Args:
        near: the matrix; maps of one input are stacked.
        tasks: for each task, this process's tokens.
        setting: how maps are solved.
        expected: how many tokens this process has.
        prior: as for ``RidgeRegression``.
        least: how many tokens all processes need.
    """
    outputs, inputs = near.shape
    regression = RidgeRegression(
        inputs, outputs, setting.ridge, near.device, prior=prior, tokens=expected, ranks=setting.ranks
    )
    for task, count in zip(tasks, setting.counts, strict=True):
        for tokens in task:
            residuals = torch.addmm(tokens.outputs, tokens.inputs, near.T, alpha=-1)
            regression.add(tokens.inputs, residuals, tokens.samples, tokens.weights)
        regression.finish_task(count)
    return regression.solve() if regression.tokens >= least else regression.tokens


def changed(
    maps: Sequence[LinearMap], near: torch.Tensor, change: Change, merged: Weights, experts: Sequence[Weights]
) -> dict[str, torch.Tensor]:
    """The maps' new tensors by their names in the layer; for an expert of a mixture, its part of them."""
    found, start = {}, 0
    for linear_map in maps:
        rows = slice(start, start + len(linear_map.matrix(merged)))
        found[linear_map.weight] = linear_map.stored((near[rows] + change.matrix[rows]).to(near.dtype))
        if (offset := linear_map.offset(merged)) is not None:
            own = torch.stack([linear_map.offset(expert) for expert in experts])  # type: ignore[misc]
            found[str(linear_map.bias)] = change.offset(offset, own, rows)
        start = rows.stop
    return found


def prior_of(
    maps: Sequence[LinearMap], models: LayerTensors, counts: Sequence[float]
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """The system of ``actmat`` for maps of one input, and the anchor's tensors that are solved with it.

    Args:
        maps: the maps.
        models: the layer's tensors.
        counts: how much each task counts.

    Returns:
        The system [in, in] with a unit mean diagonal, None if no expert changed the maps; and the tensors of
        ``models.later``, by their names.
    """
    ridge, solved, size = ActmatSettings().ridge, {}, maps[0].matrix(models.base).shape[1]
    total = torch.zeros(size, size, dtype=torch.float64, device=maps[0].matrix(models.base).device)
    for linear_map in maps:
        base = linear_map.matrix(models.base)
        tasks = [linear_map.matrix(expert) - base for expert in models.experts]
        if linear_map.weight in models.later:
            found = merge_by_covariance(tasks, ridge, counts)
            solved[linear_map.weight] = linear_map.stored(base + found.change.to(base.dtype))
            total += found.covariance
        else:
            for task in tasks:
                total += covariance(task)
    if not total.any():
        return None, solved
    system = with_ridge(total, ridge)
    return system.div_(system.diagonal().mean()), solved
