"""The example that merges a pair of models and scores the merges: its recipes and its table."""

from __future__ import annotations

import evaluate_pair
import yaml

from mergekit_slta.recipe.recipe import Recipe

OPTIONS = {
    "calibration": "a.jsonl",
    "template": "",
    "keep": "b.jsonl",
    "keep_template": r"{x}\n{y}",
    "dtype": "bfloat16",
}


def test_the_recipes_are_sound() -> None:
    found = evaluate_pair.recipes("org/base", "org/expert", OPTIONS | {"samples": 3})
    assert {content["merge_method"] for content in found.values()} == {"task_arithmetic", "ties", "slerp", "featcal"}
    alone, keeping = (Recipe.parse(yaml.safe_dump(found[name]), name) for name in ("featcal", "featcal-keep"))
    alone.require_sound()
    keeping.require_sound()
    assert alone.keep is None and keeping.keep is not None and keeping.keep.calibration == "b.jsonl"
    assert keeping.keep.template == "{x}\n{y}"


def test_the_table_says_what_is_gained_and_kept() -> None:
    scored = {
        "base": {"math": 0.2, "chat": 0.8},
        "expert": {"math": 0.6, "chat": 0.2},
        "merge": {"math": 0.5, "chat": 0.6},
    }
    *_, base, expert, merge = evaluate_pair.table(scored, ["math"], ["chat"]).splitlines()
    assert base == "| base | 0.200 | 0.800 | 0.00 | 1.00 |"
    assert expert == "| expert | 0.600 | 0.200 | 1.00 | 0.25 |"
    assert merge == "| merge | 0.500 | 0.600 | 0.75 | 0.75 |"


def test_the_score_of_a_task_is_the_first_known_metric() -> None:
    assert evaluate_pair.score("ifeval", {"acc,none": 0.1, "prompt_level_strict_acc,none": 0.4}) == 0.4
