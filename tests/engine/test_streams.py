"""Hidden states batch by batch are those of a plain model, sample by sample, whatever their lengths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support import families
from support.families import ORIGINAL_CONTEXT
from transformers import PreTrainedModel

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, decoder_batches
from mergekit_slta.layers.calls import logits
from mergekit_slta.layers.trace import trace


class Source:
    """A model in memory, as streams read it."""

    def __init__(self, model: Any) -> None:
        self.state = model.state_dict()

    def read(
        self, names: Mapping[str, str], model: PreTrainedModel, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        return {key: self.state[name] for key, name in names.items()}


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL_CONTEXT}),
        ("phi3_longrope", {}),
        (
            "gemma3",
            {
                "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC},
                "max_position_embeddings": ORIGINAL_CONTEXT,
            },
        ),
    ],
    ids=["llama", "phi3", "gemma3"],
)
@torch.no_grad()
def test_no_sample_sees_the_length_of_another(architecture: str, changes: dict[str, Any]) -> None:
    """Each sample's hidden states after the last layer are those of a plain model that has run nothing before."""
    model = families.random_model(families.config_of(architecture, **changes))
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
