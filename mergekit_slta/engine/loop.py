"""The loop over a model's layers that calibration, feature merges, linearity and scores share.

1. Embed all samples: their hidden states wait in ``Streams``.
2. For each layer, read it of every model.
   - A layer that an earlier run has finished: load its file, and set the layer's output on every stream.
   - Any other layer: measure or solve it on every batch, set its output on every stream, and write its file.
3. Finish with the hidden states after the last layer, for the output head.

One layer of each model is in memory at a time. When the memory of a single process runs out, the loop begins again with
half the token positions in a batch. A method is a ``LayerMethod``; the loop knows none of them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Generic, TypeVar

import click
import torch
from tqdm import tqdm
from transformers.integrations import sdpa_attention

from mergekit_slta.engine.partial import Partial
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, Tasks, fitting_batch, make_batches, takes_little
from mergekit_slta.errors import MachineError, SltaError, is_out_of_memory
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import routed_tensors
from mergekit_slta.models.checkpoint import Checkpoint, Source, Tensors

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")
Progress = Callable[[int], object]  # told how many of this process's samples have passed another step of a layer
SECONDS_BETWEEN_LINES = 30  # of progress without a terminal, and between two looks at a bar's time
BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining} {desc}"  # of a long description, tqdm cuts the end off


@dataclass
class LayerMethod(ABC, Generic[Result]):
    """A method: the streams that it follows, and its computation in each layer."""

    decoder: Decoder  # the models'
    models: Sequence[Checkpoint]  # whose layers are read
    tasks: Tasks  # the token ids of each task's samples; there may be more tasks than experts
    ranks: Ranks  # the processes that share the batches
    stage = ""  # what of a layer is at hand, as the end of a line on progress

    @property
    def steps(self) -> int:
        """How many steps a sample takes in all, each of which is reported; by default one in each layer."""
        return len(self.decoder)

    def sources(self) -> Sequence[Sequence[Source]]:
        """For each hidden-state stream, the model that embeds the samples of each task; by default the first."""
        return [[self.models[0]] * len(self.tasks)]

    @abstractmethod
    def take_layer(self, layer: int, tensors: Sequence[Tensors], streams: Streams, report: Progress) -> Tensors:
        """Run a layer on every batch, and set its output on every stream; called again after memory ran out.

        From the layer's tensors of each model; returns those of its file, the same on all ranks.
        """

    def repeat_layer(
        self, layer: int, tensors: Sequence[Tensors], stored: Tensors, streams: Streams, report: Progress
    ) -> None:
        """Set the output of a finished layer on every stream, from the tensors ``stored`` in the layer's file."""
        raise NotImplementedError("a method whose layers are written repeats them")

    @abstractmethod
    def finish(self, streams: Streams, report: Progress) -> Result:
        """The result, with the hidden states after the last layer at hand."""


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products and convolutions exactly while the block runs: small changes of features need it.

    Torch rounds no factors to TF32, as it does on a GPU in convolutions by default and in products on demand, nor to
    bfloat16, as it does on a CPU on demand. Where heads share keys, these are repeated on a GPU: without that, torch's
    attention in float32 has the scores of all pairs of tokens in memory there.
    """
    backends: Any = torch.backends
    cuda, cudnn, mkldnn, shares = backends.cuda.matmul, backends.cudnn, backends.mkldnn, sdpa_attention.use_gqa_in_sdpa
    with contextlib.ExitStack() as changed:

        def change(owner: Any, name: str, value: object) -> None:
            changed.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for kind in ("cpu", "cuda", "mps"):  # a caller's may be on
            changed.enter_context(torch.autocast(kind, enabled=False))
        change(sdpa_attention, "use_gqa_in_sdpa", lambda mask, k, v: k.device.type == "cpu" and shares(mask, k, v))
        with contextlib.suppress(RuntimeError):  # it was set by torch's newer interface, which refuses to be mixed
            change(cudnn, "allow_tf32", False)
        if not hasattr(cuda, "fp32_precision"):  # a torch without the newer interface
            change(cuda, "allow_tf32", False)
        else:
            for owner in (cuda, cudnn.conv, mkldnn.matmul, mkldnn.conv):
                if owner.fp32_precision in ("tf32", "bf16"):  # perhaps from a setting for all backends
                    change(owner, "fp32_precision", "ieee")
        yield


@torch.no_grad()
@exact_products()
def pass_layers(
    method: LayerMethod[Result],
    doing: str = "",  # what the progress bar says is done
    *,
    partial: Partial | None = None,  # the folder of finished layers, which are not computed again
    quiet: bool = True,  # show no progress bar
) -> Result:
    """Run all samples through the layers, one layer after the other."""
    device, positions = method.decoder.device, fitting_batch(method.decoder)
    longest = max(len(token_ids) for samples in method.tasks for token_ids in samples)
    while True:
        try:
            return _run(method, positions, doing, partial, quiet)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if method.ranks.count > 1 or positions <= longest:
                raise _does_not_fit(method, max(positions, longest)) from error
        positions //= 2
        LOG.warning("Out of memory on %s: restarting with %d token positions at once", device, positions)
        gc.collect()  # not above, where the error still holds what the run had in memory
        if device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps freed blocks in sizes that no longer fit


def _does_not_fit(method: LayerMethod[Result], positions: int) -> SltaError:
    """What memory must hold at once, and what makes it less."""
    device = method.decoder.device
    fixes = ["use fewer prompts ('samples') or shorter ones ('max_tokens')"]
    fixes += ["start fewer processes"] if method.ranks.count > 1 else []
    fixes += ["compute without a GPU"] if device.type != "cpu" else []
    return MachineError(
        f"The memory of {device} does not hold a layer of {len(method.models)} models, the hidden states of all "
        f"prompts and a batch of {positions} token positions: {', or '.join(fixes)}."
    )


def _run(method: LayerMethod[Result], positions: int, doing: str, partial: Partial | None, quiet: bool) -> Result:
    """The loop, with at most ``positions`` token positions at once."""
    decoder, ranks = method.decoder, method.ranks
    finished: set[int] = set()
    if partial is not None:
        finished = partial.finished(len(decoder))
        ranks.require_equal(len(finished), partial.folder)
    if ranks.count > 1:  # each has a part
        positions = min(positions, sum(len(row) for task in method.tasks for row in task) // ranks.count)
    batches = make_batches(method.tasks, positions, decoder)[ranks.index :: ranks.count]
    total = method.steps * sum(len(batch.rows) for batch in batches)
    with progress_bar(doing, method.models, total, quiet) as tell:
        read, streams = read_layers(decoder, method.models), Streams(decoder, method.sources(), batches)

        def report(samples: int) -> None:
            tell(f"{min(streams.layer + 1, len(decoder))} of {len(decoder)} layers{method.stage}", samples)

        for layer in range(len(decoder)):
            # The tensors get no name here, so that they are freed before the next layer's are read.
            if partial is not None and layer in finished:
                method.repeat_layer(layer, next(read), partial.load(layer), streams, report)
            else:
                result = method.take_layer(layer, next(read), streams, report)
                if partial is not None and ranks.first:
                    partial.write(layer, result)
                del result
            streams.layer += 1
        return method.finish(streams, report)


def read_layers(decoder: Decoder, models: Sequence[Checkpoint]) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The tensors of one layer of each model after the other, float32 on the decoder's device.

    Tensors of a mixture's routed experts are read whenever they are used, unless a GPU has memory for all experts of
    one layer.
    """
    for layer, names in enumerate(decoder.layer_tensors):
        stacks = {key: tensor.shape for key, tensor in routed_tensors(decoder.layers[layer]).items()}
        nbytes = 4 * (len(models) + 1) * sum(map(math.prod, stacks.values()))
        if takes_little(decoder.device, nbytes, share=1 / 4):
            stacks = {}
        # The list gets no name here, so that it is freed before the next layer is read.
        yield [model.read(names, decoder.model, decoder.device, stacks) for model in models]


# What is shown meanwhile


@contextlib.contextmanager
def progress_bar(doing: str, models: Iterable[object], total: int, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Show the share of the work done; yield a function to call with what is at hand, and the steps just taken.

    Every half minute, even within a step, the bar shows the time anew; without a terminal, a line is printed.
    """
    at_hand, done, ended = f"{doing}: loading {', '.join(Path(str(model)).name for model in models)}", 0, Event()
    with tqdm(total=total, desc=at_hand, bar_format=BAR, leave=False, smoothing=0, disable=quiet or None) as bar:

        def show() -> None:
            while not ended.wait(SECONDS_BETWEEN_LINES):
                if bar.disable:
                    click.echo(f"{time.strftime('%H:%M:%S')} {at_hand}, {done / max(total, 1):.0%}", err=True)
                else:
                    bar.refresh()

        def progress(now: str, steps: int) -> None:
            nonlocal at_hand, done
            at_hand, done = f"{doing}: {now}", done + steps
            bar.set_description_str(at_hand, refresh=False)
            bar.update(steps)

        if not quiet:
            Thread(target=show, daemon=True).start()
        try:
            yield progress
        finally:
            ended.set()
