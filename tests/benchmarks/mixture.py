"""What it costs to read a mixture's experts whenever they are used, rather than to keep a layer's in memory.

    python tests/benchmarks/mixture.py --batch-tokens 1024 --batch-tokens 128

Prints one JSON line for each method and size of batches: the median processor time of a whole calibration or feature
merge (``again_s``), that of one whose experts are in memory while their layer is (``kept_s``), and the median ratio of
the two, of runs that take turns. The checkpoints are bfloat16 with the experts one by one, as Mixtral's are.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from common import CACHE, be_quiet, make_recipe
from gpu import write_models
from mergekit.io.tasks import LoaderCache
from transformers import MixtralConfig

from mergekit_slta.engine import reader
from mergekit_slta.featcal.scratch import solve_model
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import FeatcalSettings, SltaSettings
from mergekit_slta.slta.measure import measured_statistics

LEVELS = ("layer", "linear")
METHODS = (*LEVELS, "featcal")


@click.command()
@click.option("--hidden", default=512, show_default=True)
@click.option("--inner", default=1024, show_default=True, help="Of each routed expert.")
@click.option("--routed", default=16, show_default=True, help="Routed experts, of which each token goes to two.")
@click.option("--layers", default=1, show_default=True)
@click.option("--samples", default=8, show_default=True, help="Of each of three tasks.")
@click.option("--tokens", default=128, show_default=True, help="Of each sample.")
@click.option("--batch-tokens", "sizes", multiple=True, default=[1024, 128], show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS, show_default=True)
def main(
    hidden: int,
    inner: int,
    routed: int,
    layers: int,
    samples: int,
    tokens: int,
    sizes: Sequence[int],
    repeats: int,
    methods: Sequence[str],
) -> None:
    """Compare experts that are read again with experts in memory."""
    be_quiet()
    CACHE.mkdir(parents=True, exist_ok=True)
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=routed,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2048,
    )
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        models = write_models(Path(folder), config, layers, "cpu")
        _seconds(make_recipe(models, "slta", 1, 8), 0)  # the first run also imports and tries products
        for method in methods:
            for size in sizes:
                own = {"level": method} if method in LEVELS else {}
                recipe = make_recipe(models, "slta" if own else method, samples, tokens, batch_tokens=size, **own)
                times = [(_seconds(recipe, 0), _seconds(recipe, 2**62)) for _ in range(repeats)]
                again, kept = map(statistics.median, zip(*times, strict=True))
                result = {
                    "benchmark": "mixture",
                    "method": method,
                    "batch_tokens": size,
                    "batches": 3 * -(-samples // max(1, size // tokens)),
                    "again_s": round(again, 3),
                    "kept_s": round(kept, 3),
                    "ratio": round(statistics.median(own / other for own, other in times), 3),
                    "ratios": [round(own / other, 3) for own, other in times],
                    "threads": torch.get_num_threads(),
                }
                print(json.dumps(result), flush=True)


def _seconds(recipe: Recipe, room: int) -> float:
    """The processor time of a calibration or feature merge with so many bytes of room for a layer of all models."""
    LoaderCache.loaders.clear()
    gc.collect()
    setattr(reader, "takes_little", lambda device, elements, share: elements * 4 <= room)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(recipe, quiet=True)
        start = time.process_time()
        if recipe.config.merge_method == "featcal":
            settings = recipe.settings_of(FeatcalSettings).model_copy(update={"scratch": folder})
            solve_model(experiment, settings).release()
        else:
            level = recipe.settings_of(SltaSettings).level
            measured_statistics(experiment, [level], Path(folder) / "statistics.safetensors")
        return time.process_time() - start


if __name__ == "__main__":
    main()
