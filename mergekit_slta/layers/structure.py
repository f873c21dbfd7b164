"""Find how a decoder layer splits into branches by following what its modules make of the residual stream.

Nothing here knows an architecture by name: one run of the layer on two tokens shows which children make the output,
what each of them reads, and which of them mixes tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.probe import replays, token_mixers, trace
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.residual import INPUT

# The node of the graph of a layer's children that is its output.
OUTPUT = "output"

Nodes = frozenset[str]


@dataclass(frozen=True)
class LayerStructure:
    """How a decoder layer splits into an attention (or other token mixing) branch and an MLP branch.

    Attributes:
        branches: the direct children of the layer in each branch, ``attn`` and ``mlp``, norms included; a child, or a
            tensor of the layer's own, that feeds both branches is in both. A layer that only mixes tokens, or never
            mixes them, has one branch.
        mixers: the children in the attention branch that let tokens see each other.
        boundary: the child whose output is all that the MLP branch reads, where the attention branch ends with a norm
            of the residual stream; None where its contribution is added to the stream.
    """

    branches: Mapping[str, Nodes]
    mixers: Nodes
    boundary: str | None = None

    def only(self, branch: str) -> Nodes:
        """The children that serve no other branch."""
        return self.branches[branch].difference(*(own for name, own in self.branches.items() if name != branch))


def structure(decoder: Decoder, layer: int) -> LayerStructure | None:
    """How the layer splits into branches, None where these cannot be told apart; layers of one kind are traced once.

    Raises:
        SltaError: the model's layers cannot be run one at a time.
    """
    return decoder.once_per_kind(layer, _structure)


@torch.no_grad()
def _structure(decoder: Decoder, layer: int) -> LayerStructure | None:
    run = trace(decoder, layer)
    owners = frozenset(name.partition(".")[0] for name in decoder.layers[layer].state_dict())
    if run.repeated & owners:  # what such a child returned is known of one call only
        return None
    found = _branches(run, token_mixers(decoder, layer))
    if found is None:
        return None
    # What the layer uses by itself, or never.
    unseen = owners.difference(*found.branches.values()) | owners & run.opened
    branches = {name: children | unseen for name, children in found.branches.items() if children & owners}
    found = LayerStructure(branches or {"mlp": unseen}, found.mixers, found.boundary if len(branches) > 1 else None)
    return found if replays(decoder, layer, [found.only(branch) for branch in found.branches]) else None


def _branches(run: LayerRun, mixers: Nodes) -> LayerStructure | None:
    """Sort the children that the output depends on; None where attention and MLP cannot be told apart.

    What the residual stream holds after the first children that mix tokens is either a sum with what it held before,
    which the MLP branch reads and adds to, or the output of a child through which everything goes (a norm of the sum).
    """
    reads = {**run.reads, OUTPUT: run.sources}
    before: dict[str, set[str]] = {}
    for node, read in reads.items():  # in the order of the calls
        before[node] = {node}.union(*(before.get(source, {source}) for source in read))
    live = before[OUTPUT] - {INPUT, OUTPUT}
    first = {node for node in mixers & live if not before[node] & mixers - {node}}
    if not first:
        return LayerStructure({"mlp": frozenset(live)}, frozenset())
    leading = set().union(*(before[node] for node in first)) - {INPUT}
    after = {node for node in reads if before[node] & first}
    gates = [node for node in run.reads if node in live and not _avoids(node, reads)]
    boundary = next((node for node in gates if node in after and first <= before[node]), None)
    if boundary is not None:
        attention = before[boundary] - {INPUT}
        mlp = live - attention
    else:
        roots = {INPUT, *(node for node in gates if node not in after)}
        merged = {node for node in after if reads[node] & after and reads[node] & roots}
        if OUTPUT not in merged:
            return None
        parallel = live - after - leading
        mlp = {node for node in live & after if before[node] & merged} | parallel
        attention = leading | (live & after - mlp)
        mlp |= set().union(*(before[node] for node in parallel)) - {INPUT}
    branches = {"attn": frozenset(attention), "mlp": frozenset(mlp)}
    return LayerStructure(branches, frozenset(first), boundary)


def _avoids(node: str, reads: Mapping[str, Nodes]) -> bool:
    """Whether the output depends on the layer's input in a way that does not go through ``node``."""
    seen, frontier = {node}, [OUTPUT]
    while frontier:
        for source in reads.get(frontier.pop(), frozenset()) - seen:
            if source == INPUT:
                return True
            seen.add(source)
            frontier.append(source)
    return False
