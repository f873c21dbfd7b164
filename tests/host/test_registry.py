"""The methods beside mergekit's own."""

from __future__ import annotations

from pathlib import Path

import mergekit.merge
from mergekit import merge_methods
from support import families
from support.families import Family
from support.merging import merged_state, worst_error

from mergekit_slta.host import patches


def test_registering_twice_changes_nothing() -> None:
    patches.install()
    names = [method.spec.name for method in merge_methods.registered_methods()]
    assert names.count("slta") == 1
    assert not hasattr(mergekit.merge.run_merge.__wrapped__, "__wrapped__")


def test_other_methods_are_planned_as_before(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "task_arithmetic", calibration=False, per_expert={"weight": 0.5})
    out = families.merge(content, tmp_path / "out")
    base, *experts = (merged_state(folder) for folder in llama.folders)
    expected = {name: base[name] + sum(0.5 * (expert[name] - base[name]) for expert in experts) for name in base}
    assert worst_error(merged_state(out), expected) < 1e-6
