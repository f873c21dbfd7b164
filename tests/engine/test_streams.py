"""Batches hold every sample once, and hidden states batch by batch are those of a plain model, sample by sample."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support import families
from support.families import ORIGINAL_CONTEXT
from transformers import PreTrainedModel

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, decoder_batches, make_batches
from mergekit_slta.layers.calls import logits
from mergekit_slta.layers.trace import trace


@pytest.mark.parametrize("batch_tokens", [1, 30, 64, 10000])
def test_every_sample_is_in_one_batch_of_its_own_task(batch_tokens: int) -> None:
    drawn = random.Random(0)
    tasks = [[[drawn.randint(1, 50) for _ in range(drawn.randint(1, 30))] for _ in range(n)] for n in (9, 1, 5)]
    samples = [(task, ids) for task, found in enumerate(tasks) for ids in found]
    batches = make_batches(tasks, batch_tokens)
    assert len(batches) == {1: len(samples), 10000: len(tasks)}.get(batch_tokens, len(batches))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(samples)))
    for batch in batches:
        assert batch.token_ids.numel() <= batch_tokens or len(batch.rows) == 1
        assert batch.token_ids.shape == (len(batch.rows), max(batch.lengths))
        for row, length, ids in zip(batch.rows, batch.lengths, batch.token_ids, strict=True):
            assert (batch.task, ids[:length].tolist()) == samples[row]


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
