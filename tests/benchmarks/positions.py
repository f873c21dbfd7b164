"""Would a part of each sample's token positions do for the MLP branches, whose feature deltas need no context?

    python tests/benchmarks/positions.py

Prints one JSON line per seed of the quickstart's family and number of positions, of the 64 that each of 30 samples per
task has: how far the merging weights of the MLP branches move, over their bootstrap error, and the share of a
calibration's multiplications that would be saved. Less than 1 moves them less than drawing other samples does.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import click
import torch
from common import CACHE, be_quiet
from mergekit.common import ModelReference
from quality import family
from transformers import AutoTokenizer

from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.slta.calibrate import calibrate
from mergekit_slta.slta.gram import sample_grams
from mergekit_slta.slta.solver import bootstrap, solve

SAMPLES, LENGTH = 30, 64
DRAWS = 200

Measure = Callable[[Sequence[torch.Tensor], Sequence[int]], torch.Tensor]


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=[0, 1, 2], show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=CACHE / "quality")
def main(seeds: tuple[int, ...], out: Path) -> None:
    """Compare merging weights from all positions with those from some."""
    be_quiet()
    for seed in seeds:
        models = family.train_family(out / f"seed{seed}" / "family", seed, short=False)
        checkpoints = [Checkpoint(ModelReference.parse(str(path))) for path in (models.base, *models.experts.values())]
        decoder = Decoder(checkpoints[0].config)
        tasks = [_samples(file, models.base) for file in models.calibration.values()]
        task = torch.arange(len(tasks)).repeat_interleave(SAMPLES)
        full = _mlp_grams(decoder, checkpoints, tasks, sample_grams)
        error = torch.stack([bootstrap(gram, task, DRAWS).std(0) for gram in full])
        for count in (8, 16, 32):
            some = _mlp_grams(decoder, checkpoints, tasks, _at_some(count))
            pairs = zip(some, full, strict=True)
            moves = torch.stack([solve(part, task).alpha - solve(whole, task).alpha for part, whole in pairs])
            result = {
                "benchmark": "positions",
                "seed": seed,
                "positions": count,
                "move_over_error": round(float(_root_mean_square(moves) / _root_mean_square(error)), 2),
                "saving": round(_mlp_share(decoder) * len(tasks) / (len(tasks) + 1) * (1 - count / LENGTH), 2),
            }
            print(json.dumps(result), flush=True)


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def _samples(file: Path, base: Path) -> list[list[int]]:
    """Rows of joined records, as long as those that the family was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    records = [tokenizer(json.loads(line)["text"])["input_ids"] for line in file.read_text().splitlines()]
    rng = random.Random(0)
    return [[i for record in rng.sample(records, LENGTH // 2) for i in record][:LENGTH] for _ in range(SAMPLES)]


def _mlp_grams(
    decoder: Decoder, models: Sequence[Checkpoint], tasks: Sequence[Sequence[Sequence[int]]], measure: Measure
) -> list[torch.Tensor]:
    with mock.patch("mergekit_slta.slta.features.sample_grams", measure):
        grams = calibrate(decoder, models, tasks, ["attn_mlp"])
    return [gram for name, gram in grams.items() if name.endswith(".mlp")]


def _at_some(count: int) -> Measure:
    """``sample_grams`` at random positions of each sample."""
    seeds = itertools.count()

    def measure(deltas: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
        chosen = [torch.randperm(n, generator=torch.Generator().manual_seed(next(seeds)))[:count] for n in lengths]
        some = [torch.stack([delta[row, index] for row, index in enumerate(chosen)]) for delta in deltas]
        return sample_grams(some, [count] * len(lengths))

    return measure


def _mlp_share(decoder: Decoder) -> float:
    """The share of a layer's multiplications with weights that its MLP does."""
    sizes = {name: tensor.numel() for name, tensor in decoder.layers[0].state_dict().items() if tensor.ndim == 2}
    return sum(size for name, size in sizes.items() if name.startswith("mlp.")) / sum(sizes.values())


if __name__ == "__main__":
    main()
