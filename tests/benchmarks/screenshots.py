"""The figures of the gallery, drawn by the package in a minute or two, of merges of the quickstart's models.

    python tests/benchmarks/screenshots.py FOLDER

FOLDER is one that the quickstart filled.
"""

import os
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.families import recipe_of

import mergekit_slta as slta
from mergekit_slta.reports.linearity import write_linearity

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def main(folder: Path) -> None:
    """Write every figure of the gallery."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        os.chdir(folder)  # where the recipes' paths begin
        data = {f"./family/{name}": f"./family/calibration/{name}.jsonl" for name in ("sums", "strings", "words")}
        slta.merge(recipe_of("./family/base", data, "featcal", report=str(out)), out / "merged", quiet=True)
        slta.report(slta.Statistics.load("statistics.safetensors"), out)
        write_linearity(slta.linearity(recipe_of("./family/base", data), quiet=True), out)
        for figure in out.glob("*.png"):
            with Image.open(figure) as drawn:
                drawn.convert("RGB").quantize(256).save(FIGURES / figure.name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
