"""Whole models, merged to the end: time, memory, disk and bytes read, against forward passes and what `check` says.

    python tests/benchmarks/whole.py --shape 1b --samples 30 --tokens 512 --base-samples 120
    python tests/benchmarks/whole.py --shape tiny --method featcal

Checkpoints of random bfloat16 numbers are written layer by layer: a base model and three experts, the first of which
changes the base model by matrices of low rank. Each merge is a process of its own, which is killed when half of its
layers are finished, and started again; ``actmat`` has nothing to go on from and runs once. Memory is anonymous memory,
without the files that are mapped. The floor is one forward pass of each model over its prompts, in float32.

Writes a result after every method, beside the rows of methods that ran before, and prints rows of docs/performance.md.
"""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from common import CACHE, SHAPES, be_quiet, known_rows, load, wait_for, write_models, write_result, write_samples

from mergekit_slta.checks.space import needs
from mergekit_slta.data.sources import CalibrationData
from mergekit_slta.engine.streams import fitting_batch, make_batches
from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe

EXPERTS = 3
METHODS = ("slta", "featcal", "actmat")


@click.command()
@click.option("--shape", type=click.Choice([*SHAPES]), default="1b", show_default=True)
@click.option("--layers", default=0, help="Of the shape; all by default.")
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS, show_default=True)
@click.option("--samples", default=30, show_default=True, help="Prompts of each expert.")
@click.option("--base-samples", default=0, help="Prompts of the base model, with featcal alone.")
@click.option("--tokens", default=512, show_default=True, help="Of each prompt.")
@click.option("--base-tokens", default=128, show_default=True, help="Of each prompt of the base model.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=CACHE, help="For checkpoints, which stay there.")
@click.option("--profile", type=click.Path(path_type=Path), help="A folder for Python's profile of each process.")
def main(shape: str, layers: int, methods: Sequence[str], folder: Path, **settings: Any) -> None:
    """Merge a whole model by each method."""
    be_quiet()
    device, profile = settings.pop("device"), settings.pop("profile")
    models = write_models(folder / f"whole-{shape}-{layers}", shape, EXPERTS, layers, low_rank=(1,))
    about: dict[str, Any] = {
        "shape": shape,
        "layers": layers or SHAPES[shape].num_hidden_layers,
        **settings,
        "device": torch.cuda.get_device_name() if device != "cpu" else f"{torch.get_num_threads()} threads of a CPU",
        "python": platform.python_version(),
    }
    shortened = f"-{layers}-layers" if layers else ""
    name = f"whole-{shape}{shortened}-{settings['samples']}x{settings['tokens']}"
    rows = known_rows(name)
    for method in methods:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            recipe = Path(place) / "recipe.yml"
            write_recipe(recipe, models, method, folder, **settings)
            rows[method] = measure(recipe, Path(place) / "merged", device, profile and profile / method)
        write_result(name, rows, **about)
    click.echo(table(rows))


def write_recipe(
    file: Path, models: Sequence[Path], method: str, folder: Path, *, samples: int, tokens: int, **of_base: int
) -> None:
    """Write a recipe of all models, with prompts of random words for the methods that take them."""
    base, *experts = models
    entries: list[dict[str, Any]] = [{"model": str(expert)} for expert in experts]
    parameters: dict[str, Any] = {}
    if method != "actmat":
        parameters = {"max_tokens": tokens}
        files = write_samples(folder, EXPERTS, samples, tokens)
        if of_base["base_samples"] and method == "featcal":
            entries.append({"model": str(base)})
            files += write_samples(folder, EXPERTS + 1, of_base["base_samples"], of_base["base_tokens"])[EXPERTS:]
        for entry, data, count in zip(entries, files, [samples] * EXPERTS + [of_base["base_samples"]], strict=False):
            entry["parameters"] = {"calibration": str(data), "samples": count}
    content = {"merge_method": method, "base_model": str(base), "models": entries, "parameters": parameters}
    file.write_text(json.dumps(content | {"dtype": "float32", "out_dtype": "bfloat16"}))


# Measurements


def measure(recipe: Path, out: Path, device: str, profile: Path | None) -> dict[str, Any]:
    """Merge, in two processes where the first is killed, and compare with the forward passes and with the check."""
    experiment = Experiment(Recipe.load(recipe), device=device, quiet=True)
    settings = experiment.recipe.settings
    data = experiment.load_data(experiment.recipe.tasks) if settings.runs_models else []
    said, command = needs(experiment), ["merge", str(recipe), str(out), "--device", device]
    half = len(experiment.decoder) // 2
    runs = [watch(command, out, layers, profile) for layers in ((half, 0) if settings.runs_models else (0,))]
    folders = {str(reference.model.path) for reference in experiment.recipe.references}
    stored = sum(file.stat().st_size for folder in folders for file in Path(folder).glob("*.safetensors"))
    row = {
        "seconds": sum(run["seconds"] for run in runs),
        "processor_seconds": sum(run["processor_seconds"] for run in runs),
        "memory": max(run["memory"] for run in runs),
        "memory_said": said.memory,
        "disk": max(run["disk"] for run in runs),
        "disk_said": said.merged + said.solved,
        "read": sum(run["read"] for run in runs) / stored,
        "killed_after": runs[0]["seconds"] if len(runs) > 1 else 0,
    }
    if data:
        row["forward_seconds"] = forward(experiment, data)
    return row


def watch(arguments: Sequence[str], out: Path, layers: int, profile: Path | None) -> dict[str, float]:
    """Run a command, until it has finished some layers if that is not 0, and look at it every 5 ms."""
    with tempfile.NamedTemporaryFile() as counts:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, "--child", counts.name, str(profile or ""), *arguments, "--quiet"]
        start, memory, disk, looked = time.perf_counter(), 0, 0, 0.0
        process = subprocess.Popen(command, env=environment)
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            memory = max(memory, anonymous(process.pid))
            if time.perf_counter() > looked + 0.5:
                looked = time.perf_counter()
                disk = max(disk, size_of(out))
                if layers and len(list((out / PARTIAL_OF_MERGE).glob("layer-*"))) >= layers:
                    process.send_signal(signal.SIGKILL)
                    layers = 0
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        assert status in (0, signal.SIGKILL), f"{arguments} ended with {status}"
        read, on_gpu = map(int, (Path(counts.name).read_text() or "0 0").split())
    return {
        "seconds": seconds,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "memory": on_gpu or memory,
        "disk": max(disk, size_of(out)),
        "read": read,
    }


def anonymous(pid: int) -> int:
    """The bytes of a process that no file holds; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder, which another process may move."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


@torch.no_grad()
def forward(experiment: Experiment, data: Sequence[CalibrationData]) -> float:
    """Processor seconds of a forward pass of each model over all prompts; they differ in their numbers alone."""
    device = experiment.device
    batches = make_batches([task.token_ids for task in data], fitting_batch(experiment.decoder))
    model = load(Path(experiment.recipe.base.model.path), device)
    start = time.process_time()
    for batch in batches:
        model.base_model(batch.token_ids.to(device), use_cache=False)
    wait_for(device)
    return (time.process_time() - start) * (len(experiment.recipe.experts) + 1)


def child(counts: str, profile: str, *arguments: str) -> None:
    """The command itself, which writes how many bytes of tensors it has read, and the most that a GPU has held."""
    from mergekit.io.lazy_tensor_loader import LazyTensorLoader

    from mergekit_slta.cli.commands import main as command

    file, total, get = os.open(counts, os.O_WRONLY), 0, LazyTensorLoader.get_tensor

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal total
        tensor = get(self, *given, **named)
        total += 0 if tensor is None else tensor.nbytes
        on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        os.pwrite(file, f"{total:20d} {on_gpu:20d}".encode(), 0)
        return tensor

    LazyTensorLoader.get_tensor = counted
    if not profile:
        command(arguments)
        return
    import cProfile

    Path(profile).parent.mkdir(parents=True, exist_ok=True)
    with cProfile.Profile() as profiled:
        command(arguments, standalone_mode=False)
    profiled.dump_stats(profile)


# The table


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table."""
    heads = ["", "time", "processor, running the models once", "memory, by `check`", "disk, by `check`"]
    lines = [f"| {' | '.join([*heads, 'reads of each tensor'])} |", "|---" * 6 + "|"]
    for name, row in rows.items():
        floor = row.get("forward_seconds")
        cells = [
            f"{row['seconds'] / 60:.1f} min",
            f"{row['processor_seconds'] / floor:.1f}" if floor else f"{row['processor_seconds']:.0f} s",
            *(f"{row[of] / 1e9:.2f} / {row[f'{of}_said'] / 1e9:.2f} GB" for of in ("memory", "disk")),
            f"{row['read']:.1f} times",
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
