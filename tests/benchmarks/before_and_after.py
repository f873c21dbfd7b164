"""Compare two installations of the package: the same merging weights, the same merges, and the time that each takes.

    python tests/benchmarks/before_and_after.py BEFORE AFTER FAMILY

BEFORE and AFTER are the ``bin`` folders of two virtual environments, FAMILY is a folder that ``examples/family.py`` has
trained. The script is for the redesign of the package and goes with its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import yaml
from safetensors.torch import load_file

LEVELS = ("model", "layer", "attn_mlp", "head_mlp", "linear")
EXPERTS = ("sums", "strings", "words")
MERGES: dict[str, dict[str, Any]] = {
    **{f"slta {level}": {"merge_method": "slta", "parameters": {"level": level}} for level in LEVELS},
    "slta edges": {"merge_method": "slta", "parameters": {"level": "linear", "edges": "mean"}},
    "featcal": {"merge_method": "featcal", "parameters": {"ridge": 0.03}},
    "featcal base": {"merge_method": "featcal", "parameters": {"ridge": 0.03, "anchor": "base"}},
    "featcal few": {"merge_method": "featcal", "parameters": {"ridge": 0.03, "samples": 2}},
    "featcal auto": {"merge_method": "featcal"},
    "actmat": {"merge_method": "actmat"},
    "sftm": {"merge_method": "sftm"},
}


@click.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True))
@click.argument("after", type=click.Path(path_type=Path, exists=True))
@click.argument("family", type=click.Path(path_type=Path, exists=True))
def main(before: Path, after: Path, family: Path) -> None:
    """Print, for each measurement and merge, the largest difference and the seconds before and after."""
    family = family.resolve()
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(bins.absolute(), Path(folder) / name, family) for name, bins in enumerate_sides(before, after)]
        seconds = [side.calibrate() for side in sides]
        for level in LEVELS:
            ours, theirs = (side.alpha(level) for side in sides)
            assert ours.keys() == theirs.keys(), f"the submodules at {level} differ"
            values = ((torch.tensor(ours[name]) - torch.tensor(theirs[name])).abs().max() for name in ours)
            show(f"α {level}", float(max(values)), *seconds)
        base = load_file(family / "base" / "model.safetensors")
        experts = [load_file(family / name / "model.safetensors") for name in EXPERTS]
        for label, entries in MERGES.items():
            (one, first), (other, second) = (side.merge(label, entries) for side in sides)
            assert one.keys() == other.keys(), f"the tensors of {label} differ"
            largest = 0.0
            for name, stored in base.items():
                size = max(float((expert[name].float() - stored.float()).norm()) for expert in experts)
                largest = max(largest, float((one[name].float() - other[name].float()).norm()) / (size or 1.0))
            show(label, largest, first, second)


def enumerate_sides(before: Path, after: Path) -> list[tuple[str, Path]]:
    return [("before", before), ("after", after)]


def show(label: str, difference: float, first: float, second: float) -> None:
    said = "" if difference <= 1e-5 else "  <- differs"
    click.echo(f"{label:14} {difference:9.1e}  {first:6.1f} s {second:6.1f} s{said}")


class Side:
    """One installation, with a folder for what it writes."""

    def __init__(self, bins: Path, folder: Path, family: Path) -> None:
        self.bins, self.folder, self.family = bins, folder, family
        folder.mkdir()

    def run(self, command: str, *arguments: object) -> str:
        """Run one of the installation's commands in its folder, with a cache folder of its own."""
        changed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder / "cache")}
        words = [str(self.bins / command), *map(str, arguments)]
        done = subprocess.run(
            words, cwd=self.folder, env={**os.environ, **changed}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise click.ClickException(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def recipe(self, label: str, entries: dict[str, Any]) -> Path:
        calibrated = entries["merge_method"] in ("slta", "featcal")
        models = []
        for name in EXPERTS:
            data = {"calibration": str(self.family / "calibration" / f"{name}.jsonl")} if calibrated else {}
            models.append({"model": str(self.family / name), "parameters": data})
        content = {"base_model": str(self.family / "base"), "models": models, "dtype": "float32", **entries}
        path = self.folder / f"{label.replace(' ', '-')}.yml"
        path.write_text(yaml.safe_dump(content))
        return path

    def calibrate(self) -> float:
        recipe = self.recipe("calibrate", {"merge_method": "slta"})
        levels = [word for level in LEVELS for word in ("--level", level)]
        start = time.monotonic()
        self.run("mergekit-slta", "calibrate", recipe, "-o", "stats.safetensors", *levels, "--quiet")
        return time.monotonic() - start

    def alpha(self, level: str) -> dict[str, list[float]]:
        self.run("mergekit-slta", "solve", "stats.safetensors", "--level", level, "--json", "alpha.json")
        found: dict[str, list[float]] = json.loads((self.folder / "alpha.json").read_text())["alpha"]
        return found

    def merge(self, label: str, entries: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
        recipe, out = self.recipe(label, entries), self.folder / "merged" / label
        start = time.monotonic()
        self.run("mergekit-yaml", recipe, out, "--quiet")
        return load_file(out / "model.safetensors"), time.monotonic() - start


if __name__ == "__main__":
    main()
