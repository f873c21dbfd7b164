"""What other forms of actmat's regression keep of the tasks: of the quickstart's families, or of a real model's.

    python tests/benchmarks/actmat_forms.py --seed 0 --seed 1 --seed 2
    python tests/benchmarks/actmat_forms.py --real --seed 0

Prints one JSON line per seed: the average over the tasks of exact matches (for the real model of ``real_model.py`` also
the answers' negative log-likelihood per token) by the way in which every linear map's task matrices τ_t [out, in] are
merged; all other tensors take the experts' mean, as in actmat.

``actmat``
    the regression with C_t = τ_tᵀτ_t / |τ_t|², as the method has it.
``centred rows``
    C_t from the rows of τ_t less their mean, as in ACE-Merging (arXiv 2603.02945).
``unequal experts``
    C_t = τ_tᵀτ_t: an expert with larger changes counts more.
``outputs``
    the same regression on the transposed matrices.
``inputs and outputs``
    the mean of ``actmat`` and ``outputs``.
``TSV-M``
    the leading singular vectors of every expert, made orthogonal to each other (arXiv 2412.00081).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import real_family
import torch
from common import CACHE, be_quiet
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import family
import quickstart

import mergekit_slta.host.registry
from mergekit_slta.actmat import covariance
from mergekit_slta.actmat.covariance import merge_by_covariance

REAL_TASKS = list(real_family.TASKS)[:3]
Form = Callable[[Sequence[torch.Tensor], float], torch.Tensor]


def regression(tasks: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], ridge: float) -> torch.Tensor:
    """The regression of ``actmat/covariance.py``, written densely, with C_t = rowsᵀ rows."""
    covariances = [part.T @ part for part in rows]
    mean, system = torch.stack(list(tasks)).mean(0), torch.stack(covariances).sum(0)
    target = torch.stack([(task - mean) @ own for task, own in zip(tasks, covariances, strict=True)]).sum(0)
    system.diagonal().add_(ridge * system.diagonal().mean() + torch.finfo(system.dtype).tiny)
    return mean + torch.linalg.solve(system, target, left=False)


def centred(tasks: Sequence[torch.Tensor], ridge: float) -> torch.Tensor:
    return regression(tasks, [(task - task.mean(0)) / task.norm() for task in tasks], ridge)


def unequal(tasks: Sequence[torch.Tensor], ridge: float) -> torch.Tensor:
    return regression(tasks, tasks, ridge)


def by_outputs(tasks: Sequence[torch.Tensor], ridge: float) -> torch.Tensor:
    return merge_by_covariance([task.T for task in tasks], ridge).T


def both(tasks: Sequence[torch.Tensor], ridge: float) -> torch.Tensor:
    return (merge_by_covariance(tasks, ridge) + by_outputs(tasks, ridge)) / 2


def singular_vectors(tasks: Sequence[torch.Tensor], ridge: float) -> torch.Tensor:
    kept = min(tasks[0].shape) // len(tasks)
    parts = [torch.linalg.svd(task, full_matrices=False) for task in tasks]
    left = torch.cat([u[:, :kept] for u, _, _ in parts], 1)
    values = torch.cat([s[:kept] for _, s, _ in parts])
    right = torch.cat([vh[:kept] for _, _, vh in parts])
    return _orthogonal(left) * values @ _orthogonal(right)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix that is nearest to a matrix."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


FORMS: dict[str, Form] = {
    "centred rows": centred,
    "unequal experts": unequal,
    "outputs": by_outputs,
    "inputs and outputs": both,
    "TSV-M": singular_vectors,
}


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1, 2], show_default=True)
@click.option("--real", is_flag=True, help="The family of real_model.py instead of the quickstart's.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="The folder of that benchmark's models.")
def main(seeds: tuple[int, ...], real: bool, out: Path | None) -> None:
    """Merge the family of each seed by every form and compare the averages."""
    be_quiet()
    torch.set_num_threads(quickstart.THREADS)
    mergekit_slta.host.registry.register()
    for seed in seeds:
        folder = (out or CACHE / ("real_model" if real else "quality")) / f"seed{seed}"
        models: Any
        if real:
            models = real_family.train_family(folder, seed, REAL_TASKS)
        else:
            models = family.train_family(folder / "family", seed, short=False)
        scores = {"actmat": _score(models)}
        for name, form in FORMS.items():
            with mock.patch.object(covariance, "merge_by_covariance", _in_place_of_actmat(form)):
                scores[name] = _score(models)
        print(json.dumps({"benchmark": "actmat_forms", "real": real, "seed": seed, **scores}), flush=True)


def _in_place_of_actmat(form: Form) -> Callable[..., torch.Tensor]:
    def merged(tasks: Sequence[torch.Tensor], ridge: float, weights: Sequence[float]) -> torch.Tensor:
        exact = [task.double() for task in tasks]
        if all(task.any() for task in exact):
            return form(exact, ridge)
        return torch.stack(exact).mean(0)

    return merged


def _score(models: Any) -> list[float]:
    """Merge by actmat as it stands; the average exact matches, and the likelihood where it is measured."""
    recipe = {
        "merge_method": "actmat",
        "base_model": str(models.base),
        "models": [{"model": str(expert)} for expert in models.experts.values()],
        "dtype": "float32",
    }
    with tempfile.TemporaryDirectory() as target:
        run_merge(MergeConfiguration.model_validate(recipe), target, MergeOptions(quiet=True, write_model_card=False))
        if isinstance(models, family.Family):
            return [round(quickstart.average(family.evaluate(Path(target))), 3)]
        found = real_family.evaluate(Path(target), models.test)
    columns = [(found[task].exact, found[task].loss) for task in models.test]
    return [round(statistics.mean(column), 3) for column in zip(*columns, strict=True)]


if __name__ == "__main__":
    main()
