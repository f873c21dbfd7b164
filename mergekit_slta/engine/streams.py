"""The samples in batches, and what of them waits between layers and between runs of a layer.

A batch holds samples of one task, and each process takes whole batches. A stream holds every sample's hidden states, in
one model for each task: the base model, an expert or a merge. Neither knows what is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

from mergekit_slta.layers.calls import embed, made_up_edges
from mergekit_slta.layers.decoder import Decoder, LayerCall, LayerRun
from mergekit_slta.layers.maps import routed_tensors
from mergekit_slta.models.checkpoint import Source, Tensors

CPU_BATCH_TOKENS = 2048
# Wider layers run on fewer tokens: a processor computes faster than a system hands out memory for larger features.
CPU_BATCH_ELEMENTS = 2**22
LEAST_CPU_BATCH_TOKENS = 256
GPU_BATCH_TOKENS = 16384

OUTPUT_BYTES = 2**31  # the most that waiting outputs of a layer's modules take, on a CPU; an eighth of a GPU's memory
PREFIX_TOLERANCE = 1e-5  # how much rounding may change a rotary frequency

Tasks = Sequence[Sequence[Sequence[int]]]  # the token ids of each task's samples


class Batch(NamedTuple):
    """Samples of one task that run together, right-padded to the longest."""

    task: int  # the index of the task that the samples come from
    rows: tuple[int, ...]  # the samples' numbers among all tasks' samples, ``B`` in all
    token_ids: torch.Tensor  # [B, S] int64
    lengths: tuple[int, ...]  # the samples' numbers of tokens

    def unpadded(self, features: torch.Tensor) -> torch.Tensor:
        """The features [n, D] of the tokens, unpadded, from [B, S, D] or [B * S, D]; [n, m * D] from [B, S, m, D]."""
        if features.ndim > 3 and features.shape[1] == self.token_ids.shape[1]:
            features = features.flatten(2)
        flat = features.reshape(-1, features.shape[-1])
        if min(self.lengths) == max(self.lengths):
            return flat
        lengths = torch.tensor(self.lengths)
        return flat[(torch.arange(int(max(lengths))) < lengths[:, None]).flatten().to(flat.device)]


def make_batches(tasks: Tasks, batch_tokens: int, decoder: Decoder | None = None) -> list[Batch]:
    """Group samples into batches of at most ``batch_tokens`` positions, padding included, longest first.

    A batch never mixes tasks, so that the batches of a task do not depend on the others. A longer sample runs alone.
    They hold samples of one length only where padding would change a sample's features in the ``decoder``, if any.
    """
    batches, offset = list[Batch](), 0
    for task, samples in enumerate(tasks):
        order = sorted(range(len(samples)), key=lambda index: -len(samples[index]))
        padded = decoder is None or not padding_matters(decoder, [*map(len, samples)])
        while order:
            count = max(1, batch_tokens // len(samples[order[0]]))
            taken = [i for i in order[:count] if padded or len(samples[i]) == len(samples[order[0]])]
            order = order[len(taken) :]
            token_ids = pad_sequence([torch.tensor(samples[index]) for index in taken], batch_first=True)
            lengths = tuple(len(samples[index]) for index in taken)
            batches.append(Batch(task, tuple(offset + index for index in taken), token_ids, lengths))
        offset += len(samples)
    return batches


def fitting_batch(decoder: Decoder) -> int:
    """The number of token positions in a batch, while memory lasts."""
    if decoder.device.type not in ("cpu", "mps"):  # which swaps where it has too little memory
        return GPU_BATCH_TOKENS
    layers = [decoder.layers[layer] for layer in decoder.one_of_each_kind]
    if any(map(routed_tensors, layers)):  # whose experts are read again for every batch
        return CPU_BATCH_TOKENS
    widest = max(max(tensor.shape) for layer in layers for tensor in layer.state_dict().values() if tensor.ndim > 1)
    return min(CPU_BATCH_TOKENS, max(LEAST_CPU_BATCH_TOKENS, CPU_BATCH_ELEMENTS // widest))


@torch.no_grad()
def padding_matters(decoder: Decoder, lengths: Collection[int]) -> bool:
    """Whether samples of these lengths may get other features in a right-padded batch than alone.

    They do if a token sees later tokens, if rotary embeddings depend on the length, or if layers pass more than hidden
    states to later layers, because the padding cannot be found in that.
    """
    ordered = sorted({max(length, 2) for length in lengths})  # one token alone shows no positions
    if len(set(lengths)) > 1 and (decoder.form.state or not decoder.form.causal):
        return True
    if len(ordered) < 2:
        return False
    edges = made_up_edges(decoder)

    def numbers(length: int) -> list[torch.Tensor]:
        """The tensors in the layers' calls that are neither masks, which may be larger than needed, nor indices."""
        calls = embed(decoder, torch.zeros(1, length, dtype=torch.int64), edges)[1]
        leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return [tensor for tensor in tensors.values() if tensor.is_floating_point() or tensor.is_complex()]

    # Frequencies that depend on the length change at some length. Comparing the longest sample with the second
    # longest and the shortest shows whether that length lies between them: where both have the same tokens.
    longest = numbers(ordered[-1])
    for short in {ordered[0], ordered[-2]}:
        shorter = numbers(short)
        if [tensor.ndim for tensor in shorter] != [tensor.ndim for tensor in longest]:
            return True
        for one, whole in zip(shorter, longest, strict=True):
            same = whole[tuple(map(slice, one.shape))]
            if same.shape != one.shape or not torch.allclose(one, same, rtol=PREFIX_TOLERANCE, atol=PREFIX_TOLERANCE):
                return True
    return False


def read_edges(decoder: Decoder, model: Source, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors outside the layers to the device, by the model's names."""
    return model.read({name: name for name in names}, decoder.model, decoder.device)


def takes_little(device: torch.device, nbytes: int, share: float) -> bool:
    """Whether so many bytes take at most a share of what others leave of a GPU; false on every other device."""
    if device.type != "cuda":
        return False
    return nbytes <= share * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


def waiting_bytes(tokens: int, width: int, streams: int, outputs: int = 0) -> int:
    """How many bytes wait in ``Streams`` at most, between two runs of a layer, on a CPU.

    They are the hidden states of all samples, and of each token so many numbers of modules' ``outputs``; beyond
    ``OUTPUT_BYTES``, modules run again.
    """
    number = torch.float32.itemsize
    return number * tokens * width * streams + min(number * tokens * outputs, OUTPUT_BYTES)


class Streams:
    """All that waits for its next use, by stream and batch: between layers, and between two runs of one layer.

    Between layers, these are the hidden states before the next layer, and the tensors that earlier layers have handed
    on. They wait on a GPU that has memory for them, else on the host. ``run_layer`` puts the layer's output in their
    place; a method may fetch a batch's ``hidden`` states and the model's ``call`` of the layer before.

    ``run_layer`` may also run the layer as far as a module only. The outputs of modules inside the layer then wait
    where the layer is computed, so that the next run goes on from there. They take a bounded part of the memory:
    modules whose outputs find no room run again.

    ``sources`` are for each stream the models that embed the samples of each task, ``batches`` this process's.
    """

    def __init__(self, decoder: Decoder, sources: Sequence[Sequence[Source]], batches: Sequence[Batch]) -> None:
        self.decoder = decoder
        self.batches = batches
        self.tokens = sum(sum(batch.lengths) for batch in batches)  # of this process, without those of the padding
        self.layer = 0  # the index of the next layer
        positions = sum(batch.token_ids.numel() for batch in batches)
        width = decoder.model.config.get_text_config().hidden_size
        stays = takes_little(decoder.device, waiting_bytes(positions, width, len(sources)), share=1 / 8)
        self.place = decoder.device if stays else torch.device("cpu")  # where tensors of all samples wait
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._output_bytes = 0
        masks: list[torch.Tensor] = []
        for stream, models in enumerate(sources):
            for model in dict.fromkeys(models):
                edges = read_edges(decoder, model, decoder.embed_tensors)
                for number, batch in enumerate(self.batches):
                    if models[batch.task] is model:
                        hidden, calls = embed(decoder, batch.token_ids, edges)
                        calls = with_shared_masks(calls, masks)
                        self._waiting[stream, number] = _Waiting(hidden.to(self.place), calls)

    def batches_of(self, task: int) -> Iterator[tuple[int, Batch]]:
        """This process's batches of one task, with their numbers."""
        return ((number, batch) for number, batch in enumerate(self.batches) if batch.task == task)

    def hidden(self, stream: int, number: int) -> torch.Tensor:
        """A copy of a batch's hidden states [B, S, D], on the device that computes."""
        return self._waiting[stream, number].hidden.to(self.decoder.device, copy=True)

    def call(self, stream: int, number: int) -> LayerCall:
        """The model's call of the next layer on a batch, with the tensors that the earlier layers have handed on."""
        waiting = self._waiting[stream, number]
        state = {path: tensor.to(self.decoder.device, copy=True) for path, tensor in waiting.state.items()}
        return waiting.calls[self.layer].with_state(state)

    def run_layer(
        self,
        stream: int,
        number: int,  # the batch's
        tensors: Tensors,  # the layer's; of modules that have returned since the layer began they are not used again
        *,
        until: str | None = None,  # the module at whose call the run ends
        inputs_of: Collection[str] = (),  # the modules whose inputs are recorded, beside that one
        outputs_of: Collection[str] = (),
    ) -> LayerRun:
        """Run the next layer on a batch of a stream, to its end, which sets its output, or as far as a module.

        The outputs of children of the layer that are in ``outputs_of``, and of modules in them, are recorded and wait
        for the layer's next run; those in a child are deleted when the child has returned.
        """
        waiting = self._waiting[stream, number]
        run = self.decoder.run(
            self.layer,
            tensors,
            self.hidden(stream, number),
            self.call(stream, number),
            until=until,
            inputs_of=inputs_of,
            outputs_of=outputs_of,
            replay=waiting.outputs,
        )
        # A child that is replayed hands nothing on again.
        waiting.entered |= {path: tensor.to(self.place) for path, tensor in run.state.items()}
        self._output_bytes -= _nbytes(waiting.outputs)
        waiting.outputs = {}
        if until is None:
            waiting.hidden = run.output.to(self.place)
            waiting.state |= waiting.entered
            waiting.entered = {}
            return run
        complete = {name for name in run.outputs if name in outputs_of and "." not in name}
        for name, output in run.outputs.items():
            inside_complete = name not in complete and name.partition(".")[0] in complete
            total, device = self._output_bytes + _nbytes(output), self.decoder.device
            fits = takes_little(device, total, share=1 / 8) if device.type == "cuda" else total <= OUTPUT_BYTES
            if name in outputs_of and not inside_complete and fits:
                waiting.outputs[name] = output
                self._output_bytes = total
        return run

    def final(self) -> Iterator[tuple[int, dict[int, torch.Tensor]]]:
        """Each sample's row, and its hidden states [S, D] of every stream after the last layer."""
        streams = {stream for stream, _ in self._waiting}
        for number, batch in enumerate(self.batches):
            for index, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
                yield row, {stream: self._waiting[stream, number].hidden[index, :length] for stream in streams}


def with_shared_masks(calls: Sequence[LayerCall], masks: list[torch.Tensor]) -> list[LayerCall]:
    """Calls whose attention masks [b, h, S, S] are parts of ``masks``, to which those that are no part are added.

    All batches' calls wait, and a mask grows with the square of the length: with a sliding window, where torch's own
    attention is given one, 64 MB for 8,192 tokens.
    """
    known: dict[int, torch.Tensor] = {}

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim != 4 or tensor.shape[-1] != tensor.shape[-2]:  # rotary embeddings [b, S, S] are no masks
            return tensor
        if id(tensor) not in known:
            parts = (mask[tuple(map(slice, tensor.shape))] for mask in masks if mask.dtype == tensor.dtype)
            known[id(tensor)] = next((part for part in parts if torch.equal(part, tensor)), tensor)
            masks.extend([tensor] * (known[id(tensor)] is tensor))
        return known[id(tensor)]

    return [LayerCall(*tree_map_only(torch.Tensor, shared, (call.args, call.kwargs))) for call in calls]


@dataclass
class _Waiting:
    """What waits of a batch in a stream."""

    hidden: torch.Tensor  # [B, S, D]
    calls: list[LayerCall]  # by layer, without what layers hand on
    state: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)  # handed on by the layers before
    # Of the layer that is running: the outputs of its modules, and what it has handed on so far.
    outputs: dict[str, Any] = field(default_factory=dict)
    entered: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)


def _nbytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
