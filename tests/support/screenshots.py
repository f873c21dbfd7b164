"""The pictures in docs/.

    python tests/support/screenshots.py FOLDER [REAL]

FOLDER is one that the quickstart filled: the report on its statistics is opened in a headless Chromium (apt-get install
chromium). The figures of the gallery are drawn by the package, of merges of its models, in a minute or two; and of the
experts in REAL, a seed's folder of ``tests/benchmarks/real_model.py``, in half an hour.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

import mergekit_slta as slta
from mergekit_slta.reports.linearity import write_linearity

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TALLEST = 12000  # pixels, more than a page has
# By file: the window's width, its further options, where the picture begins, and its height in pixels.
SHOTS: dict[str, tuple[int, tuple[str, ...], int, int]] = {
    "report.png": (1280, (), 0, 1065),
    "report-phone.png": (390, ("--force-dark-mode",), 1270, 1075),
}
REAL_MERGES = ("slta attn_mlp", "task_arithmetic 0.5", "ties", "actmat", "featcal 30 prompts")
MERGES = ("slta-attn_mlp", "task_arithmetic-0.6", "ties", "actmat", "featcal")  # the columns of the comparison


def main(folder: Path, real: Path | None = None) -> None:
    """Write every screenshot, and every figure of the gallery."""
    with tempfile.TemporaryDirectory() as temporary:
        page = slta.report(slta.Statistics.load(folder / "statistics.safetensors"), temporary)
        whole = Path(temporary) / "whole.png"
        for name, (width, options, top, height) in SHOTS.items():
            browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
            taken = [f"--window-size={width},{TALLEST}", f"--screenshot={whole}", page.as_uri()]
            subprocess.run([*browser, *taken], check=True)
            with Image.open(whole) as shot:
                _save(shot.crop((0, top, width, top + height)), name)
        whole.unlink()
        with Image.open(folder / "alpha.png") as drawn:
            _save(drawn, "quickstart-alpha.png")
        os.chdir(folder)  # where the recipes' paths begin
        _draw_quickstart(Path(temporary))
        if real is not None:
            os.chdir(real)
            _draw_real(real, Path(temporary) / "real")
        for prefix in ("", "real-"):
            for figure in (Path(temporary) / prefix.rstrip("-")).glob("*.png"):
                with Image.open(figure) as drawn:
                    _save(drawn, f"figures/{prefix}{figure.name}")


def _draw(
    out: Path, base: str, data: dict[str, str], other: str, merges: Sequence[str], statistics: slta.Statistics
) -> None:
    """Draw every figure of the package as PNG files.

    Args:
        out: where they are written.
        base: the base model.
        data: each expert's calibration data, by its folder.
        other: prompts of the base model, to keep beside the first expert.
        merges: the folders of merges to compare.
        statistics: what the report shows.
    """
    out.mkdir(parents=True, exist_ok=True)
    recipe = slta.Recipe(base, data, "featcal", report=str(out))
    slta.merge(recipe, out / "merged", quiet=True)
    slta.report(statistics, out)
    first = next(iter(data.items()))
    slta.report(slta.measure(slta.Recipe(base, dict([first, (base, other)])), quiet=True).solve(), out / "keeping")
    write_linearity(slta.linearity(recipe, quiet=True), out)
    slta.compare(recipe, list(merges), quiet=True).plot().savefig(out / "comparison.png")
    (out / "keeping" / "trade-attn_mlp.png").rename(out / "trade-attn_mlp.png")
    for number in range(2, len(data) + 1):
        (out / f"distances-{number}.png").unlink()  # as that of the first expert


def _draw_quickstart(out: Path) -> None:
    data = {f"./family/{name}": f"./family/calibration/{name}.jsonl" for name in ("sums", "strings", "words")}
    statistics = slta.Statistics.load("statistics.safetensors")
    _draw(out, "./family/base", data, data["./family/words"], [f"merged/{name}" for name in MERGES], statistics)


def _draw_real(folder: Path, out: Path) -> None:
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "benchmarks")]
    import quickstart
    import real_family
    import real_model

    family = real_family.train_family(folder, 0, list(real_family.TASKS)[:3])
    recipes = real_model.recipes(family)
    merges = [quickstart.merge(folder, label, recipes[label], 0) for label in REAL_MERGES]
    data = {f"./{name}": f"./{name}.jsonl" for name in family.experts}
    statistics = slta.measure(slta.Recipe("../base", data), quiet=True)
    _draw(out, "../base", data, "../base.jsonl", [str(merge.relative_to(folder)) for merge in merges], statistics)


def _save(picture: Image.Image, name: str) -> None:
    (DOCS / name).parent.mkdir(exist_ok=True)
    picture.convert("RGB").quantize(256).save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main(*[Path(argument).resolve() for argument in sys.argv[1:]])
