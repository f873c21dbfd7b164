"""What the methods refuse inside mergekit, and what they never write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from mergekit.merge_methods import merge_tensors
from mergekit.scripts import merge_raw_pytorch
from support import families
from support.copies import edited
from support.families import Family
from support.merging import State, merged_state, spoiled

from mergekit_slta.errors import SltaError


@pytest.mark.parametrize(
    ("method", "level", "spoilt", "tensor"),
    [
        ("slta", "attn_mlp", 0, "model.layers.2.mlp.down_proj.weight"),
        ("slta", "attn_mlp", 2, "model.layers.0.input_layernorm.weight"),
        ("slta", "model", 2, "lm_head.weight"),
        ("featcal", None, 2, "model.embed_tokens.weight"),
        ("featcal", None, 2, "lm_head.weight"),
    ],
)
def test_what_is_not_finite_is_refused_before_any_output(
    method: str, level: str | None, spoilt: int, tensor: str, llama: Family, tmp_path: Path
) -> None:
    """``spoilt`` is 0 for the base model, or an expert's number."""
    settings: dict[str, Any] = {"level": level} if level else {}
    content = families.recipe(llama, method, **settings)
    entry, key = (content["models"][spoilt - 1], "model") if spoilt else (content, "base_model")
    entry[key] = str(spoiled(llama.folders[spoilt], tmp_path / "spoiled", tensor))
    with pytest.raises(SltaError, match=f"spoiled holds NaN or Inf in the tensor {tensor}"):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


def test_what_an_expert_holds_outside_the_layers_gets_into_no_output_at_other_levels(
    llama: Family, tmp_path: Path
) -> None:
    content = families.recipe(llama, level="layer")
    content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", "lm_head.weight"))
    merged = merged_state(families.merge(content, tmp_path / "out"))
    assert torch.equal(merged["lm_head.weight"], merged_state(llama.base)["lm_head.weight"])


# What the base model's output head holds -> what is said of it; no calibration looks at it.
TOO_LARGE = {
    "infinite": (torch.inf, r"(?=.*lm_head\.weight)(?=.*base).* NaN or "),
    "too large for float16": (1e5, "The merged tensor 'lm_head.weight' is not finite as float16.*out_dtype: bfloat16"),
}


@pytest.mark.parametrize("case", TOO_LARGE)
@pytest.mark.parametrize("method", ["slta", "featcal", "sftm"])
def test_a_merged_tensor_that_is_not_finite_is_never_written(
    method: str, case: str, llama: Family, tmp_path: Path
) -> None:
    value, words = TOO_LARGE[case]

    def enlarge(tensors: State) -> None:
        tensors["lm_head.weight"][-1, -1] = value

    content = families.recipe(llama, method, calibration=method != "sftm", out_dtype="float16")
    content["base_model"] = str(edited(llama.base, tmp_path / "base", enlarge))
    for index, entry in enumerate(content["models"] if case != "infinite" else ()):  # featcal averages the experts'
        entry["model"] = str(edited(llama.experts[index], tmp_path / f"expert{index}", enlarge))
    with pytest.raises(SltaError, match=words):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


def test_mergekit_pytorch_is_refused_in_words(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama)
    files = {str(folder): str(folder / "model.safetensors") for folder in llama.folders}
    content["base_model"] = files[content["base_model"]]
    for entry in content["models"]:
        entry["model"] = files[entry["model"]]
    path = families.write_recipe(tmp_path / "recipe.yml", content)
    done = CliRunner().invoke(merge_raw_pytorch.main, [str(path), str(tmp_path / "out.safetensors")])
    assert done.exit_code == 1
    assert "mergekit-yaml" in done.output
    assert "Traceback" not in done.output
    assert not [path for path in (tmp_path / "out.safetensors").rglob("*") if path.is_file()]


def test_single_tensors_are_refused_in_words() -> None:
    base, expert = torch.zeros(2, 2), torch.ones(2, 2)
    with pytest.raises(SltaError, match="'slta' measures whole models.*mergekit-yaml"):
        merge_tensors([base, expert], method="slta", base_index=0, parameters={"calibration": ["a.jsonl"]})
