"""What a progress bar shows of steps that are fractions."""

from __future__ import annotations

import io

import pytest

from mergekit_slta.engine.passes import ProgressBar


@pytest.mark.parametrize(("total", "step", "scale"), [(90, 0.75, False), (30, 0.25, False), (90, 1, 1 / 3)])
def test_a_bar_counts_in_whole_numbers(total: int, step: float, scale: float) -> None:
    with ProgressBar(total=total, desc="Evaluating", unit="record", unit_scale=scale, file=io.StringIO()) as bar:
        bar.update(step * 33)
        shown = str(bar)
        done = 33 * step * (scale or 1)
    assert f" {round(done)}/{round(total * (scale or 1))} [" in shown and shown.startswith("Evaluating: ")
