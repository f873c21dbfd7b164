"""The pictures in docs/: run ``python tests/support/screenshots.py FOLDER`` on a folder that the quickstart filled.

The report on the folder's statistics is opened in a headless Chromium (apt-get install chromium). The figures of the
gallery are drawn by the package, of merges of the folder's models, in a minute or two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

import mergekit_slta as slta
from mergekit_slta.reports.linearity import write_linearity

DOCS = Path(__file__).parents[2] / "docs"
TALLEST = 12000  # pixels, more than a page has
# By file: the window's width, its further options, where the picture begins, and its height in pixels.
SHOTS: dict[str, tuple[int, tuple[str, ...], int, int]] = {
    "report.png": (1280, (), 0, 1065),
    "report-phone.png": (390, ("--force-dark-mode",), 1270, 1075),
}
MERGES = ("slta-attn_mlp", "task_arithmetic-0.6", "ties", "actmat", "featcal")  # the columns of the comparison


def main(folder: Path) -> None:
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
        _draw(Path(temporary))
        for figure in Path(temporary).glob("*.png"):
            with Image.open(figure) as drawn:
                _save(drawn, f"figures/{figure.name}")


def _draw(out: Path) -> None:
    """Draw every figure of the package, in the quickstart's folder, as PNG files."""
    data = {name: f"./family/calibration/{name}.jsonl" for name in ("sums", "strings", "words")}
    experts = {f"./family/{name}": source for name, source in data.items()}
    recipe = slta.Recipe("./family/base", experts, "featcal", report=str(out))
    slta.merge(recipe, out / "merged", quiet=True)
    keeping = {"./family/sums": data["sums"], "./family/base": data["words"]}
    solution = slta.measure(slta.Recipe("./family/base", keeping), quiet=True).solve()
    slta.report(solution, out / "keeping")
    write_linearity(slta.linearity(recipe, quiet=True), out)
    slta.compare(recipe, [f"merged/{name}" for name in MERGES], quiet=True).plot().savefig(out / "comparison.png")
    (out / "keeping" / "trade-attn_mlp.png").rename(out / "trade-attn_mlp.png")
    for number in (2, 3):
        (out / f"distances-{number}.png").unlink()  # as that of the first expert


def _save(picture: Image.Image, name: str) -> None:
    (DOCS / name).parent.mkdir(exist_ok=True)
    picture.convert("RGB").quantize(256).save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
