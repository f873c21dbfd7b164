"""What waits between layers, and between two runs of a layer: it is bounded, and what finds no room runs again."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from support import families
from support.merging import same_tensors
from torch.utils._pytree import tree_leaves

from mergekit_slta.engine import streams as module
from mergekit_slta.engine.streams import Streams, make_batches, read_edges, waiting_bytes
from mergekit_slta.featcal.merge import MERGED, waiting
from mergekit_slta.featcal.regression import RidgeRegression
from mergekit_slta.layers.calls import embed
from mergekit_slta.layers.decoder import LayerCall
from mergekit_slta.layers.trace import trace

LENGTHS = (19, 23, 23, 11)


def masks(calls: list[LayerCall]) -> list[torch.Tensor]:
    leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.ndim > 3 and len({*tensor.shape[-2:]}) == 1]


@pytest.mark.parametrize(("architecture", "kinds"), [("llama", 0), ("mistral", 1), ("gemma2", 2), ("falcon_alibi", 1)])
def test_the_masks_of_all_batches_and_streams_take_the_memory_of_the_longest(
    architecture: str, kinds: int, make_family: MakeFamily
) -> None:
    family = make_family(architecture, experts=1)
    decoder, models = trace(family.config), families.checkpoints(family.folders)
    tasks = [[[3] * length for length in LENGTHS]] * 2
    batches = make_batches(tasks, 1, decoder)
    streams = Streams(decoder, [[model] * 2 for model in models], batches)
    memory: dict[int, int] = {}
    for stream, model in enumerate(models):
        edges = read_edges(decoder, model, decoder.embed_tensors)
        for number, batch in enumerate(batches):
            streams.layer, calls = 0, []
            for streams.layer in range(len(decoder)):
                calls.append(streams.call(stream, number))
            expected = masks(embed(decoder, batch.token_ids, edges)[1])
            assert all(map(torch.equal, masks(calls), expected)) and len(masks(calls)) == len(expected)
            memory |= {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in masks(calls)}
    heads = family.config.num_attention_heads if architecture == "falcon_alibi" else 1
    number = 1 if architecture == "mistral" else 4
    assert list(memory.values()) == [number * heads * max(LENGTHS) ** 2] * kinds


def test_rotary_embeddings_of_a_prompt_as_long_as_a_head_is_wide_are_no_mask(make_family: MakeFamily) -> None:
    family = make_family("gemma2", experts=1)
    decoder, base = trace(family.config), families.checkpoints(family.folders)[0]
    batches = make_batches([[[3] * family.config.head_dim], [[3] * 11]], 1, decoder)
    streams = Streams(decoder, [[base, base]], batches)
    for number, batch in enumerate(batches):
        expected = embed(decoder, batch.token_ids, read_edges(decoder, base, decoder.embed_tensors))[1][0]
        leaves = (tree_leaves((call.args, call.kwargs)) for call in (streams.call(0, number), expected))
        found, wanted = ([leaf for leaf in own if isinstance(leaf, torch.Tensor)] for own in leaves)
        assert len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("room", [0, 40_000])  # all runs again, or some
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gemma4", "llama4"])
def test_a_merge_is_the_same_to_the_last_bit_where_layers_run_again(
    room: int, architecture: str, make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routed experts in both forms, and layers that hand more than hidden states on to later ones."""
    family, taken = make_family(architecture, records=4), [0]
    run_layer = Streams.run_layer

    def watched(self: Streams, *arguments: Any, **settings: Any) -> Any:
        run = run_layer(self, *arguments, **settings)
        taken.append(self._output_bytes)
        return run

    monkeypatch.setattr(Streams, "run_layer", watched)
    families.feature_merge(family, tmp_path / "waiting", batch_tokens=40)
    decoder = trace(family.config)
    batches = make_batches(family.token_ids(), 40, decoder)
    positions, routed = sum(batch.token_ids.numel() for batch in batches), architecture in ("mixtral", "llama4")
    counted = waiting(decoder, positions, longest=0) - waiting_bytes(positions, 32, 4 if routed else 2)
    # A batch that only one of its streams has left behind holds more than is counted of each.
    assert max(taken) > 40_000 and 0.8 * max(taken) < counted <= max(taken) and taken[-1] == 0
    taken.clear()
    monkeypatch.setattr(module, "OUTPUT_BYTES", room)
    families.feature_merge(family, tmp_path / "again", batch_tokens=40)
    assert room / 2 <= max(taken) <= room
    assert same_tensors(*(families.solved_tensors(tmp_path / name) for name in ("waiting", "again")))


def test_nothing_of_a_batch_waits_beside_the_next(
    make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what ``Streams`` holds: neither a layer's run nor what a map was given."""
    run_layer, add, alive = Streams.run_layer, RidgeRegression._add, list[weakref.ref[Any]]()

    def watched(self: Streams, stream: int, *arguments: Any, **settings: Any) -> Any:
        if stream == MERGED:
            assert all(reference() is None for reference in alive)
            alive.clear()
        run = run_layer(self, stream, *arguments, **settings)
        alive.append(weakref.ref(run))
        return run

    def added(self: RidgeRegression, inputs: torch.Tensor, *others: Any) -> None:
        alive.append(weakref.ref(inputs))
        add(self, inputs, *others)

    monkeypatch.setattr(Streams, "run_layer", watched)
    monkeypatch.setattr(RidgeRegression, "_add", added)
    families.feature_merge(make_family("llama", records=4), tmp_path, batch_tokens=40)
