"""What the methods refuse inside mergekit, and what they never write."""

from __future__ import annotations

from pathlib import Path

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
    ("method", "role", "tensor"),
    [
        ("slta", "base", "model.layers.2.mlp.down_proj.weight"),
        ("slta", "expert", "model.layers.0.input_layernorm.weight"),
        ("featcal", "expert", "model.embed_tokens.weight"),
    ],
)
def test_what_is_not_finite_is_refused_before_any_output(
    method: str, role: str, tensor: str, llama: Family, tmp_path: Path
) -> None:
    content = families.recipe(llama, method)
    if role == "base":
        content["base_model"] = str(spoiled(llama.base, tmp_path / "spoiled", tensor))
    else:
        content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", tensor))
    with pytest.raises(SltaError, match=f"spoiled holds NaN or Inf in the tensor {tensor}"):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


@pytest.mark.parametrize("level", ["model", "layer"])
def test_what_is_not_finite_outside_the_layers_gets_into_no_output(level: str, llama: Family, tmp_path: Path) -> None:
    """The experts' heads are not read by the measurement: where they matter, they are refused when they are merged."""
    content = families.recipe(llama, level=level)
    content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", "lm_head.weight"))
    out = tmp_path / "out"
    if level == "model":
        with pytest.raises(SltaError, match=r"lm_head\.weight"):
            families.merge(content, out)
        assert list(out.glob("*.safetensors")) == []
    else:
        assert torch.equal(
            merged_state(families.merge(content, out))["lm_head.weight"], merged_state(llama.base)["lm_head.weight"]
        )


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
