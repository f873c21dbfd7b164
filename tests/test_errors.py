"""What becomes of errors that nobody has explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import families, memory
from support.calibration_samples import write_jsonl
from support.command import run
from support.families import Family


@pytest.mark.parametrize(
    ("command", "where"),
    [
        ("ask", "transformers.LlamaForCausalLM.from_pretrained"),
        ("merge", "mergekit_slta.host.methods.merged_task"),
    ],
)
def test_a_lack_of_memory_is_said_and_blames_no_file(
    command: str, where: str, llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **settings: Any) -> Any:
        raise memory.torch_without_memory()

    monkeypatch.setattr(where, full)
    recipe = families.write_recipe(tmp_path / "recipe.yml", families.recipe(llama, "actmat", calibration=False))
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    arguments = {
        "ask": [llama.base, prompts, "--max-new-tokens", 2, "-o", tmp_path / "answers.jsonl"],
        "merge": [recipe, tmp_path / "out"],
    }
    said = run(command, *arguments[command], "--quiet", code=1).output.splitlines()[-1]
    assert said.startswith("Error: Memory ran out ([enforce fail at") and "merge fewer experts" in said
