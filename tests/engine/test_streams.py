"""How samples are put together into batches."""

import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from support import families
from support.families import ORIGINAL_CONTEXT, Family

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, decoder_batches, fitting_batch, make_batches, of_rank, share
from mergekit_slta.layers.ends import logits
from mergekit_slta.layers.trace import trace


@pytest.fixture
def tasks() -> list[list[list[int]]]:
    drawn = random.Random(0)
    return [[[drawn.randint(1, 50) for _ in range(drawn.randint(1, 30))] for _ in range(n)] for n in (9, 1, 5)]


@pytest.mark.parametrize("batch_tokens", [1, 30, 64, 10000])
def test_every_sample_is_in_one_batch_of_its_own_task(tasks: list[list[list[int]]], batch_tokens: int) -> None:
    samples = [(task, ids) for task, found in enumerate(tasks) for ids in found]
    batches = make_batches(tasks, batch_tokens)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(samples)))
    for batch in batches:
        assert batch.token_ids.numel() <= batch_tokens or len(batch.rows) == 1
        assert batch.token_ids.shape == (len(batch.rows), max(batch.lengths))
        for row, length, ids in zip(batch.rows, batch.lengths, batch.token_ids, strict=True):
            task, expected = samples[row]
            assert task == batch.task
            assert ids[:length].tolist() == expected


def test_batches_are_as_large_as_may_be(tasks: list[list[list[int]]]) -> None:
    assert len(make_batches(tasks, 10000)) == len(tasks)
    assert len(make_batches(tasks, 1)) == sum(map(len, tasks))


def test_leaving_a_task_out_leaves_the_other_batches_as_they_are(tasks: list[list[list[int]]]) -> None:
    full = [batch for batch in make_batches(tasks, 64) if batch.task != 1]
    part = make_batches([tasks[0], tasks[2]], 64)
    assert len(full) == len(part)
    assert all(torch.equal(one.token_ids, other.token_ids) for one, other in zip(full, part, strict=True))


@pytest.mark.parametrize(
    ("architecture", "widest", "tokens"),
    [("llama", 64, 2048), ("llama", 8192, 512), ("llama", 2**17, 256), ("mixtral", 8192, 2048)],
)
def test_wide_layers_run_on_fewer_tokens_unless_they_read_a_mixtures_experts_again(
    architecture: str, widest: int, tokens: int
) -> None:
    assert fitting_batch(families.skeleton(architecture, intermediate_size=widest)) == tokens


@pytest.mark.parametrize("batch_tokens", [0, 40])
def test_the_ranks_share_all_samples(llama: Family, tasks: list[list[list[int]]], batch_tokens: int) -> None:
    decoder = trace(llama.config)
    ranks = [Ranks(index, 3) for index in range(3)]
    shares = [share(decoder, tasks, batch_tokens, rank) for rank in ranks]
    assert sum(shares) == sum(map(len, tasks))
    if batch_tokens:
        batches = make_batches(tasks, batch_tokens)
        assert shares == [sum(len(batch.rows) for batch in of_rank(batches, rank)) for rank in ranks]


# Rotary embeddings that depend on the length, in every architecture that has rotary embeddings


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


# ALiBi stands for positions, GraniteMoeHybrid has none unless told so, Phi-3 knows longrope alone.
ROTARY = [
    name
    for name in (*families.ARCHITECTURES, *families.UNSPLIT)
    if getattr(families.config_of(name), "rope_parameters", None)
    and not name.startswith(("falcon_alibi", "granite_", "phi3"))
]


@pytest.mark.parametrize(
    ("architecture", "rope_type"),
    [*((name, "dynamic") for name in ROTARY), *((name, "longrope") for name in ("phi3", "llama", "gemma3", "glm4"))],
)
@torch.no_grad()
def test_no_sample_sees_the_length_of_another(architecture: str, rope_type: str) -> None:
    """Each sample's hidden states after the last layer are those of a plain model that has run nothing before."""
    model = families.random_model(stretched(architecture, rope_type))
    model.config.architectures = [type(model).__name__]
    decoder = trace(copy.deepcopy(model.config))
    samples = [torch.arange(length).add(5).tolist() for length in (3, 20, 6, 20)]
    batches = decoder_batches(decoder, [samples], 1000)
    assert len(batches) == 3
    streams = Streams(decoder, [[Source(model)]], batches, Ranks())
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
