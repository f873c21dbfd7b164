"""Random LoRA adapters on disk, as peft writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from support.families import model_class
from transformers import AutoConfig

RANK = 2


def write_adapter(
    base: Path, folder: Path, *targets: str, seed: int = 0, alpha: int = 4, parameters: Sequence[str] = (), **more: Any
) -> Path:
    """Write a LoRA of a base model's maps; returns its folder.

    Args:
        base: the base model's folder.
        folder: the adapter's.
        targets: the last parts of the maps' names; the query projections by default, unless there are parameters.
        seed: decides its matrices, none of which is zero.
        alpha: ``RANK`` times what their product counts by.
        parameters: the last parts of the names of parameters to adapt, such as those of fused experts.
        more: other settings of the LoRA.
    """
    model = model_class(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype=torch.float32)
    modules = list(targets) or ([] if parameters else ["q_proj"])
    config = peft.LoraConfig(
        r=RANK, lora_alpha=alpha, target_modules=modules, target_parameters=list(parameters), **more
    )
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(folder))
    return folder
