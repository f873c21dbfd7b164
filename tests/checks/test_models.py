"""Quantized checkpoints as transformers reads and writes them: which way out the refusal names, and that it works."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MakeFamily
from safetensors.torch import load_file
from support import families
from support.copies import edit_tensors
from support.examining import edit_config, only, problems
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

BLOCK = 16  # rows and columns that share an FP8 scale
MATRICES = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")


def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        blocks = tensors[name].float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales


def to_mxfp4(tensors: dict[str, torch.Tensor]) -> None:
    """Random numbers in the format: 32 of 4 bits share an exponent of 8, and rows and columns are exchanged."""
    for name in [name for name in tensors if name.endswith(MATRICES[1:])]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)


Quantize = Callable[[dict[str, torch.Tensor]], None]
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}
# Architecture, how its tensors are quantized, what its configuration says then, and transformers' class for that.
FORMATS: dict[str, tuple[str, Quantize, dict[str, Any], type]] = {
    "fp8": ("llama", to_fp8, FP8, FineGrainedFP8Config),
    "mxfp4": ("gpt_oss", to_mxfp4, {"quant_method": "mxfp4"}, Mxfp4Config),
    "fp8 mixture": ("qwen3_moe", to_fp8, FP8, FineGrainedFP8Config),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_way_out_of_8_and_4_bits_is_named_and_leads_out(name: str, make_family: MakeFamily, tmp_path: Path) -> None:
    architecture, quantize, entry, kind = FORMATS[name]
    family = make_family(families.config_of(architecture, intermediate_size=64), dtype=torch.bfloat16)
    recipe, folder = families.recipe(family, "sftm", calibration=False), family.base
    edit_tensors(folder, quantize)
    edit_config(folder, quantization_config=entry)
    assert f"is quantized ({entry['quant_method']}) by its config.json: name the unquantized" in only(recipe)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=kind(dequantize=True))
    assert torch.equal(model.state_dict()["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])
    model.save_pretrained(tmp_path / "right", save_original_format=False)
    recipe["base_model"] = str(tmp_path / "right")
    assert problems(recipe) == []
    state = load_file(families.merge(recipe, tmp_path / "merged") / "model.safetensors")
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in state.values())
