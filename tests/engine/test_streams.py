"""Hidden states batch by batch are those of a plain model, sample by sample, whatever their lengths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from support import families
from support.families import ORIGINAL_CONTEXT

from mergekit_slta.engine.batches import decoder_batches
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams
from mergekit_slta.layers.ends import logits
from mergekit_slta.layers.trace import trace


class Source:
    """A model in memory, as streams read it."""

    def __init__(self, model: Any) -> None:
        self.state = model.state_dict()

    def read(
        self, names: Mapping[str, str], base_model_prefix: str, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        return {key: self.state[name] for key, name in names.items()}


def stretched(architecture: str, rope_type: str) -> transformers.PretrainedConfig:
    """An architecture's configuration with rotary embeddings that change beyond the original context."""
    head_dim = 16 if architecture == "qwen3" else 8

    def stretch(given: dict[str, Any]) -> dict[str, Any]:
        common = {
            "rope_type": rope_type,
            "rope_theta": given["rope_theta"],
            "factor": 4.0,
            "partial_rotary_factor": 1.0,
        }
        if rope_type == "dynamic":
            return common
        factors = {"short_factor": [1.0] * (head_dim // 2), "long_factor": [2.0] * (head_dim // 2)}
        return common | factors | {"original_max_position_embeddings": ORIGINAL_CONTEXT}

    given = families.config_of(architecture).rope_parameters
    nested = all(isinstance(part, dict) for part in given.values())
    changes = {
        "rope_parameters": {kind: stretch(part) for kind, part in given.items()} if nested else stretch(given),
        "max_position_embeddings": ORIGINAL_CONTEXT if rope_type == "dynamic" else 4 * ORIGINAL_CONTEXT,
    }
    if not architecture.startswith("falcon"):
        changes["head_dim"] = head_dim
    if architecture == "phi3":
        changes["original_max_position_embeddings"] = ORIGINAL_CONTEXT
    return families.config_of(architecture, **changes)


@pytest.mark.parametrize(
    ("architecture", "rope_type"),
    [
        *((name, "dynamic") for name in ("llama", "gemma3", "gpt_neox", "qwen3", "mixtral")),
        *((name, "longrope") for name in ("phi3", "llama", "gemma3")),
    ],
)
@torch.no_grad()
def test_no_sample_sees_the_length_of_another(architecture: str, rope_type: str) -> None:
    """Each sample's hidden states after the last layer are those of a plain model that has run nothing before."""
    model = families.random_model(stretched(architecture, rope_type))
    model.config.architectures = [type(model).__name__]
    decoder = trace(copy.deepcopy(model.config))
    samples = [torch.arange(length).add(5).tolist() for length in (3, 20, 6, 20)]
    batches = decoder_batches(decoder, [samples], 1000, Ranks())
    assert len(batches) == 3
    streams = Streams(decoder, [[Source(model)]], batches)
    for layer in range(len(decoder)):
        weights = {key: model.state_dict()[name] for key, name in decoder.layer_tensors(layer).items()}
        for number in range(len(batches)):
            run = decoder.run(layer, weights, streams.hidden(0, number), streams.call(0, number))
            streams.set_output(0, number, run.output, run.state)
        streams.advance()
    edges = {name: model.state_dict()[name] for name in decoder.edge_tensors}
    for row, states in streams.final():
        expected = copy.deepcopy(model)(torch.tensor([samples[row]]), use_cache=False).logits
        assert torch.allclose(logits(decoder, states[0][None], edges), expected, atol=1e-4)
