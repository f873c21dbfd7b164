"""The example that merges a pair of models and scores the merges, on the quickstart's family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import evaluate_pair
import pytest
import yaml
from click.testing import CliRunner
from family import TASKS, copy_shipped, held_out_prompts

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
    assert base == "| base | 0.200 | 0.800 | 0% | 100% |"
    assert expert == "| expert | 0.600 | 0.200 | 100% | 25% |"
    assert merge == "| merge | 0.500 | 0.600 | 75% | 75% |"


def test_the_score_of_a_task_is_the_first_known_metric() -> None:
    assert evaluate_pair.score("ifeval", {"acc,none": 0.1, "prompt_level_strict_acc,none": 0.4}) == 0.4


def write_tasks(folder: Path) -> Path:
    """The family's tasks for lm-evaluation-harness, from local files."""
    folder.mkdir(parents=True)
    for name, task in TASKS.items():
        lines = [
            {"question": f"<bos>{prompt}=", "answer": task.answer(prompt)} for prompt in held_out_prompts(name, 200)
        ]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        content = {
            "task": f"family_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.mark.slow
def test_a_pair_from_the_merges_to_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs, an interrupted run goes on, and a merged model's scores are those of its own predictions."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    family = copy_shipped(tmp_path / "family")
    keep = tmp_path / "keep.jsonl"
    keep.write_text("".join(family.calibration[task].read_text() for task in ("strings", "words")))
    arguments = [
        *(str(family.base), str(family.experts["sums"]), "--out", str(tmp_path / "pair")),
        *("--calibration", str(family.calibration["sums"]), "--keep", str(keep), "--dtype", "float32"),
        *("--gained", "family_sums", "--kept", "family_strings", "--kept", "family_words"),
        *("--tasks", str(write_tasks(tmp_path / "tasks")), "--batch-size", "64", "--limit", "60", "--keep-models"),
    ]
    done = CliRunner().invoke(evaluate_pair.main, arguments)
    assert done.exit_code == 0, done.output
    scored = json.loads((tmp_path / "pair" / "results.json").read_text())
    assert len(scored) == 9 and all(len(row) == 3 for row in scored.values())
    shutil.rmtree(tmp_path / "pair" / "merged")
    again = CliRunner().invoke(evaluate_pair.main, arguments)
    assert again.exit_code == 0 and not (tmp_path / "pair" / "merged").exists()
    assert again.stdout == done.stdout == (tmp_path / "pair" / "table.md").read_text()
