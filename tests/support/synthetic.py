"""Statistics without models: Gram matrices of feature deltas that a test chooses."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.slta import weights as of_decoder
from mergekit_slta.slta.solver import SubmoduleSolution
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.statistics_file import BaseContent, CalibrationInfo, Fingerprint, Info

# Submodules of one layer, by level.
INSIDE: dict[str, Sequence[str]] = {
    "layer": ("",),
    "attn_mlp": (".attn", ".mlp"),
    "head_mlp": (".head.0", ".head.1", ".mlp"),
    "linear": (".self_attn.q_proj", ".mlp.experts.0.down_proj", ".mlp.experts.1.down_proj"),
}


def submodules(levels: Sequence[str], layers: int) -> list[str]:
    """The canonical names of the levels' submodules, each once."""
    names = ["model"] if "model" in levels else []
    inside = [inside for level in levels if level != "model" for inside in INSIDE[level]]
    return names + list(dict.fromkeys(f"layer.{layer}{name}" for layer in range(layers) for name in inside))


def random_grams(experts: int, samples: int, seed: int = 0) -> torch.Tensor:
    """[experts * samples, T, T]; an expert changes features most on its own data, and all have a part in common."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(experts, 12, generator=generator, dtype=torch.float64)
    common = torch.randn(12, generator=generator, dtype=torch.float64)
    grams = []
    for task in range(experts):
        for _ in range(samples):
            noise = torch.randn(experts, 12, generator=generator, dtype=torch.float64)
            deltas = own + 0.5 * common + noise
            deltas[task] *= 2
            grams.append(deltas @ deltas.T)
    stacked = torch.stack(grams)
    return (stacked + stacked.mT) / 2


def statistics(
    models: Sequence[str] = ("org/llama-math", "org/llama-code", "org/llama-chat"),
    levels: Sequence[str] = ("attn_mlp",),
    *,
    layers: int = 3,
    samples: int = 4,
    grams: Mapping[str, torch.Tensor] | Callable[[str, int], torch.Tensor] | None = None,
    **described: Any,
) -> Statistics:
    """Statistics of some experts; ``described`` are other entries of the metadata than ``info``'s.

    ``grams`` are the submodules' [T * samples, T, T], or what gives them by name and number; random by default.
    """
    names = submodules(levels, layers)
    if grams is None:
        grams = {name: random_grams(len(models), samples, seed) for seed, name in enumerate(names)}
    elif not isinstance(grams, Mapping):
        grams = {name: grams(name, number) for number, name in enumerate(names)}
    task = torch.arange(len(models)).repeat_interleave(samples)
    return Statistics(dict(grams), task, torch.full_like(task, 7), info(models, levels, layers, samples, **described))


def info(models: Sequence[str], levels: Sequence[str], layers: int, samples: int, **described: Any) -> Info:
    """The metadata of statistics that nobody measured."""
    hashes = [f"{index:064x}" for index in range(len(models))]
    settings: dict[str, Any] = {"samples": samples, "max_tokens": 512, "seed": 0}
    settings |= {name: described.pop(name) for name in settings if name in described}
    return Info(
        format_version=2,
        levels=tuple(levels),
        base_model="org/llama",
        models=tuple(models),
        calibration=tuple(
            CalibrationInfo(source=f"task{index}.jsonl", template="", sha256=digest)
            for index, digest in enumerate(hashes)
        ),
        **settings,
        inputs="base",
        architecture="LlamaForCausalLM",
        num_layers=layers,
        dtype="float32",
        versions={"mergekit-slta": "0.1.0"},
        fingerprint=Fingerprint(
            base=BaseContent(tensors="b" * 64, config={}),
            experts=tuple(f"{index}" * 64 for index in range(len(models))),
        ),
    ).model_copy(update=described)


def random_alpha(decoder: Decoder, level: str) -> dict[str, torch.Tensor]:
    """Merging weights of two experts for all submodules of a decoder at a level."""
    names = [name for layer in range(len(decoder)) for name in of_decoder.submodules(decoder, level, layer)]
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(2, generator=generator, dtype=torch.float64) for name in names or ["model"]}


def solutions(alpha: Mapping[str, torch.Tensor]) -> dict[str, SubmoduleSolution]:
    """Merging weights [T] of submodules as if they had been solved for, every expert changing all features."""
    solved = {}
    for name, weights in alpha.items():
        ones = torch.ones_like(weights)
        solved[name] = SubmoduleSolution(weights, ones, ones, math.nan, len(weights), ones.bool())
    return solved


def same(first: Statistics, second: Statistics) -> bool:
    return (
        first.info == second.info
        and torch.equal(first.task, second.task)
        and torch.equal(first.tokens, second.tokens)
        and first.grams.keys() == second.grams.keys()
        and all(torch.equal(first.grams[name], second.grams[name]) for name in second.grams)
    )
