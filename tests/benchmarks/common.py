"""What the benchmarks share: families of random weights on disk, written layer by layer, and their data.

Whatever imports this first finds the modules of examples/ and tests/ too.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, PreTrainedTokenizerFast

from mergekit_slta import files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
VERSIONS = files.versions() | {"peft": version("peft")}
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

VOCABULARY = 2048
CHANGE = 0.02  # of a weight's own size, what an expert changes
RANK = 16
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergekit-slta-benchmarks"

_TINY: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
_LARGE: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}


SHAPES: dict[str, PretrainedConfig] = {
    "60m": LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=6,
        num_hidden_layers=8,
        vocab_size=VOCABULARY,
    ),
    "1b": LlamaConfig(
        **_LARGE | {"hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 128256},
        intermediate_size=8192,
        num_key_value_heads=8,
    ),
    "7b": LlamaConfig(**_LARGE, intermediate_size=11008, num_key_value_heads=32),
    "mixture": MixtralConfig(**_LARGE, intermediate_size=14336, num_key_value_heads=8),
    "tiny": LlamaConfig(**_TINY, intermediate_size=128, vocab_size=VOCABULARY),
}


def write_models(folder: Path, shape: str, experts: int, layers: int = 0, low_rank: Sequence[int] = ()) -> list[Path]:
    """Write a base model and experts with random bfloat16 weights, one shard per layer; returns their folders.

    A model that is there stays. The shape is a key of ``SHAPES``, with all of its layers by default; experts of some
    numbers, from 1, change matrices by a product of rank ``RANK``.
    """
    config, template = SHAPES[shape], _template(folder / "template", SHAPES[shape])
    config = type(config).from_dict(config.to_dict() | {"dtype": "bfloat16"})
    config.num_hidden_layers = layers or config.num_hidden_layers
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    of_layer = {name: shape for name, shape in template.items() if ".layers.0." in name}
    shards = [{name: shape for name, shape in template.items() if name not in of_layer}] + [
        {name.replace(".layers.0.", f".layers.{layer}."): shape for name, shape in of_layer.items()}
        for layer in range(config.num_hidden_layers)
    ]
    models = [folder / "base", *(folder / f"expert{number}" for number in range(experts))]
    for number, target in enumerate(models):
        if (target / "config.json").exists():
            continue
        write_tokenizer(target)
        places: dict[str, str] = {}
        for index, shard in enumerate(shards):
            file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = _random(shard, index, number, number in low_rank)
            save_file(tensors, target / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        config.save_pretrained(target)
    return models


def _template(folder: Path, config: PretrainedConfig) -> dict[str, torch.Size]:
    """The checkpoint's names and shapes of a model with one layer, as transformers saves it."""
    with torch.device("meta"):
        shallow = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 1})
        model = AutoModelForCausalLM.from_config(shallow, dtype=torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(folder, max_shard_size="1TB")
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        shapes = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    shutil.rmtree(folder)
    return shapes


def _random(shapes: dict[str, torch.Size], shard: int, model: int, low_rank: bool) -> dict[str, torch.Tensor]:
    """The tensors of a shard: the base model's, which all models share, and an expert's change."""
    tensors = {}
    for index, (name, shape) in enumerate(shapes.items()):
        if len(shape) < 2:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        generator = torch.Generator().manual_seed(1000 * shard + index)
        value = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if model:
            generator.manual_seed(10**6 * model + 1000 * shard + index)
            sizes = [(shape[0], RANK), (RANK, shape[-1])] if low_rank else [shape]
            factors = [torch.randn(size, generator=generator) for size in sizes]
            change = factors[0] @ factors[1] / RANK**0.5 if low_rank else factors[0]
            value += CHANGE * change / shape[-1] ** 0.5
        tensors[name] = value.bfloat16()
    return tensors


def write_tokenizer(folder: Path) -> None:
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


def known_rows(name: str) -> dict[str, Any]:
    """The rows of a result that an earlier run has written."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def write_result(name: str, rows: Mapping[str, Any], **about: Any) -> None:
    """Write the rows of a table, a note that stands there, and the versions that rows were made with, newest last."""
    path = RESULTS / f"{name}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {"versions": []}
    versions = earlier["versions"] if isinstance(earlier["versions"], list) else [earlier["versions"]]
    versions = [*(made for made in versions if made != VERSIONS), VERSIONS]
    about = {key: earlier[key] for key in ("note",) if key in earlier} | about
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({**about, "versions": versions, "rows": rows}, indent=1) + "\n")


def be_quiet(threads: int = 0) -> None:
    """Keep transformers from saying what it loads, and torch from more threads than some."""
    torch.set_num_threads(threads or torch.get_num_threads())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load(folder: Path, device: str) -> Any:
    """A whole model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device).eval()


def autocast() -> torch.autocast:
    """Training in bfloat16, but not on processors without AVX-512, where it takes a hundred times as long."""
    return torch.autocast("cpu", torch.bfloat16, enabled="AVX512" in torch.backends.cpu.get_cpu_capability())


def mean_state(models: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The mean of models' tensors by their names."""
    states = [model.state_dict() for model in models]
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


def wait_for(device: str) -> None:
    """Go on when the device has done what it was told."""
    if device != "cpu":
        torch.cuda.synchronize()
