"""The benchmark for GPUs, on tiny models and a CPU: every row is there, and its numbers can be."""

from __future__ import annotations

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path

from support.processes import ROOT, run_afresh

ROWS = [
    "plain forward passes", "featcal's floor", "slta attn_mlp", "slta layer", "featcal",
    "featcal, ridge 0.003, anchor base", "merge, ready statistics", "merge, task_arithmetic",
]  # fmt: skip

SCRIPT = ROOT / "tests" / "benchmarks" / "gpu.py"

RUN = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


OPTIONS = ["--device=cpu", "--samples=2", "--tokens=16", "--layers=2", "--repeats=1"]


def test_it_measures_a_tiny_model_and_says_what_is_extrapolated(forks: ForkServerContext, tmp_path: Path) -> None:
    said = run_afresh(
        forks, RUN, SCRIPT, *OPTIONS, "--shape=tiny", f"--folder={tmp_path / 'models'}", f"--output={tmp_path}"
    )
    (result,) = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["layers"], result["all_layers"], result["samples"], result["models"]) == (2, 3, 6, 4)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ROWS
    assert rows["plain forward passes"]["ratio"] == 1
    # The layers of four models in bfloat16: queries, keys, values, output, the MLP's three, and two norms.
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    edges = 2048 * 64 + 64  # the base model's embedding and last norm
    assert rows["slta layer"]["bytes_read"] == 2 * (4 * 2 * layer + edges)
    for name, row in rows.items():
        assert row["extrapolated_s"] == row["seconds"] * 3 / 2 > 0
        assert row["tokens_per_s"] > 0 and row["tflops"] > 0
        if name in ROWS[2:6]:
            assert 0 < sum(row["shares"].values()) <= 1
            assert row["shares"]["computing"] > 0 and row["shares"]["reading"] > 0
    assert rows["featcal"]["shares"]["solving"] > 0 == rows["slta layer"]["shares"]["solving"]
    text = (tmp_path / "gpu.md").read_text()
    assert "2 of 3 layers" in text and text in said
    assert "±" not in text  # one run has no deviation
    assert not any((tmp_path / "models").glob("*/base"))


FAILING = """
import sys, torch
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
import gpu

def fail(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory.\\nTried to allocate 2 GiB")

gpu.measured_statistics = gpu.solve_model = fail
gpu.shutil.disk_usage = lambda folder: SimpleNamespace(free=5_000_000)  # for one layer
write, large = gpu.write_models, gpu.SHAPES["70b"]
gpu.write_models = lambda folder, config, *more: fail() if config is large else write(folder, config, *more)
forward = gpu._forward
gpu._forward = lambda path, *more: forward(path, *more) if "mixtral" in (path / "config.json").read_text() else fail()
try:
    gpu.main(sys.argv[2:])
except SystemExit as ended:
    assert ended.code == 1
"""


def test_what_fails_leaves_the_rest_alone(forks: ForkServerContext, tmp_path: Path) -> None:
    shapes = ["--shape=70b", "--shape=tiny-mixture", "--shape=tiny"]
    said = run_afresh(forks, FAILING, SCRIPT, *OPTIONS, *shapes, f"--folder={tmp_path}", f"--output={tmp_path}")
    failed, result, without_forward = json.loads((tmp_path / "gpu.json").read_text())
    assert failed == {"shape": "70b", "error": "OutOfMemoryError: CUDA out of memory"}
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["statistics for the merge", *ROWS]
    assert {name for name, row in rows.items() if "seconds" in row} == {*ROWS[:2], ROWS[-1]}
    plain = rows[ROWS[0]]
    assert result["layers"] == 1
    products = 2 * 3 * 64 * 96  # of a token in the two experts of a layer that it goes to
    assert plain["tflops"] * plain["seconds"] * 1e12 > 2 * products * result["models"] * 6 * 16
    for name in ROWS[2:6]:
        assert rows[name]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert said.count("Tried to allocate 2 GiB") == 6 + 6
    (floor,) = [row for row in without_forward["rows"] if row["name"] == ROWS[1]]
    assert floor["error"] == "RuntimeError: It holds two forward passes, which failed"
    assert f"| {ROWS[2]} | OutOfMemoryError: CUDA out of memory |" in (tmp_path / "gpu.md").read_text()


def test_it_begins_nothing_when_the_time_is_over(forks: ForkServerContext, tmp_path: Path) -> None:
    places = f"--folder={tmp_path}", f"--output={tmp_path}"
    said = run_afresh(forks, RUN, SCRIPT, *OPTIONS, "--shape=tiny", "--minutes=0", *places)
    assert all(f"| {name} | no time was left |" in said for name in ROWS)
