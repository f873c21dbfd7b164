"""mergekit's own commands, as a user runs them, on real input: folders in, a folder that transformers loads out."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.scripts.merge_raw_pytorch import main as mergekit_pytorch
from mergekit.scripts.run_yaml import main as mergekit_yaml
from support import families, featcal_reference
from support.copies import edit_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer


def is_installed() -> bool:
    try:
        return bool(importlib.metadata.distribution("mergekit-slta"))
    except importlib.metadata.PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not is_installed(), reason="mergekit finds the plugin only where it is installed")


def run(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run mergekit-yaml in a folder."""
    script = Path(sysconfig.get_path("scripts")) / "mergekit-yaml"
    elsewhere = [sys.executable, "-c", "from mergekit.scripts.run_yaml import main; main()"]
    program = [str(script)] if script.exists() else elsewhere  # mergekit may be seen from another environment
    return subprocess.run([*program, *map(str, arguments)], cwd=folder, capture_output=True, text=True)


def loaded(folder: Path) -> Any:
    """A merged model in bfloat16 that transformers loads without complaint."""
    opened: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model, report = opened
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a user has it: models, data and a recipe that names them by relative paths."""
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
    done = run("recipe.yml", "merged", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "Calibrating attn_mlp" in done.stderr
    model = loaded(folder / "merged")
    ids = AutoTokenizer.from_pretrained(folder / "merged")("abc 123", return_tensors="pt")["input_ids"]
    assert model(ids).logits.isfinite().all()
    assert "stats.safetensors" in os.listdir(folder)
    assert "slta" in (folder / "merged" / "README.md").read_text()

    weights = {file.name: file.read_bytes() for file in (folder / "merged").glob("*.safetensors")}
    quiet = CliRunner().invoke(mergekit_yaml, ["recipe.yml", "again", "--quiet"])
    assert quiet.exit_code == 0, quiet.output
    assert "Calibrating" not in quiet.output
    assert {file.name: file.read_bytes() for file in (folder / "again").glob("*.safetensors")} == weights


def test_a_feature_merge_that_transformers_loads(folder: Path) -> None:
    """In bfloat16, and of the naive reference's float64 tensors no more than the rounding away."""
    recipe = yaml.safe_load((folder / "recipe.yml").read_text()) | {"merge_method": "featcal"}
    recipe["parameters"] = {"samples": 4, "anchor": "base", "ridge": 0.003, "report": "report", "scratch": "scratch"}
    families.write_recipe(folder / "features.yml", recipe)
    done = CliRunner().invoke(mergekit_yaml, ["features.yml", "merged"])
    assert done.exit_code == 0, done.output
    assert "Solving" in done.output
    model = loaded(folder / "merged")
    data = tuple(folder / f"task{index}.jsonl" for index in range(2))
    family = families.Family(folder / "base", (folder / "expert0", folder / "expert1"), data, model.config)
    base, *experts = family.models()
    expected = featcal_reference.merge(base, experts, family.token_ids(samples=4), "llama")
    for name, tensor in model.state_dict().items():
        assert (tensor.double() - expected[name]).norm() < 2**-8 * expected[name].norm(), name
    assert (folder / "report" / "featcal.html").is_file()
    assert not list((folder / "scratch").iterdir())
    assert "featcal" in (folder / "merged" / "README.md").read_text()


def test_a_broken_checkpoint_ends_it_in_one_sentence_without_output(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.gate_proj.weight"][0, 0] = torch.nan

    edit_tensors(folder / "expert1", spoil)
    done = CliRunner().invoke(mergekit_yaml, ["recipe.yml", "merged"])
    assert done.exit_code == 1
    errors = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert errors == [
        "Error: ./expert1 holds NaN or Inf in the tensor model.layers.1.mlp.gate_proj.weight: "
        "the checkpoint is broken, get a sound copy."
    ]
    assert isinstance(done.exception, SystemExit)
    assert list(folder.rglob("merged/*.safetensors")) == []


def test_mergekit_pytorch_is_refused_in_one_sentence(folder: Path) -> None:
    text = (folder / "recipe.yml").read_text()
    for name in ("base", "expert0", "expert1"):
        shutil.move(folder / name / "model.safetensors", folder / f"{name}.safetensors")
        text = text.replace(f"./{name}\n", f"./{name}.safetensors\n")
    (folder / "recipe.yml").write_text(text)
    done = CliRunner().invoke(mergekit_pytorch, ["recipe.yml", "merged.safetensors"])
    assert done.exit_code == 1
    assert "Error: 'slta'" in done.output
    assert "mergekit-yaml" in done.output
    assert isinstance(done.exception, SystemExit)
    assert not [path for path in (folder / "merged.safetensors").rglob("*") if path.is_file()]
