"""The pages in a real browser: on a phone and a desk, in light and dark, with nothing from outside."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from support import synthetic
from support.browser import DESK, MISSING, PHONE, Browser, Scheme, binary

from mergekit_slta.nonlinearity.scores import STEPS, Linearity, Value, distance_metric
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.reports.featcal import drift_page
from mergekit_slta.reports.linearity import write_linearity
from mergekit_slta.reports.merge import report

pytestmark = pytest.mark.skipif(binary() is None, reason=MISSING)
PAGES = ("report.html", "featcal.html", "linearity.html")
LONG = "org/a-model-with-a-name-that-is-much-longer-than-a-phone-is-wide"
EXPERTS = (f"{LONG}-math", f"{LONG}-code", "org/other")

# Text against what is behind it, by the formula of the Web Content Accessibility Guidelines.
LOWEST_CONTRAST = """
(() => {
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = element => {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (colour.length == 3) return colour;
    }
  };
  const texts = [...document.querySelectorAll('main *, footer')].filter(
    element => [...element.childNodes].some(node => node.nodeType == 3 && node.textContent.trim()));
  const contrasts = texts.map(element => {
    const [a, b] = [numbers(getComputedStyle(element).color), ground(element)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
  return [texts.length, Math.min(...contrasts)];
})()
"""
IMAGES = "Promise.all([...document.images].map(i => i.decode().then(() => [i.naturalWidth, i.alt])))"
# What is wider than the page and does not scroll in a box of its own.
TOO_WIDE = """
[...document.querySelectorAll('body *')].filter(element => !element.closest('.table > *')
  && element.getBoundingClientRect().right > innerWidth + 0.5).map(element => element.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser.started() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of page, about experts with long names."""
    folder = tmp_path_factory.mktemp("reports")
    report(synthetic.statistics(list(EXPERTS), ["attn_mlp"], layers=3), folder)
    errors = torch.rand(5, 3, dtype=torch.float64)
    drift_page(errors, 2 * errors, EXPERTS, FeatcalSettings()).write(folder, "featcal.html")
    value = Value(0.5, 0.1, 2)
    metrics = {"non_linearity": {"model": {expert: {"model": value} for expert in EXPERTS}}}
    for step in range(STEPS + 1):
        by_expert = {expert: {"model": Value(1 - step / STEPS, 0.0, 2)} for expert in EXPERTS}
        metrics[distance_metric(step)] = {"model": by_expert}
    distances = {expert: {"model": torch.rand(STEPS + 1, STEPS + 1)} for expert in EXPERTS}
    linearity = Linearity(EXPERTS, ("model",), (2, 2, 2), metrics, {"model": distances}, {}, {})
    write_linearity(linearity, folder)
    return folder


def brightness(png: bytes) -> tuple[float, float, float]:
    """How bright, from 0 to 1, a picture's darkest pixels are, its most, and its brightest."""
    grey = np.asarray(matplotlib.image.imread(io.BytesIO(png), format="png"))[..., :3].mean(-1)
    darkest, middle, brightest = np.quantile(grey, (0.001, 0.5, 0.999)).tolist()
    return darkest, middle, brightest


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_readable(browser: Browser, folder: Path, name: str, width: int, scheme: Scheme) -> None:
    browser.open(folder / name, width, scheme)
    browser.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    images = browser.evaluate(IMAGES)
    assert all(natural > 0 and len(alt) > 20 for natural, alt in images)
    assert images
    assert browser.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert not browser.evaluate(TOO_WIDE)
    texts, contrast = browser.evaluate(LOWEST_CONTRAST)
    assert texts > 5 and contrast >= 4.5
    assert not browser.errors
    own = (folder / name).resolve().as_uri()
    assert own in browser.requests
    assert all(address == own or address.startswith("data:") for address in browser.requests)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_and_its_pictures_take_the_readers_colours(browser: Browser, folder: Path, name: str) -> None:
    schemes: tuple[Scheme, Scheme] = ("light", "dark")
    for scheme in schemes:
        browser.open(folder / name, PHONE, scheme)
        browser.evaluate(IMAGES)
        for selector in ("html", "h1", "figure img"):
            darkest, middle, brightest = brightness(browser.picture(selector))
            assert darkest < 0.2 and brightest > 0.8, (scheme, selector)  # the ink and the ground
            assert middle > 0.9 if scheme == "light" else middle < 0.15, (scheme, selector)
