"""Merges of small models of several kinds, encoders among them, and a model that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from support import families, merging
from support.calibration_samples import BOS, CHARACTERS, EOS, write_tokenizer
from transformers import AutoTokenizer

config_of = families.config_of
role_by_hand = merging.role_by_name
MODELS = ("llama", "mixtral", "gpt2", *families.ENCODERS)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model from its folder, which has to have all of them and no other."""
    state, report = merging.load(folder)
    assert not any(report.values()), report
    return state


def as_stored(
    name: str, tensors: Sequence[torch.Tensor], merged: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """What a function makes of the base model's tensor and the experts', cut as checkpoints store them.

    A mixture's gate and up projections are one tensor of the model, and two of the checkpoint.
    """
    cuts = [tensor.chunk(2, 1) if name.endswith("gate_up_proj") else (tensor,) for tensor in tensors]
    found = [merged(first, others) for first, *others in zip(*cuts, strict=True)]
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def merge(
    key: str, method: str, folder: Path, *own: dict[str, Any], **parameters: Any
) -> list[dict[str, torch.Tensor]]:
    """The tensors of a merge of a new family, of its base model and of its experts, each with parameters of its own."""
    family = families.make_family(folder, key)
    content = families.recipe(family, method, calibration=False, **parameters)
    for entry, more in zip(content["models"], own, strict=False):
        entry["parameters"] = more
    return [load(place) for place in (families.merge(content, folder / "merged"), *family.folders)]


# Characters are tokens, so that a model's answers are tokenized as it produced them.
LETTERS: dict[str, Any] = {"vocab_size": 3 + len(CHARACTERS), "bos_token_id": BOS, "eos_token_id": EOS}


def write_scripted(folder: Path, script: Sequence[int], template: str | None, *, adds_end: bool = True) -> Path:
    """A GPT-2 that looks at positions alone: after ``i`` tokens, whatever they are, it says token ``i`` of a script."""
    size: int = LETTERS["vocab_size"]
    config = transformers.GPT2Config(n_embd=size, n_layer=1, n_head=1, **LETTERS)
    model: Any = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.eye(size))  # the head's weight, too
        model.transformer.wpe.weight[: len(script) - 1].copy_(9 * torch.eye(size)[list(script[1:])])
        model.transformer.ln_f.weight.fill_(1)
    model.save_pretrained(folder)
    write_tokenizer(folder, template)
    if not adds_end:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        only_begins = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        tokenizer.backend_tokenizer.post_processor = only_begins
        tokenizer.save_pretrained(folder)
    return folder
