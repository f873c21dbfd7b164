"""Small models of several kinds on disk, encoders among them, and merges of them by mergekit-yaml."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
import yaml
from click.testing import CliRunner, Result
from mergekit.scripts.run_yaml import main as mergekit_yaml
from support import families, merging
from support.calibration_samples import BOS, CHARACTERS, EOS, write_tokenizer
from transformers import AutoTokenizer

from mergekit_slta.host import patches
from mergekit_slta.models.roles import Role

T5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    **{name: lambda name=name: families.config_of(name) for name in ("llama", "mixtral", "gpt2")},  # type: ignore[misc]
    "t5": lambda: transformers.T5Config(**T5),
    "clip_vision": lambda: transformers.CLIPVisionConfig(**families.VISION),
}
Family = tuple[Path, list[Path]]


def role_by_hand(name: str) -> Role:
    return merging.role_by_name(name)


def config_of(key: str) -> transformers.PretrainedConfig:
    config = MODELS[key]()
    config.architectures = [families.model_class(config)._model_mapping[type(config)].__name__]
    return config


def load(key: str, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model from its folder, which has to have all of them and no other."""
    state, report = merging.load(folder)
    assert not any(report.values()), report
    return state


def write_family(key: str, folder: Path) -> Family:
    """A random base model and two experts that differ from it in every tensor, on disk."""
    family = families.make_family(folder, config_of(key))
    return family.base, list(family.experts)


def recipe(method: str, family: Family, *own: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    base, experts = family
    models = [{"model": str(expert)} for expert in experts]
    for entry, more in zip(models, own, strict=False):
        entry["parameters"] = more  # type: ignore[assignment]
    return {
        "merge_method": method,
        "base_model": str(base),
        "models": models,
        "parameters": parameters,
        "dtype": "float32",
    }


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
    """The tensors of a merge by ``run`` of a new family, of its base model and of its experts."""
    base, experts = write_family(key, folder)
    result = run(recipe(method, (base, experts), *own, **parameters), folder)
    assert result.exit_code == 0, result.output
    return [load(key, place) for place in (folder / "merged", base, *experts)]


def run(content: dict[str, Any], folder: Path) -> Result:
    """The stock ``mergekit-yaml`` command in this process, its output in ``folder / "merged"``."""
    patches.install()  # as the start-up file does in a process of its own
    file = folder / "recipe.yml"
    file.write_text(yaml.safe_dump(content))
    options = ["--no-write-model-card", "--no-copy-tokenizer", "--quiet"]
    return CliRunner().invoke(mergekit_yaml, [str(file), str(folder / "merged"), *options])


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
