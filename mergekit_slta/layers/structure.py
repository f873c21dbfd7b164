"""Find how a decoder layer splits into branches by following what its modules add to the residual stream.

Nothing here knows an architecture by name: one run of the layer on two tokens shows which children make the summands
of its output, what each child reads, and which child mixes tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.probe import trace
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.residual import INPUT


@dataclass(frozen=True)
class LayerStructure:
    """How a decoder layer splits into an attention (or other token mixing) and an MLP branch.

    Attributes:
        branches: the direct children of the layer in each branch, ``attn`` and ``mlp``, norms included; a child that
            feeds both branches is in both.
        mlp_reads: the children whose outputs the residual stream sums where the MLP branch reads it.
        mixer: the child in the attention branch that lets tokens see each other.
    """

    branches: dict[str, frozenset[str]]
    mlp_reads: frozenset[str]
    mixer: str


def structure(decoder: Decoder, layer: int) -> LayerStructure:
    """How the layer splits into branches; layers of the same kind are traced once.

    Raises:
        SltaError: the layer does not split into an attention and an MLP branch.
    """
    found = decoder.once_per_kind(layer, _structure)
    if found is None:
        raise SltaError(
            f"The levels attn_mlp, head_mlp and linear do not apply to {decoder.name}. "
            f"{_unsplit(decoder, layer)}: use 'level: layer'."
        )
    return found


def split_problem(decoder: Decoder, layer: int) -> str | None:
    """A sentence without its full stop if the layer does not split into an attention and an MLP branch.

    Raises:
        SltaError: the model's layers cannot be run one at a time.
    """
    return _unsplit(decoder, layer) if decoder.once_per_kind(layer, _structure) is None else None


def _unsplit(decoder: Decoder, layer: int) -> str:
    kind = type(decoder.layers[layer]).__name__
    return f"Layer {layer} ({kind}) does not split into an attention and an MLP branch"


@torch.no_grad()
def _structure(decoder: Decoder, layer: int) -> LayerStructure | None:
    found = _branches(trace(decoder, layer))
    owners = {name.partition(".")[0] for name in decoder.layers[layer].state_dict()}
    return found if found is not None and owners <= found.branches["attn"] | found.branches["mlp"] else None


def _branches(run: LayerRun) -> LayerStructure | None:
    """Follow each summand of the layer's output back to where its branch reads the residual stream.

    Returns None if these are not an attention and an MLP branch.
    """
    branches: dict[str, frozenset[str]] = {"attn": frozenset(), "mlp": frozenset()}
    entries: dict[str, set[frozenset[str]]] = {"attn": set(), "mlp": set()}
    for source in run.terms or {}:
        chain, entry = _chain(source, run.reads)
        branch = "attn" if chain & run.mixers else "mlp"
        branches[branch] |= chain
        entries[branch].add(entry)
    mixers = branches["attn"] & run.mixers
    added = {source for source in run.terms or {} if source in branches["attn"]}
    if (
        len(mixers) != 1
        or entries["attn"] != {frozenset({INPUT})}
        or entries["mlp"] not in ({frozenset({INPUT})}, {frozenset({INPUT, *added})})
    ):
        return None
    return LayerStructure(branches, entries["mlp"].pop(), next(iter(mixers)))


def _chain(source: str, reads: Mapping[str, frozenset[str]]) -> tuple[frozenset[str], frozenset[str]]:
    """The children from ``source`` back to the residual stream, and the stream's sources there."""
    chain = {source}
    frontier = [source]
    entry: frozenset[str] = frozenset()
    while frontier:
        read = reads.get(frontier.pop(), frozenset())
        if INPUT in read or not read:
            entry |= read
            continue
        frontier.extend(read - chain)
        chain |= read
    return frozenset(chain), entry
