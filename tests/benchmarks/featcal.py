"""featcal against its floor, and its memory by the number of layers.

    python tests/benchmarks/featcal.py --size 60m --experts 3

Prints one JSON line. ``time_ratio`` is the wall time of a whole feature merge (reading, streams, solving, writing the
scratch folder) over the sum of what it cannot do without, timed in the same run: two plain forward passes per sample
(``forward_s``), the bare products X^T X and X^T Y in float32 (``products_s``), and one Cholesky factorization and solve
in float64 per group of maps (``solves_s``). ``memory_mb`` is the peak anonymous memory.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence

import click
import torch
from common import Setting, load, print_peak_memory, timed, wait_for, with_setting
from mergekit.io.tasks import LoaderCache
from torch.nn import Module

from mergekit_slta.engine.streams import Batch, fitting_batch, make_batches
from mergekit_slta.featcal.groups import groups_by_layer
from mergekit_slta.featcal.scratch import solve_model
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import FeatcalSettings


@click.command()
@with_setting(samples=30)
@click.option("--memory", is_flag=True, help="Measure only the peak memory, in this process.")
def main(setting: Setting, memory: bool) -> None:
    """Compare a feature merge with its floor on synthetic Llama-shaped checkpoints."""
    folders, recipe = setting.write("featcal")
    device = setting.device
    if memory:
        print_peak_memory(lambda: _solve(recipe, device))
        return
    models = [load(folder, device) for folder in folders]
    experiment = Experiment(recipe)
    token_ids = [data.token_ids for data in experiment.load_data(recipe.experts)]
    batches = make_batches(token_ids, fitting_batch(experiment.decoder.to(device)))
    decoder = Decoder(experiment.base.config)
    parts = {
        "forward": functools.partial(_forward, models, batches, device),
        "products": functools.partial(bare_products, decoder, [len(b.rows) * max(b.lengths) for b in batches], device),
        "solves": functools.partial(bare_solves, decoder, device),
    }
    times = timed({**parts, "featcal": functools.partial(_solve, recipe, device)}, setting.repeats)
    models.clear()  # the process below needs the memory
    peak_bytes = setting.peak_memory(__file__, "--memory")
    result = {
        "benchmark": "featcal",
        **setting.described(),
        **{f"{name}_s": round(seconds, 3) for name, seconds in times.items()},
        "time_ratio": round(times["featcal"] / sum(times[name] for name in parts), 3),
        "memory_mb": round(peak_bytes / 2**20, 1),
    }
    print(json.dumps(result))


def _solve(recipe: Recipe, device: str) -> None:
    LoaderCache.loaders.clear()
    with tempfile.TemporaryDirectory() as folder:
        settings = recipe.settings_of(FeatcalSettings).model_copy(update={"scratch": folder})
        solve_model(Experiment(recipe, device=device, quiet=True), settings)


@torch.no_grad()
def _forward(models: list[Module], batches: list[Batch], device: str) -> None:
    """Every sample through the base model and through its own expert."""
    for batch in batches:
        for model in (models[0], models[1 + batch.task]):
            model(batch.token_ids.to(device), use_cache=False)
    wait_for(device)


def bare_products(decoder: Decoder, sizes: Sequence[int], device: str) -> None:
    for inputs, outputs, share in _groups(decoder):
        features, targets = (torch.ones(max(sizes), width, device=device) for width in (inputs, outputs))
        for size in (math.ceil(share * size) for size in sizes):
            features[:size].T @ features[:size]
            features[:size].T @ targets[:size]
    wait_for(device)


def bare_solves(decoder: Decoder, device: str) -> None:
    for inputs, outputs, _ in _groups(decoder):
        factor = torch.linalg.cholesky(torch.eye(inputs, dtype=torch.float64, device=device))
        torch.cholesky_solve(torch.ones(inputs, outputs, dtype=torch.float64, device=device), factor)
    wait_for(device)


def _groups(decoder: Decoder) -> Iterator[tuple[int, int, float]]:
    """The input and output dimensions of every group of maps, and of the output head, and its share of the tokens.

    A mixture's routed experts have a system for each of their maps, and all of them are taken to be chosen alike.
    """
    for layer, maps in zip(decoder.layers, groups_by_layer(decoder), strict=True):
        state = layer.state_dict()
        for group in maps.groups:
            shapes = [linear_map.matrix(state).shape for linear_map in group.maps]
            if group.fused:
                share = decoder.model.config.num_experts_per_tok / len(state[group.maps[0].weight])
                yield from ((inputs, outputs, share) for outputs, inputs in shapes)
            else:
                yield shapes[0][1], sum(outputs for outputs, _ in shapes), 1.0
    head = decoder.model.get_output_embeddings().weight
    yield head.shape[1], head.shape[0], 1.0


if __name__ == "__main__":
    main()
