"""How samples are put together into batches."""

from __future__ import annotations

import random

import pytest
import torch
from support import families
from support.families import Family

from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import fitting_batch, make_batches, share
from mergekit_slta.layers.trace import trace


@pytest.fixture
def tasks() -> list[list[list[int]]]:
    drawn = random.Random(0)
    return [[[drawn.randint(1, 50) for _ in range(drawn.randint(1, 30))] for _ in range(n)] for n in (9, 1, 5)]


@pytest.mark.parametrize("batch_tokens", [1, 30, 64, 10000])
def test_every_sample_is_in_one_batch_of_its_own_task(tasks: list[list[list[int]]], batch_tokens: int) -> None:
    samples = [(task, ids) for task, found in enumerate(tasks) for ids in found]
    batches = make_batches(tasks, batch_tokens)
    assert len(batches) == {1: len(samples), 10000: len(tasks)}.get(batch_tokens, len(batches))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(samples)))
    for batch in batches:
        assert batch.token_ids.numel() <= batch_tokens or len(batch.rows) == 1
        assert batch.token_ids.shape == (len(batch.rows), max(batch.lengths))
        for row, length, ids in zip(batch.rows, batch.lengths, batch.token_ids, strict=True):
            task, expected = samples[row]
            assert task == batch.task
            assert ids[:length].tolist() == expected


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


def test_the_ranks_share_all_samples(llama: Family, tasks: list[list[list[int]]]) -> None:
    decoder = trace(llama.config)
    ranks = [Ranks(index, 3) for index in range(3)]
    assert sum(share(decoder, tasks, rank) for rank in ranks) == sum(map(len, tasks))
