"""The processes that ``torchrun`` started, or this single process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist

from mergekit_slta.errors import SltaError
from mergekit_slta.models.layout import silenced

PATIENCE = timedelta(days=1)  # while one rank merges adapters; torchrun itself ends all of them when one has failed


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the work."""

    index: int = 0  # of this process
    count: int = 1  # of all processes

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.index == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks in place, in the order of the ranks, so that all get equal sums."""
        if self.count > 1:
            where = "cuda" if dist.get_backend() == "nccl" else "cpu"
            mine = tensor.to(where, copy=True, memory_format=torch.contiguous_format)
            tensor.zero_()
            for rank in range(self.count):
                part = mine if rank == self.index else torch.empty_like(mine)
                dist.broadcast(part, rank)
                tensor += part.to(tensor.device)
        return tensor

    def gather(self, number: float) -> list[float]:
        """Every rank's number, in the order of the ranks; waits for all ranks."""
        numbers = torch.zeros(self.count, dtype=torch.float64)
        numbers[self.index] = number
        return self.sum(numbers).tolist()

    def require_equal(self, number: int, place: Path) -> None:
        """Refuse, on all ranks, if they have not found the same ``number`` of things at a ``place`` on the disk."""
        if len(set(self.gather(number))) > 1:
            raise SltaError(f"The processes see different files in {place}: name a folder that all of them share.")

    @contextlib.contextmanager
    def one_refusal(self) -> Iterator[None]:
        """At the end of the block all ranks end if one has refused, and the first of these prints why.

        They end by ``click.exceptions.Exit``, a single process by its refusal.
        """
        refusal = None
        try:
            yield
        except click.ClickException as error:
            if self.count == 1:
                raise
            refusal = error
        refusing = self.gather(refusal is not None)
        if any(refusing):
            if refusal is not None and self.index == refusing.index(True):
                refusal.show()
            self.wait()  # torchrun ends the others as soon as one has ended
            raise click.exceptions.Exit(1)

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextlib.contextmanager
def joined(device: str | torch.device) -> Iterator[Ranks]:
    """The processes of ``torchrun``, joined until the end of the block if they were not joined before.

    They speak through nccl if each computes on a GPU of its own, else gloo; all but the first are silent.
    """
    started = "RANK" in os.environ or (dist.is_available() and dist.is_initialized())
    count = int(os.environ.get("WORLD_SIZE", "1")) if started else 1  # scripts of clusters set it for other commands
    if joins := count > 1 and not dist.is_initialized():  # only then: some builds of torch do not have it
        enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", count))
        own_gpus = str(device).startswith("cuda") and enough
        gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if own_gpus else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        dist.init_process_group("nccl" if own_gpus else "gloo", timeout=PATIENCE, device_id=gpu)
    ranks = Ranks(dist.get_rank(), count) if count > 1 else Ranks()
    try:
        with contextlib.nullcontext() if ranks.first else silenced(logging.WARNING):
            yield ranks
    except BaseException as error:
        # After one rank's error nccl would wait here for the others, which wait for this one.
        joins &= isinstance(error, click.exceptions.Exit)
        raise
    finally:
        if joins:
            dist.destroy_process_group()
