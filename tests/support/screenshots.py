"""The pictures in docs/.

    python tests/support/screenshots.py FOLDER [REAL]

FOLDER is one that the quickstart filled. The figures of the gallery are drawn by the package, of merges of these
models, in a minute or two; and of the experts in REAL, a seed's folder of ``tests/benchmarks/real_model.py``, in half
an hour.
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

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def main(folder: Path, real: Path | None = None) -> None:
    """Write every figure of the gallery."""
    with tempfile.TemporaryDirectory() as temporary:
        out, statistics = Path(temporary), slta.Statistics.load(folder / "statistics.safetensors")
        os.chdir(folder)  # where the recipes' paths begin
        data = {f"./family/{name}": f"./family/calibration/{name}.jsonl" for name in ("sums", "strings", "words")}
        slta.merge(recipe_of("./family/base", data, "featcal", report=str(out)), out / "merged", quiet=True)
        _draw(out, "./family/base", data, statistics)
        if real is not None:
            os.chdir(real)
            _draw_real(real, out / "real")
        for prefix in ("", "real-"):
            for figure in (out / prefix.rstrip("-")).glob("*.png"):
                with Image.open(figure) as drawn:
                    _save(drawn, f"figures/{prefix}{figure.name}")


def _draw(out: Path, base: str, data: dict[str, str], statistics: slta.Statistics) -> None:
    """Draw the figures of the gallery as PNG files; ``data`` are the experts' calibration files."""
    out.mkdir(parents=True, exist_ok=True)
    slta.report(statistics, out)
    write_linearity(slta.linearity(recipe_of(base, data), quiet=True), out)


def _draw_real(folder: Path, out: Path) -> None:
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "benchmarks")]
    import real_family

    family = real_family.train_family(folder, 0, list(real_family.TASKS)[:3])
    data = {f"./{name}": f"./{name}.jsonl" for name in family.experts}
    statistics = slta.measure(recipe_of("../base", data), quiet=True)
    _draw(out, "../base", data, statistics)
    (out / "distances.png").unlink()  # as that of the tiny expert


def _save(picture: Image.Image, name: str) -> None:
    (DOCS / name).parent.mkdir(exist_ok=True)
    picture.convert("RGB").quantize(256).save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main(*[Path(argument).resolve() for argument in sys.argv[1:]])
