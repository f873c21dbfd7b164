"""Merging one decoder layer by actmat against mergekit's task_arithmetic and against its bare solves.

    python tests/benchmarks/actmat.py --size 7b --experts 3 [--rank 16]

Prints one JSON line: seconds of ``run_merge`` for one layer by both methods, seconds of the solves of the layer's
matrices alone, all in turns in one run, the first over 1.5 times the second plus the third, all of it extrapolated to
the model's depth, and the peak of anonymous memory that each method and the largest matrix's solve take. ``--rank``
makes the experts LoRA adapters that were merged in float32.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from functools import partial
from pathlib import Path

import click
import torch
from common import CACHE, SHAPES, be_quiet, in_subprocess, make_family, timed
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.memory import PeakMemory

import mergekit_slta.host.patches
from mergekit_slta.actmat.covariance import merge_by_covariance
from mergekit_slta.recipe.settings import ActmatSettings

METHODS = ("actmat", "task_arithmetic")
Tasks = list[torch.Tensor]


@click.command()
@click.option("--size", type=click.Choice(list(SHAPES)), default="7b", show_default=True)
@click.option("--experts", default=3, show_default=True)
@click.option("--rank", default=0, help="Of the experts' changes; 0 for full rank.")
@click.option("--threads", default=0, help="Threads for torch; 0 for its own choice.")
@click.option("--repeats", default=1, show_default=True)
@click.option("--peak", type=click.Choice([*METHODS, "solve"]), help="Only print the memory that this one takes.")
def main(size: str, experts: int, rank: int, threads: int, repeats: int, peak: str | None) -> None:
    """Compare a merge of one layer by actmat with task_arithmetic and with the bare solves."""
    be_quiet()
    logging.disable(logging.WARNING)
    if threads:
        torch.set_num_threads(threads)
    mergekit_slta.host.patches.install()
    folders = _adapted(size, experts, rank) if rank else make_family(CACHE, size, experts, layers=1)
    if peak:
        print(json.dumps({"bytes": _peak(peak, folders)}))
        return
    seconds = timed({name: partial(_merge, name, folders) for name in METHODS}, repeats)
    seconds["solves"] = _solves(folders)
    total = seconds["actmat"] / (1.5 * seconds["task_arithmetic"] + seconds["solves"])
    arguments = [f"--size={size}", f"--experts={experts}", f"--rank={rank}", f"--threads={threads}"]
    memory = {name: in_subprocess(__file__, [*arguments, f"--peak={name}"])["bytes"] for name in (*METHODS, "solve")}
    layers = SHAPES[size][-1]
    result = {
        "benchmark": "actmat",
        "size": size,
        "experts": experts,
        "rank": rank,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "seconds_per_layer": {name: round(value, 2) for name, value in seconds.items()},
        "over_1.5_task_arithmetic_and_solves": round(total, 3),
        f"minutes_for_{layers}_layers": {name: round(value * layers / 60, 1) for name, value in seconds.items()},
        "peak_mb": {name: round(value / 2**20) for name, value in memory.items()},
    }
    print(json.dumps(result))


def _adapted(size: str, experts: int, rank: int) -> list[Path]:
    """The family with the base model in float32 and experts that differ from it by products of ``rank``, once."""
    base, *others = make_family(CACHE, size, experts, layers=1, dtype="float32")
    folders = [base, *(folder.with_name(f"{folder.name}-rank{rank}") for folder in others)]
    for number, folder in enumerate(folders[1:]):
        if not (folder / "config.json").exists():
            generator = torch.Generator().manual_seed(number)
            tensors = load_file(base / "model.safetensors")
            for name, tensor in tensors.items():
                if name.startswith("model.layers") and tensor.ndim == 2:
                    down, up = (
                        torch.randn(rank, width, generator=generator) for width in (tensor.shape[1], len(tensor))
                    )
                    tensor.addmm_(up.T, down, alpha=1e-4)
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text((base / "config.json").read_text())
    return folders


def _merge(method: str, folders: list[Path]) -> None:
    base, *experts = map(str, folders)
    weights = {"parameters": {"weight": 0.4}} if method == "task_arithmetic" else {}
    recipe = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": expert, **weights} for expert in experts],
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }
    options = MergeOptions(quiet=True, write_model_card=False, copy_tokenizer=False)
    with tempfile.TemporaryDirectory() as folder:
        run_merge(MergeConfiguration.model_validate(recipe), f"{folder}/merged", options)


def _matrices(folders: list[Path]) -> list[str]:
    """The names of the layer's linear maps, the largest last."""
    with safe_open(folders[0] / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("model.layers")]  # noqa: SIM118
        shapes = {name: file.get_slice(name).get_shape() for name in names}
    return sorted((name for name, shape in shapes.items() if len(shape) == 2), key=lambda name: shapes[name][1])


def _tasks(folders: list[Path], name: str) -> Tasks:
    tensors = []
    for folder in folders:
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors.append(file.get_tensor(name).float())
    return [tensor.sub_(tensors[0]) for tensor in tensors[1:]]


def _solves(folders: list[Path]) -> float:
    """Seconds of the solves of all matrices of the layer, their task matrices in memory."""
    taken = 0.0
    for name in _matrices(folders):
        tasks = _tasks(folders, name)
        start = time.perf_counter()
        merge_by_covariance(tasks, ActmatSettings().ridge)
        taken += time.perf_counter() - start
    return taken


def _peak(what: str, folders: list[Path]) -> float:
    """The most anonymous memory that a merge, or the largest matrix's solve with its task matrices, takes."""
    with PeakMemory() as peak:
        if what == "solve":
            merge_by_covariance(_tasks(folders, _matrices(folders)[-1]), ActmatSettings().ridge)
        else:
            _merge(what, folders)
    return peak.bytes


if __name__ == "__main__":
    main()
