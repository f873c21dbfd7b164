"""The benchmark for GPUs, on tiny models and a CPU: every row is there, and its numbers can be."""

from __future__ import annotations

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from support.processes import ROOT, run_afresh

ROWS = [
    "plain forward passes",
    "slta attn_mlp",
    "slta layer",
    "featcal",
    "featcal, ridge 0.03",
    "merge, ready statistics",
    "merge, task_arithmetic",
]
RUN = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow  # it merges seven times
def test_it_measures_tiny_models_and_says_what_is_extrapolated(forks: ForkServerContext, tmp_path: Path) -> None:
    options = ["--device=cpu", "--samples=2", "--tokens=16", "--layers=2", "--repeats=1", "--shape=tiny"]
    script = ROOT / "tests" / "benchmarks" / "gpu.py"
    said = run_afresh(forks, RUN, script, *options, f"--folder={tmp_path / 'models'}", f"--output={tmp_path}")
    (result,) = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["layers"], result["all_layers"], result["samples"], result["models"]) == (2, 3, 6, 4)
    assert [row["name"] for row in result["rows"]] == ROWS
    assert result["rows"][0]["ratio"] == 1
    assert all(row["extrapolated_s"] == row["seconds"] * 3 / 2 > 0 for row in result["rows"])
    assert "2 of 3 layers" in said and (tmp_path / "gpu.md").read_text() in said
    assert not any((tmp_path / "models").glob("*/base"))
