"""How far models and submodules are from linear in their weights (arXiv 2504.10902: 2.2, 2.3, A.1.1, A.2 and A.5.9).

Every score is computed from Gram matrices of feature deltas: those of points on the way from the base model to an
expert, or those of merges and their experts.

Shapes: ``g`` experts merged, ``n`` samples, ``K`` settings, ``N`` steps from the base model to an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import NamedTuple, Unpack

import click
import torch

from mergekit_slta.engine.loop import pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Tasks
from mergekit_slta.errors import whole_number
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import on_device
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.nonlinearity.interpolation import Grams, Interpolation
from mergekit_slta.nonlinearity.result import Linearity, Value
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import RecipeOrFile, published_names, require_calibration
from mergekit_slta.slta.weights import submodules

DEFAULT_LEVELS = ("model", "layer", "attn_mlp")
STEPS = 10
PAIR_WEIGHTS = (0.2, 0.4, 0.6, 0.8, 1.0)
TRIPLE_WEIGHTS = (0.3, 0.5, 0.7)


# From Gram matrices to scores


def distances(grams: torch.Tensor) -> torch.Tensor:
    """Distances between the features along the way from the base model to an expert, as in Figure 6.

    From Gram matrices [..., N, N] of the feature deltas at 1/N, 2/N ... 1 of the task vector: [..., N + 1, N + 1],
    D(f_i, f_j) / D(f_N, f_0); NaN where the expert changes nothing.
    """
    steps = grams.shape[-1]
    padded = grams.new_zeros(*grams.shape[:-2], steps + 1, steps + 1)
    padded[..., 1:, 1:] = grams
    power = padded.diagonal(dim1=-2, dim2=-1)
    squares = power[..., :, None] + power[..., None, :] - 2 * padded
    whole = power[..., -1, None, None]
    return torch.where(whole > 0, (squares.clamp_min(0) / whole).sqrt(), torch.nan)


def non_linearity(ratios: torch.Tensor) -> torch.Tensor:
    """The Non-linearity Score [...] of ``distances``: squared deviations, summed over all i and j (Eq. 19)."""
    steps = torch.arange(ratios.shape[-1], dtype=ratios.dtype) / (ratios.shape[-1] - 1)
    return (ratios - (steps[:, None] - steps).abs()).square().sum((-2, -1))


def projection_and_cosine(grams: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How the feature deltas of merges lie to the experts' sums, weighted by ``alpha`` [K, g].

    From Gram matrices [n, g + K, g + K] of the deltas of the experts, then of their merges: the merge's delta projected
    on the sum, relative to the sum (the fraction in Eq. 8), and their cosine similarity (Eq. 7, 15), both [n, K]; NaN
    where either is zero.
    """
    experts = alpha.shape[-1]
    merged = grams.diagonal(dim1=1, dim2=2)[:, experts:]
    along = (grams[:, experts:, :experts] * alpha).sum(-1)
    planned = torch.einsum("kb,nbc,kc->nk", alpha, grams[:, :experts, :experts], alpha)
    defined = (merged > 0) & (planned > 0)
    cosine = along / (merged * planned).sqrt()
    return torch.where(defined, along / planned, torch.nan), torch.where(defined, cosine, torch.nan)


def pair_cosine(grams: torch.Tensor) -> torch.Tensor:
    """Mean cosine similarity of the experts' feature deltas over all pairs of experts (Eq. 17 without its factor 1/2).

    From the Gram matrices [..., g, g] of the deltas: [...], NaN where a delta is zero.
    """
    power = grams.diagonal(dim1=-2, dim2=-1)
    cosine = grams / (power[..., :, None] * power[..., None, :]).sqrt()
    rows, columns = torch.triu_indices(grams.shape[-1], grams.shape[-1], offset=1)
    return cosine[..., rows, columns].mean(-1)


# Studies


class Study(NamedTuple):
    """Settings whose features are compared, on the data of the experts in them."""

    experts: tuple[int, ...]  # one, and the settings are the way to it; or several: each alone, then their merges
    settings: torch.Tensor  # [K, T]


def path_study(expert: int, experts: int) -> Study:
    """The way from the base model to one of ``experts`` experts, in ``N`` = 10 steps (A.2)."""
    steps = torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS
    return Study((expert,), steps[:, None] * torch.eye(experts, dtype=torch.float64)[expert])


def merge_study(group: Sequence[int], experts: int) -> Study:
    """All merges of a pair with five weights each, or of a triple with three (Figure 3)."""
    weights = PAIR_WEIGHTS if len(group) == 2 else TRIPLE_WEIGHTS
    unit = torch.eye(experts, dtype=torch.float64)[list(group)]
    grid = torch.tensor(list(product(weights, repeat=len(group))), dtype=torch.float64)
    return Study(tuple(group), torch.cat([unit, grid @ unit]))


def plan_studies(experts: int, pairs: bool = True, triples: bool = False) -> list[Study]:
    studies = [path_study(expert, experts) for expert in range(experts)]
    for size in [2] * pairs + [3] * triples:
        studies += [merge_study(group, experts) for group in combinations(range(experts), size)]
    return studies


@dataclass(frozen=True)
class Plan:
    """A planned measurement of linearity of base model and experts, ``models``, on the experts' samples, ``tasks``."""

    decoder: Decoder
    models: Sequence[Checkpoint]
    names: Sequence[str]
    tasks: Tasks
    levels: Sequence[str]
    studies: Sequence[Study]
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def passes(self) -> int:
        """How many forward passes of one sample it takes; all layers, or all branches, count as one."""
        runs = ("model" in self.levels) + ("layer" in self.levels) + bool({"attn_mlp", "head_mlp"} & {*self.levels})
        samples = [sum(map(len, self._tasks_of(study))) for study in self.studies]
        return sum(n * (1 + runs * len(study.settings)) for n, study in zip(samples, self.studies, strict=True))

    def __str__(self) -> str:
        calibrating = sum(map(len, self.tasks)) * len(self.models)
        return (
            f"Linearity at {', '.join(self.levels)} takes {self.passes} forward passes of one prompt; calibration on "
            f"the same prompts takes {calibrating}"
        )

    def measure(self, quiet: bool = True) -> Linearity:
        """Measure one study after the other; a progress bar for each shows this process's share, unless ``quiet``."""
        result = Linearity(tuple(self.names), tuple(self.levels), tuple(map(len, self.tasks)), {}, {}, {}, {})
        for number, study in enumerate(self.studies, 1):
            tasks, doing = self._tasks_of(study), f"Measuring linearity, study {number} of {len(self.studies)}"
            interpolation = Interpolation(self.decoder, self.models, tasks, self.ranks, self.levels, study.settings)
            grams = pass_layers(interpolation, doing, quiet=quiet)
            members = tuple(self.names[expert] for expert in study.experts)
            group = "+".join(members)
            result.members[group] = members
            for level in self.levels:
                names = [name for layer in range(len(self.decoder)) for name in submodules(self.decoder, level, layer)]
                _add_scores(result, level, group, study, {name: grams[name] for name in names or ["model"]})
        return result

    def _tasks_of(self, study: Study) -> Tasks:
        return [samples if task in study.experts else [] for task, samples in enumerate(self.tasks)]


def linearity(
    recipe: RecipeOrFile | Experiment,
    levels: str | Sequence[str] | None = None,
    samples: int = 5,
    pairs: bool = True,
    triples: bool = False,
    **options: Unpack[Options],
) -> Linearity:
    """Measure how linear the features are in the merging weights; first it prints the number of forward passes.

    Args:
        recipe: the recipe, its file, or an opened one.
        levels: one or several; by default ``model``, ``layer`` and ``attn_mlp``.
        samples: how many prompts of each expert are used.
        pairs: compare 25 merges of every two experts with the experts.
        triples: compare 27 merges of every three experts with the experts.
        options: see ``Options``.

    Raises:
        SltaError: an expert has no usable calibration data, two models have the same name, a level does not apply to
            the models, or one prompt does not fit into memory.
    """
    samples, experiment = whole_number("samples", samples), opened(recipe, options)
    chosen = [levels] if isinstance(levels, str) else levels or DEFAULT_LEVELS
    require_calibration(experiment.recipe)
    _, *names = published_names(experiment.recipe)
    experiment.require_levels(chosen)
    models, studies = experiment.checkpoints, plan_studies(len(names), pairs, triples)
    tasks = [data.token_ids for data in experiment.load_data(experiment.recipe.experts, samples)]
    decoder = on_device(experiment.decoder, experiment.device)
    plan = Plan(decoder, models, names, tasks, chosen, studies, experiment.ranks)
    if not experiment.quiet:
        click.echo(f"Note: {plan}.", err=True)
    return plan.measure(experiment.quiet)


def _add_scores(result: Linearity, level: str, group: str, study: Study, grams: Grams) -> None:
    """Score one study at one level; scores over several settings average over the samples first."""
    result.skipped.setdefault(level, {})[group] = 0
    for name, gram in grams.items():
        count = len(study.experts)
        if count == 1:
            ratios = distances(gram)
            usable = ~ratios[:, 0, 0].isnan()
            scores = {f"distance_{step / STEPS:.1f}": Value.of(ratios[:, step, -1]) for step in range(STEPS + 1)}
            scores = {"non_linearity": Value.of(non_linearity(ratios)), **scores}
            result.maps.setdefault(level, {}).setdefault(group, {})[name] = ratios.nanmean(0)
        else:
            # Skip samples on which the merge or one of the experts changes nothing.
            usable = (gram.diagonal(dim1=1, dim2=2) > 0).all(-1)
            gram = gram[usable]
            projection, cosine = projection_and_cosine(gram, study.settings[count:, list(study.experts)])
            scores = {
                "projection_distance": Value.of((1 - projection.mean(0)).abs()),
                "cosine_merge": Value.of(cosine.mean(0)),
                "cosine_base": Value.of(pair_cosine(gram[:, :count, :count])),
            }
        result.skipped[level][group] += int((~usable).sum())
        for metric, value in scores.items():
            result.metrics.setdefault(metric, {}).setdefault(level, {}).setdefault(group, {})[name] = value
