"""What the benchmarks share: synthetic families on disk, and their data.

Whatever imports this finds the modules of tests/ too, such as the meter of peak memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from mergekit_slta.recipe.recipe import Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Hidden size, MLP size, heads, key/value heads, layers: Llama's proportions.
SHAPES = {
    "20m": (512, 1408, 8, 4, 6),
    "60m": (768, 2048, 12, 6, 8),
    "150m": (1024, 2816, 16, 8, 12),
    "350m": (1024, 2816, 16, 8, 28),
    "7b": (4096, 11008, 32, 32, 32),
}
VOCABULARY = 2048
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergekit-slta-benchmarks"


def make_family(folder: Path, size: str, experts: int, layers: int = 0, dtype: str = "bfloat16") -> list[Path]:
    """Write a base model and its experts with random weights, once; returns their folders, the base model's first."""
    hidden, inner, heads, groups, depth = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_hidden_layers=layers or depth,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
    )
    root = folder / f"{size}-{config.num_hidden_layers}-{dtype}"
    folders = [root / "base", *(root / f"expert{number}" for number in range(experts))]
    torch.manual_seed(0)
    for number, target in enumerate(folders):
        if not (target / "config.json").exists():
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            if number:
                model.load_state_dict(AutoModelForCausalLM.from_pretrained(folders[0], dtype="auto").state_dict())
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
            model.save_pretrained(target)
            write_tokenizer(target)
    return folders


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def write_samples(folder: Path, tasks: int, samples: int, tokens: int) -> list[Path]:
    """Write each task's calibration file: ``samples`` lines of ``tokens`` random words."""
    generator = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for task in range(tasks):
        file = folder / f"task{task}-{samples}x{tokens}.txt"
        rows = torch.randint(VOCABULARY, (samples, tokens), generator=generator).tolist()
        file.write_text("\n".join(" ".join(f"w{index}" for index in row) for row in rows))
        files.append(file)
    return files


def make_recipe(folders: Sequence[Path], method: str, samples: int, max_tokens: int, **parameters: Any) -> Recipe:
    """A recipe of a family with data of random words, ``samples`` records of ``max_tokens`` each."""
    base, *experts = folders
    files = write_samples(CACHE, len(experts), samples, max_tokens)
    models = [
        {"model": expert, "parameters": {"calibration": file}} for expert, file in zip(experts, files, strict=True)
    ]
    settings = {"samples": samples, "max_tokens": max_tokens, **parameters}
    content = {"merge_method": method, "base_model": base, "models": models, "parameters": settings}
    return Recipe(content | {"dtype": "float32"})


def be_quiet() -> None:
    """Keep transformers from saying what it loads."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load(folder: Path, device: str) -> Any:
    """A whole model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device).eval()


def wait_for(device: str) -> None:
    """Go on when the device has done what it was told."""
    if device != "cpu":
        torch.cuda.synchronize()
