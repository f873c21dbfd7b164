"""The screenshots in docs/: run ``python tests/support/screenshots.py FOLDER`` on a folder that the quickstart filled.

The report on the folder's statistics is opened in a headless Chromium (apt-get install chromium).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from mergekit_slta import Statistics, report

DOCS = Path(__file__).parents[2] / "docs"
TALLEST = 12000  # pixels, more than a page has
# By file: the window's width, its further options, where the picture begins, and its height in pixels.
SHOTS: dict[str, tuple[int, tuple[str, ...], int, int]] = {
    "report.png": (1280, (), 0, 1165),
    "report-phone.png": (390, ("--force-dark-mode",), 1497, 1075),
}


def main(folder: Path) -> None:
    """Write every screenshot."""
    with tempfile.TemporaryDirectory() as temporary:
        page = report(Statistics.load(folder / "statistics.safetensors"), temporary)
        whole = Path(temporary) / "whole.png"
        for name, (width, options, top, height) in SHOTS.items():
            browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
            taken = [f"--window-size={width},{TALLEST}", f"--screenshot={whole}", page.as_uri()]
            subprocess.run([*browser, *taken], check=True)
            with Image.open(whole) as shot:
                shot.convert("RGB").crop((0, top, width, top + height)).save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
