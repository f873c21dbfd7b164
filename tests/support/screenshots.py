"""The screenshots in docs/: run ``python tests/support/screenshots.py FOLDER`` on a folder that the quickstart filled.

The report on the folder's statistics is opened in a headless Chromium (apt-get install chromium).
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.browser import DESK, PHONE, Browser, Scheme

from mergekit_slta import Statistics, report

DOCS = Path(__file__).parents[2] / "docs"
# By file: the window's width, the reader's colours, where the picture begins, and its height in pixels.
SHOTS: dict[str, tuple[int, Scheme, str, int]] = {
    "report.png": (DESK, "light", "html", 1215),
    "report-phone.png": (PHONE, "dark", "section:nth-of-type(3)", 1100),
}


def main(folder: Path) -> None:
    """Write every screenshot."""
    with tempfile.TemporaryDirectory() as temporary, Browser.started() as browser:
        page = report(Statistics.load(folder / "statistics.safetensors"), temporary)
        for name, (width, scheme, start, height) in SHOTS.items():
            browser.open(page, width, scheme)
            with Image.open(io.BytesIO(browser.picture(start, height))) as shot:
                shot.convert("RGB").save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
