"""The streamed measurement: what must not change it, what it reads, and its memory.

Its numbers on every architecture are those of tests/test_architectures.py.
"""

import re
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from safetensors.torch import load_file
from support import families, memory, reference
from support.copies import edit_tensors
from support.families import LAYERS, ORIGINAL_CONTEXT, Family
from support.processes import in_a_process
from support.reference import largest_difference
from support.rounding import gram_rounding

from mergekit_slta.engine.loop import pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import trace
from mergekit_slta.slta.grams import Calibration

LEVELS = ("layer", "attn_mlp")

Grams = dict[str, torch.Tensor]


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
SHORT = {"max_position_embeddings": ORIGINAL_CONTEXT}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma4", {"use_bidirectional_attention": "all"}),
        ("llama", {"is_causal": False}),
        ("phi3_longrope", {}),
        ("llama", SHORT | {"rope_parameters": DYNAMIC}),
        ("gemma3", SHORT | {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}}),
    ],
)
def test_no_sample_sees_the_padding_or_the_length_of_another(
    architecture: str, changes: dict[str, Any], make_family: MakeFamily
) -> None:
    """Where tokens see later ones, and where rotary embeddings depend on the longest sample."""
    family = make_family(families.config_of(architecture, **changes), longest=30)
    grams = families.measure(family, "layer")
    expected = reference.deltas(family.models(), family.token_ids(), "layer", reference.SPLITS[architecture])
    assert largest_difference(grams, {name: deltas.grams() for name, deltas in expected.items()}) < gram_rounding()


def test_every_tensor_is_read_once(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, stock = Counter[tuple[Path, str]](), LazyTensorLoader.get_tensor

    def counted(self: LazyTensorLoader, key: str, *arguments: Any, **named: Any) -> torch.Tensor | None:
        counts[Path(self.index.base_path), key] += 1
        return stock(self, key, *arguments, **named)

    monkeypatch.setattr(LazyTensorLoader, "get_tensor", counted)
    families.measure(llama, *LEVELS)
    layers = {name for name in load_file(llama.base / "model.safetensors") if ".layers." in name}
    for expert in llama.experts:
        assert {key: count for (folder, key), count in counts.items() if folder == expert} == dict.fromkeys(layers, 1)
    assert all(counts[llama.base, name] == 1 for name in layers)
    assert counts[llama.base, "model.embed_tokens.weight"] in (1, 2)


def test_features_that_overflow_are_refused(make_family: MakeFamily) -> None:
    family = make_family(experts=2)

    def enlarge(tensors: Grams) -> None:
        for name in ("up_proj", "down_proj"):
            tensors[f"model.layers.1.mlp.{name}.weight"] *= 1e30

    edit_tensors(family.experts[1], enlarge)
    for level, name in {"attn_mlp": "layer.1.mlp", "layer": "layer.1", "model": "model"}.items():
        with pytest.raises(SltaError, match=re.escape(f"The features of {family.experts[1]} at {name} are not finite")):
            families.measure(family, level)


@pytest.fixture(params=[torch.OutOfMemoryError("no memory left"), memory.torch_without_memory(), MemoryError()])
def small_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device on which more than 40 token positions do not fit; collects the positions that were tried."""
    tried: list[int] = []
    run = Decoder.run

    def limited(self: Decoder, layer: int, weights: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = hidden.shape[0] * hidden.shape[1]
        if layer == 1:
            tried.append(positions)
            if positions > 40:
                raise request.param
        return run(self, layer, weights, hidden, *args, **kwargs)

    monkeypatch.setattr(Decoder, "run", limited)
    return tried


def test_batches_are_halved_until_they_fit_and_one_sample_that_does_not_is_an_error(
    small_memory: list[int], llama: Family
) -> None:
    halved = families.measure(llama, *LEVELS)
    assert max(small_memory) > 40 >= small_memory[-1]
    assert largest_difference(halved, families.measure(llama, *LEVELS, batch_tokens=1)) < gram_rounding()
    large = "a layer of 4 models, the hidden states of all prompts and a batch of 60 token positions: "
    with pytest.raises(SltaError, match=re.escape(large) + ".*'samples'.*'max_tokens'"):
        families.measure(llama, *LEVELS, tasks=[[[3] * 60], [[3] * 10], [[4] * 10]])


# Memory


def peak_of_measuring(little: Family, large: Family) -> int:
    """Bytes that measuring the large family takes at most, above what measuring the little one leaves."""
    tasks = [[[3 + (i * j) % 50 for i in range(16)] for j in range(4 * task + 1, 4 * task + 5)] for task in range(2)]
    families.measure(little, "linear", "attn_mlp", tasks=tasks)
    return memory.peak_of(lambda: families.measure(large, "linear", "attn_mlp", tasks=tasks))


@memory.needs_account
def test_memory_does_not_grow_with_the_number_of_routed_experts(
    make_family: MakeFamily, forks: ForkServerContext
) -> None:
    """In mixtures whose layers outweigh all else: one of few experts, and one of as many as make a stack of 16 MiB."""
    width, stack, peaks = 256, 2**24, list[int]()  # in float32
    for experts in (4, stack // (4 * 3 * width**2)):
        sizes = {"hidden_size": width, "intermediate_size": width, "num_local_experts": experts}
        family = make_family(families.config_of("mixtral", **sizes, num_hidden_layers=1), dtype=torch.bfloat16)
        peaks.append(in_a_process(forks, peak_of_measuring, make_family(), family))
    print(f"peaks {[peak / 2**20 for peak in peaks]} MiB, {stack / 2**20} MiB for the experts of one model's layer")
    assert peaks[1] < peaks[0] + stack  # all models' experts would add more than three of these


def test_layers_that_an_expert_leaves_as_they_are_do_not_run_for_it(
    make_family: MakeFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by content; what runs for it is the branch that it changes, in a layer that it changes."""
    family = make_family(experts=2, records=2, touch=lambda name: f"layers.{LAYERS - 1}.self_attn" in name)
    ran, run = [0] * LAYERS, Decoder.run

    def counting(self: Decoder, layer: int, *arguments: Any, **more: Any) -> Any:
        ran[layer] += 1
        return run(self, layer, *arguments, **more)

    arguments = trace(family.config), families.checkpoints(family.folders), family.token_ids(), Ranks(), ["attn_mlp"]
    pass_layers(Calibration(*arguments))  # finds out what it needs to know about the layers
    monkeypatch.setattr(Decoder, "run", counting)
    pass_layers(Calibration(*arguments))
    batches = 2
    assert ran == [batches] * (LAYERS - 1) + [3 * batches]
