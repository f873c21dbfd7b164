"""What waits between layers."""

from __future__ import annotations

import pytest
import torch
from conftest import MakeFamily
from support import families
from torch.utils._pytree import tree_leaves

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, decoder_batches, read_edges
from mergekit_slta.layers.calls import embed, embedding_tensors
from mergekit_slta.layers.decoder import LayerCall
from mergekit_slta.layers.trace import trace

LENGTHS = (19, 23, 23, 11)


def masks(calls: list[LayerCall]) -> list[torch.Tensor]:
    leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
    return [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 2 and len({*leaf.shape[-2:]}) == 1
    ]


@pytest.mark.parametrize(("architecture", "kinds"), [("llama", 0), ("mistral", 1), ("gemma2", 2), ("falcon_alibi", 1)])
def test_the_masks_of_all_batches_and_streams_take_the_memory_of_the_longest(
    architecture: str, kinds: int, make_family: MakeFamily
) -> None:
    family = make_family(architecture, experts=1)
    decoder, models = trace(family.config), families.checkpoints(family.folders)
    tasks = [[[3] * length for length in LENGTHS]] * 2
    batches = decoder_batches(decoder, tasks, 1, Ranks())
    streams = Streams(decoder, [[model] * 2 for model in models], batches)
    memory: dict[int, int] = {}
    for stream, model in enumerate(models):
        edges = read_edges(decoder, model, embedding_tensors(decoder))
        for number, batch in enumerate(batches):
            streams.layer, waiting = 0, []
            for streams.layer in range(len(decoder)):
                waiting.append(streams.call(stream, number))
            expected = masks(embed(decoder, batch.token_ids, edges)[1])
            assert all(map(torch.equal, masks(waiting), expected)) and len(masks(waiting)) == len(expected)
            memory |= {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in masks(waiting)}
    heads = family.config.num_attention_heads if architecture == "falcon_alibi" else 1
    number = 1 if architecture == "mistral" else 4
    assert list(memory.values()) == [number * heads * max(LENGTHS) ** 2] * kinds
