"""What SFTM's solver costs against forming and solving the whole r x r system in float64, side by side.

    python tests/benchmarks/sftm.py [--repeats 5] [--threads 2] [--no-svd] [MxN ...]

One JSON line per shape, for three experts with random task matrices trimmed to a fifth. Both sides start from the same
features, the dense side from float64 copies of them that are not counted. ``seconds`` are medians over the repeats, for
the decompositions over the three matrices, times three. ``mebibytes`` are peaks of resident memory above the features.
Linux with glibc only, because of how memory is measured.
"""

import argparse
import ctypes
import gc
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import timed
from support.memory import memory_of_this_process

from mergekit_slta.sftm.superpose import SingularFeatures, feature_coefficients, singular_features, superpose, trim

EXPERTS = 3
DENSITY = 0.2
SHAPES = ["1024x1024", "2048x2048", "4096x1024"]


def dense_coefficients(left: torch.Tensor, values: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Solve Eq. 4 with the whole system [r, r], its second factor and the factorization the only temporaries."""
    system = left.T @ left
    system *= right.T @ right
    return torch.linalg.solve(system, values)


def peak(function: Callable[[], Any]) -> float:
    """The most resident memory that a call adds, in MiB, once it has run before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not serve the call unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = memory_of_this_process("VmRSS")
    function()
    return (memory_of_this_process("VmHWM") - before) / 2**20


def decompositions(matrices: list[torch.Tensor]) -> dict[str, float]:
    """Seconds for the decompositions of all matrices, by how they are made."""
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "features": singular_features,
        "svd_float32": lambda matrix: torch.linalg.svd(matrix, full_matrices=False),
        "svd_float64": lambda matrix: torch.linalg.svd(matrix.double(), full_matrices=False),
    }
    seconds = [timed({way: partial(decompose, matrix) for way, decompose in ways.items()}, 1) for matrix in matrices]
    return {way: EXPERTS * statistics.median(taken[way] for taken in seconds) for way in ways}


def benchmark(rows: int, columns: int, repeats: int, with_svd: bool) -> dict[str, Any]:
    """Both solvers on one shape."""
    generator = torch.Generator().manual_seed(0)
    matrices = [trim(torch.randn(rows, columns, generator=generator) * 1e-3, DENSITY) for _ in range(EXPERTS)]
    features = [singular_features(matrix) for matrix in matrices]
    joined = SingularFeatures(
        torch.cat([feature.left for feature in features], 1).double(),
        torch.cat([feature.values for feature in features]).double(),
        torch.cat([feature.right for feature in features], 1).double(),
    )
    coefficients, solved = feature_coefficients(features)
    beta = dense_coefficients(*joined)
    steps: dict[str, Callable[[], Any]] = {
        "blocks_solve": lambda: feature_coefficients(features),
        "dense_solve": lambda: dense_coefficients(*joined),
        "blocks_superpose": lambda: superpose(features, coefficients),
        "dense_superpose": lambda: (joined.left * beta) @ joined.right.T,
    }
    seconds_of = timed(steps, repeats)
    reference = steps["dense_superpose"]()
    error = float((steps["blocks_superpose"]().double() - reference).norm() / reference.norm())
    del reference
    memory = {step: peak(function) for step, function in steps.items()}
    ours = seconds_of["blocks_solve"] + seconds_of["blocks_superpose"]
    theirs = seconds_of["dense_solve"] + seconds_of["dense_superpose"]
    summary = {
        "solve_speedup": seconds_of["dense_solve"] / seconds_of["blocks_solve"],
        "speedup_without_svd": theirs / ours,
        "memory_share": max(memory["blocks_solve"], memory["blocks_superpose"])
        / max(memory["dense_solve"], memory["dense_superpose"]),
        "relative_error": error,
    }
    if with_svd:
        seconds_of |= decompositions(matrices)
        summary["total"] = ours + seconds_of["features"]
        summary["total_dense_svd_float32"] = theirs + seconds_of["svd_float32"]
        summary["total_dense_svd_float64"] = theirs + seconds_of["svd_float64"]
    return {
        "shape": [rows, columns],
        "experts": EXPERTS,
        "features": sum(len(feature.values) for feature in features),
        "solved_in_float32": solved,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "seconds": {step: round(value, 4) for step, value in seconds_of.items()},
        "mebibytes": {step: round(value, 1) for step, value in memory.items()},
        **{name: float(f"{value:.3g}") for name, value in summary.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="MxN")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-svd", action="store_true", help="leave out the decompositions and the totals")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for shape in arguments.shapes:
        rows, columns = map(int, shape.split("x"))
        print(json.dumps(benchmark(rows, columns, arguments.repeats, not arguments.no_svd)), flush=True)


if __name__ == "__main__":
    main()
