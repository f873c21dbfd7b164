"""mergekit's own commands, as a user runs them, on real input: folders in, a folder that transformers loads out."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mergekit.scripts.run_yaml import main as mergekit_yaml
from support import families, featcal_reference
from support.command import run
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_slta.engine import loop


def loaded(folder: Path) -> Any:
    """A merged model in bfloat16 that transformers loads without complaint."""
    opened: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model, report = opened
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a user has it: models, data and a recipe that names them by relative paths.

    Merges say at each step what they do, where there is no terminal for a bar.
    """
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_LINES", -1)
    family = families.make_family(tmp_path / "work", dtype=torch.bfloat16, experts=2)
    content = families.recipe(family, samples=4, out_dtype="bfloat16", statistics="stats.safetensors")
    content["base_model"] = "./base"
    for index, entry in enumerate(content["models"]):
        entry["model"] = f"./expert{index}"
        entry["parameters"]["calibration"] = f"task{index}.jsonl"
    families.write_recipe(tmp_path / "work" / "recipe.yml", content)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_a_merge_that_transformers_loads(folder: Path) -> None:
    assert "Calibrating attn_mlp" in run("recipe.yml", "merged", program=mergekit_yaml).stderr
    model = loaded(folder / "merged")
    ids = AutoTokenizer.from_pretrained(folder / "merged")("abc 123", return_tensors="pt")["input_ids"]
    assert model(ids).logits.isfinite().all()
    assert "stats.safetensors" in os.listdir(folder)
    assert "slta" in (folder / "merged" / "README.md").read_text()

    weights = {file.name: file.read_bytes() for file in (folder / "merged").glob("*.safetensors")}
    assert "Calibrating" not in run("recipe.yml", "again", "--quiet", program=mergekit_yaml).output
    assert {file.name: file.read_bytes() for file in (folder / "again").glob("*.safetensors")} == weights


def test_a_feature_merge_that_transformers_loads(folder: Path) -> None:
    """In bfloat16, and of the naive reference's float64 tensors no more than the rounding away."""
    recipe = yaml.safe_load((folder / "recipe.yml").read_text()) | {"merge_method": "featcal"}
    recipe["parameters"] = {"samples": 4, "ridge": 0.1, "report": "report"}
    families.write_recipe(folder / "features.yml", recipe)
    assert "Solving" in run("features.yml", "merged", program=mergekit_yaml).output
    model = loaded(folder / "merged")
    data = tuple(folder / f"task{index}.jsonl" for index in range(2))
    family = families.Family(folder / "base", (folder / "expert0", folder / "expert1"), data, model.config)
    base, *experts = family.models()
    expected = featcal_reference.merge(
        base, experts, family.token_ids(samples=4), "llama", families.actmat_state(family)
    )
    for name, tensor in model.state_dict().items():
        assert (tensor.double() - expected[name]).norm() < 2**-8 * expected[name].norm(), name
    assert (folder / "report" / "featcal.html").is_file()
    assert [file.name for file in (folder / "merged" / "mergekit-slta").iterdir()] == ["merge.json"]
    assert "featcal" in (folder / "merged" / "README.md").read_text()
