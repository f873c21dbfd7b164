"""Random recipes on random small models, each with a fault at a random operation, for as long as is asked for.

``SOAK_MINUTES=30 SOAK_SEED=0 pytest -m slow -n 0 -s tests/test_soak.py``; ``SOAK_CASE`` repeats the case of a number
alone. What a case is depends on the seed and its number only.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families, faults
from support.faults import Commands, Fault

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not faults.COMPILER, reason="faults.c needs a C compiler"),
]

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
CASE = os.environ.get("SOAK_CASE")


def write_case(rng: random.Random, folder: Path) -> str:
    """Write models, data and a recipe; returns what they are."""
    architecture = rng.choice(sorted(families.ARCHITECTURES))
    experts = rng.choice([1, 2, 2, 3, 4])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    family = families.make_family(
        folder,
        architecture,
        experts=experts,
        dtype=dtype,
        scale=rng.choice([0.001, 0.1, 1.0]),
        records=rng.choice([1, 3, 8]),
        seed=rng.randrange(1000),
    )
    method = rng.choice(["slta", "slta", "featcal", "actmat", "sftm"])
    settings: dict[str, Any] = {}
    if method in ("slta", "featcal"):
        settings = {"samples": rng.choice([1, 2, 5]), "max_tokens": rng.choice([3, 8, 32]), "seed": rng.randrange(5)}
        settings |= {"batch_tokens": rng.choice([0, 1, 16])}
    if method == "slta":
        settings |= {"level": rng.choice(["model", "layer", "attn_mlp", "head_mlp", "linear"])}
        settings |= {"balance": rng.random() < 0.5, "edges": rng.choice(["base", "mean"])}
    if method == "featcal":
        settings |= {"anchor": rng.choice(["base", "actmat"]), "head": rng.random() < 0.5}
        settings |= {"ridge": rng.choice(["auto", 0.003, 0.0]), "scratch": "scratch"}
    calibration = method in ("slta", "featcal")
    content = families.recipe(
        family, method, calibration=calibration, out_dtype=rng.choice([None, "bfloat16"]), **settings
    )
    families.write_recipe(folder / "recipe.yml", content)
    (folder / "tmp").mkdir()
    return f"{architecture}, {experts} experts in {dtype}, {method} {settings}"


def soak(commands: Commands, folder: Path, number: int) -> str | None:
    """Take a case; returns what was wrong, "refused" if a sentence says that the models cannot be merged."""
    rng = random.Random(f"{SEED} {number}")
    before, root = folder / "before", folder / "run"
    what = write_case(rng, before)
    # The recipe names absolute paths, so the models stay where they are.
    command = ("mergekit-slta", "merge", "recipe.yml", "merged", "--quiet")
    shutil.copytree(before, root)
    clean = commands.run(command, root, log=folder / "operations")
    if clean.code:
        wrong = faults.not_a_sentence(clean.said)
        return f"{what}: {wrong}: {clean.said[-800:]}" if wrong else "refused"
    scenario = faults.scenario_of(command, ("merged/model*.safetensors",), before, root, folder / "operations")
    verified = commands.run(("mergekit-slta", "verify", "recipe.yml", "merged"), root)
    if verified.code:
        return f"{what}: {verified.said[-800:]}"
    fault: Fault = rng.choice([fault for fault in scenario.faults() if scenario.changes(fault)])
    wrong = faults.failure(commands, scenario, fault, root)
    return f"{what}: {scenario.describe(fault)}: {wrong}" if wrong else None


def test_soak(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    found: dict[int, str] = {}
    begin = time.monotonic()
    with faults.started(tmp_path) as commands:
        number = int(CASE or 0)
        while True:
            folder = tmp_path / f"case-{number}"
            wrong = soak(commands, folder, number)
            counts["refused" if wrong == "refused" else "wrong" if wrong else "right"] += 1
            if wrong and wrong != "refused":
                found[number] = wrong
                print(f"{number}: {wrong}", flush=True)
            shutil.rmtree(folder)
            number += 1
            if number % 20 == 0:
                print(f"{number} recipes: {dict(counts)}", flush=True)
            if CASE is not None or time.monotonic() - begin > 60 * MINUTES:
                break
    print(f"seed {SEED}, {sum(counts.values())} recipes: {dict(counts)}")
    assert found == {}
