"""What the benchmarks share: synthetic families on disk, peak memory, medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mergekit.common import ModelReference
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from mergekit_slta.recipe import CalibrationSettings, Expert, Recipe

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
            _write_tokenizer(target)
    return folders


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def write_samples(folder: Path, tasks: int, samples: int, tokens: int) -> list[Path]:
    """Write each task's calibration file: ``samples`` lines of ``tokens`` random words."""
    generator = torch.Generator().manual_seed(1)
    files = []
    for task in range(tasks):
        file = folder / f"task{task}-{samples}x{tokens}.txt"
        rows = torch.randint(VOCABULARY, (samples, tokens), generator=generator).tolist()
        file.write_text("\n".join(" ".join(f"w{index}" for index in row) for row in rows))
        files.append(file)
    return files


def make_recipe(folders: Sequence[Path], settings: CalibrationSettings) -> Recipe:
    """A recipe of a family with data of random words, ``samples`` records of ``max_tokens`` each."""
    base, *experts = (ModelReference.parse(str(folder)) for folder in folders)
    files = write_samples(CACHE, len(experts), settings.samples, settings.max_tokens)
    chosen = tuple(Expert(reference, str(file)) for reference, file in zip(experts, files, strict=True))
    return Recipe(base, chosen, settings)


class PeakMemory:
    """The largest memory of this process while the block runs, above that at its start, in bytes.

    Args:
        kind: ``RssAnon``, where mapped checkpoint files do not count, or ``VmRSS``, where they do.
    """

    def __init__(self, kind: str = "RssAnon") -> None:
        self.kind = kind

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = memory_of_this_process(self.kind)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, memory_of_this_process(self.kind))

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.peak - self.start


def memory_of_this_process(kind: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"This kernel does not report {kind}")


def timed(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median wall time of each action in seconds; they take turns, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def in_subprocess(script: str, arguments: Sequence[str]) -> dict[str, float]:
    """Run a benchmark file by itself and read the JSON of its last line: memory is measured in a fresh process."""
    command = [sys.executable, script, *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])
